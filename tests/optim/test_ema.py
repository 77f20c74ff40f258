from __future__ import annotations

import pytest
import torch
from torch import nn

from ebbflow.errors import ConfigError
from ebbflow.optim.ema import RunningStatistics, WeightAverage


def test_the_average_of_the_weights_means_the_same_for_every_history() -> None:
    """Weights that stay at 1 after a start at 0: one step of 4 reference batches leaves what four steps leave."""
    ends = []
    for ratios in ([4.0], [1.0] * 4, [2.5, 1.5]):
        net = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(net.weight)
        average = WeightAverage(net, 0.9)
        nn.init.ones_(net.weight)
        for ratio in ratios:
            average.update(ratio)
        ends.append(average.state_dict()["weight"].item())
    assert ends == pytest.approx([1 - 0.9**4] * 3)


def test_the_averaged_weights_are_in_the_model_only_inside() -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    average = WeightAverage(net, 0.5)
    nn.init.ones_(net.weight)
    average.update(1.0)
    with average.swapped_in():
        assert net.weight.item() == 0.5
    assert net.weight.item() == 1.0
    other = WeightAverage(net, 0.5)
    other.load_state_dict(average.state_dict())
    assert other.state_dict()["weight"].item() == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_a_model_of_few_bits_loses_no_updates(dtype: torch.dtype) -> None:
    """Weights that stay at 1 after a start at 0: 1000 steps of one reference batch leave 1 - 0.999^1000 = 0.632."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.zeros_(net.weight)
    average = WeightAverage(net, 0.999)
    nn.init.ones_(net.weight)
    for _ in range(1000):
        average.update(1.0)
    assert average.state_dict()["weight"].item() == pytest.approx(1 - 0.999**1000, rel=1e-4)
    with average.swapped_in():
        assert net.weight.dtype == dtype
        assert net.weight.item() == pytest.approx(1 - 0.999**1000, rel=1e-2)
    assert net.weight.item() == 1.0


def test_a_state_of_fewer_bits_goes_on_in_float32() -> None:
    """Such states were saved before averages had a type of their own."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    average = WeightAverage(net, 0.5)
    average.load_state_dict({"weight": torch.full((1, 1), 0.25, dtype=torch.bfloat16)})
    assert average.state_dict()["weight"].dtype == torch.float32
    assert average.state_dict()["weight"].item() == 0.25


def test_parameters_that_are_no_fractions_are_copied() -> None:
    net = nn.Linear(1, 1)
    net.count = nn.Parameter(torch.tensor([3]), requires_grad=False)
    net.mask = nn.Parameter(torch.tensor([True]), requires_grad=False)
    average = WeightAverage(net, 0.9)
    with torch.no_grad():
        net.count.fill_(8)
        net.mask.fill_(False)
    average.update(1.0)
    assert average.state_dict()["count"].item() == 8
    assert average.state_dict()["mask"].item() is False


def test_a_part_of_one_or_more_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ema is 1; expected .* such as 0.999"):
        WeightAverage(nn.Linear(1, 1), 1.0)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (256, 0.1),  # the reference batch
        (512, 0.19),  # 1 - 0.9^2
        (128, 1 - 0.9**0.5),
        (8192, 1 - 0.9**32),  # 8192 samples: the window is long enough
        (700, 1 - 0.9 ** (700 / 256)),
    ],
)
def test_batch_norm_momentum_follows_the_batch_and_is_put_back(batch: int, expected: float) -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=None))
    with RunningStatistics(net, follow=True, undoable=False).step(batch, 256):
        assert net[0].momentum == pytest.approx(expected)
        assert net[1].momentum is None
    assert net[0].momentum == 0.1


def test_the_window_of_batch_norm_does_not_fall_below_a_thousand_samples() -> None:
    net = nn.BatchNorm1d(2)
    statistics = RunningStatistics(net, follow=True, undoable=False)
    with statistics.step(320, 16):  # 1 - 0.9^20 = 0.88 would average 364 samples; 320/1000 averages a thousand
        assert net.momentum == pytest.approx(0.32)
    with statistics.step(32, 16):  # 32/1000 is below the user's own 0.1, which stays
        assert net.momentum == pytest.approx(0.1)


def test_a_skipped_step_can_be_undone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    statistics = RunningStatistics(net, follow=False, undoable=True)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with statistics.step(4, 4):
        net(torch.full((4, 2), float("nan")))
    assert net[0].running_mean.isnan().all()
    statistics.undo()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
