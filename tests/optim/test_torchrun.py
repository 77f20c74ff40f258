"""A script under torchrun, stopped and resumed with other numbers of ranks: the same run as one that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ebbflow import ElasticOptimizer, ElasticSampler
from ebbflow.plan.batch_plan import BatchPlan
from optim.small_regression import SAMPLES, data, model, weights
from optim.torchrun_script import CASES, EPOCHS, Run, branches

SCRIPT = Path(__file__).with_name("torchrun_script.py")
LAUNCHES = ((1, 4), (3, 9), (2, 10**6))
"""(ranks, updates after which the launch stops)."""


def torchrun(ranks: int, *command: object, timeout: float = 200) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [*launch, *map(str, command)], env=environment, timeout=timeout, check=True, stdout=subprocess.PIPE, text=True
    )
    return ended.stdout


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    for ranks, updates in LAUNCHES:
        torchrun(ranks, SCRIPT, folder, updates)
    return folder


def results(folder: Path, name: str) -> list[list[dict[str, Any]]]:
    """What each rank of each launch wrote."""
    return [
        [json.loads((folder / f"{name}-{updates}-{rank}.json").read_text()) for rank in range(ranks)]
        for ranks, updates in LAUNCHES
    ]


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_with_other_ranks_is_the_run_that_never_stopped(launches: Path, name: str) -> None:
    case, found = CASES[name], results(launches, name)
    plan: Any = case.policy
    if name == "follow":  # the batches of one, three and two ranks
        size = np.repeat([1, 3, 2], [4, 5, 100])
        step = np.arange(len(size))
        plan = BatchPlan(
            first=step, workers=size, samples=8 * size, start_s=step * 1.0, step_s=np.ones(len(size)), steps=len(size)
        )
    alone = Run.of(case, plan, ddp=False).train(case, 10**6)
    rows = [row for launch in found for row in launch[0]["rows"]]
    assert [row[0] for row in rows] == [row[0] for row in alone["rows"]]
    if name == "slopes":  # the part that is left is known after five steps, and not asked for in the last one
        assert [len(row) for row in rows] == [5] * 5 + [6] * (len(rows) - 6) + [5]
    for row, expected in zip(rows, alone["rows"], strict=True):
        assert row == pytest.approx(expected, rel=1e-8)
    for launch in found:
        assert all(rank["rows"] == launch[0]["rows"] for rank in launch), "all ranks say the same, bit for bit"
        assert all(rank["weights"] == launch[0]["weights"] for rank in launch)
    torch.testing.assert_close(found[-1][0]["weights"], alone["weights"], rtol=1e-9, atol=1e-11)
    seen = Counter(tuple(sample) for launch in found for rank in launch for sample in rank["seen"])
    assert seen == Counter((epoch, i) for epoch in range(EPOCHS) for i in range(SAMPLES))


# The examples of docs/torchrun.md -------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_example_is_stopped_by_a_notice_and_learns_with_other_ranks(launches: Path) -> None:
    said = [(launches / f"ddp-{launch}.txt").read_text() for launch in range(3)]
    assert [text.partition("  ")[0] for text in said] == ["1 ranks", "3 ranks", "2 ranks"]
    accuracy = [float(text.rpartition(" ")[2]) for text in said]
    assert accuracy[0] < accuracy[2] > 0.85
    updates = sorted(int(path.name) for path in (launches / "ddp").iterdir())
    assert updates[0] < 24, "the first launch is stopped in the first epoch, of 1500 samples in steps of 64"
    assert updates[-1] == 6 * 24


@pytest.mark.process
def test_the_diff_on_the_page_leads_from_a_plain_script_that_learns_to_the_example(launches: Path) -> None:
    assert float((launches / "plain.txt").read_text().rpartition(" ")[2]) > 0.8


@pytest.mark.process
def test_a_loop_like_torchtitans_ends_with_the_loss_of_one_rank(launches: Path) -> None:
    alone = (launches / "titan-alone.txt").read_text().split()
    stopped = [(launches / f"titan-{launch}.txt").read_text().split() for launch in range(3)]
    assert [(words[0], words[3]) for words in stopped] == [("1", "5"), ("3", "11"), ("2", "27")]
    assert alone[2:4] == ["step", "27"]  # three epochs of 205 blocks in steps of 24
    assert float(stopped[-1][-1]) == pytest.approx(float(alone[-1]), rel=1e-4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_before_the_first_step_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    """A first step of SGD with dampening differs from one whose momentum exists and is zero."""

    def fresh() -> tuple[nn.Module, ElasticOptimizer]:
        net, sampler = model(), ElasticSampler(SAMPLES, 3, local_batch=8)
        inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, dampening=0.5)
        return net, ElasticOptimizer(inner, base_batch=8, sampler=sampler)

    def first_step(net: nn.Module, optimizer: ElasticOptimizer) -> torch.Tensor:
        (x, y), sampler = data(), optimizer.sampler
        assert sampler is not None
        for indices, _ in zip(sampler, range(3), strict=False):
            nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
            optimizer.step()
        return weights(net)

    _, saved = fresh()
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert not saved.inner.state, "saving changes nothing"
    net, loaded = fresh()
    dcp.load({"optimizer": loaded}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert torch.equal(first_step(net, loaded), first_step(*fresh()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_parameter_that_had_no_gradient_yet_is_saved_and_begins_as_if_nothing_had_been_saved(tmp_path: Path) -> None:
    """Its first step of SGD with dampening differs from one whose momentum exists and is zero."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(model() for _ in range(2))
            self.used = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.heads[self.used](x)
            return output

    def made() -> tuple[TwoHeads, ElasticOptimizer]:
        net, sampler = TwoHeads(), ElasticSampler(SAMPLES, 3, local_batch=8)
        inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, dampening=0.5)
        return net, ElasticOptimizer(inner, base_batch=8, sampler=sampler)

    def step(net: nn.Module, optimizer: ElasticOptimizer) -> None:
        (x, y), sampler = data(), optimizer.sampler
        assert sampler is not None
        for indices, _ in zip(sampler, range(3), strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
            optimizer.step()

    net, optimizer = made()
    step(net, optimizer)
    held = len(optimizer.inner.state)
    dcp.save({"net": net, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert len(optimizer.inner.state) == held, "saving changes nothing"
    other, resumed = made()
    dcp.load({"net": other, "optimizer": resumed}, checkpoint_id=tmp_path / "saved", no_dist=True)
    for each, its in ((net, optimizer), (other, resumed)):
        each.used = 1
        step(each, its)
    assert torch.equal(weights(net), weights(other))


# Three ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checks(launches: Path) -> list[dict[str, Any]]:
    """What each of three ranks found in the checks of the script."""
    return [json.loads((launches / f"checks-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("forgotten model", "DistributedDataParallel changes them: give it to ElasticOptimizer as model="),
        ("forgotten model with views", "DistributedDataParallel changes them: give it to ElasticOptimizer as model="),
        ("different positions", "the ranks are at different steps"),
        ("other ranks", "the sampler is for rank 0 of 2, but this process is rank"),
        ("other seeds", "other settings than rank 0"),
        ("other rates", "other settings than rank 0"),
        ("static graph", "the DistributedDataParallel has static_graph=True"),
        ("accumulating", "accumulation is 2, but with 3 ranks step() takes each micro-batch by itself"),
    ],
)
def test_what_would_train_wrongly_is_refused_on_every_rank(checks: list[dict[str, Any]], name: str, text: str) -> None:
    assert [text in found[name] for found in checks] == [True] * 3, [found[name] for found in checks]


@pytest.mark.process
def test_a_rank_with_other_settings_says_which(checks: list[dict[str, Any]]) -> None:
    assert "rank 2 has other settings than rank 0 (seed is 2 here and 0 there)" in checks[2]["other seeds"]
    assert "rank 1 has other settings than rank 0 (lr of group 0 is 0.02 here and 0.01" in checks[1]["other rates"]
    assert checks[0]["other rates"].startswith("2 of 3 ranks have other settings than rank 0; their own messages say")


@pytest.mark.process
def test_ranks_with_the_same_rule_of_ones_own_are_not_told_apart_by_where_it_lies(checks: list[dict[str, Any]]) -> None:
    assert [found["own rules"] for found in checks] == ["no error"] * 3


@pytest.mark.process
def test_the_optimizer_that_takes_the_place_of_another_one_combines_the_gradients(checks: list[dict[str, Any]]) -> None:
    for found in checks:
        assert found["replaced"] == pytest.approx(found["replaced without"], rel=1e-12)


@pytest.mark.process
def test_all_ranks_know_after_the_same_step_that_one_was_asked_to_stop(checks: list[dict[str, Any]]) -> None:
    assert [found["stop"] for found in checks] == [[2, 3]] * 3


@pytest.mark.process
def test_buffers_and_first_weights_are_those_of_rank_0(checks: list[dict[str, Any]]) -> None:
    assert checks[0]["buffers"] == checks[1]["buffers"] == checks[2]["buffers"]


@pytest.mark.process
def test_a_loss_scale_changes_neither_noise_nor_weights(checks: list[dict[str, Any]]) -> None:
    assert checks[0]["scaled"] == pytest.approx(checks[0]["unscaled"], rel=1e-12)


@pytest.mark.process
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step_on_all(checks: list[dict[str, Any]]) -> None:
    # The scale of 1024 is halved, and nothing was updated.
    assert all(found["overflow"][:2] == [512.0, 0.0] and not any(found["overflow"][2:]) for found in checks)


@pytest.mark.process
def test_ranks_are_the_same_if_one_of_them_leaves_out_the_first_micro_batch_while_a_loss_scale_grows(
    checks: list[dict[str, Any]],
) -> None:
    first, *others = (found["left out first"] for found in checks)
    assert others == [first] * 2


@pytest.mark.process
def test_a_repeated_micro_batch_gives_no_parameter_a_gradient_that_the_others_do_not(
    checks: list[dict[str, Any]],
) -> None:
    for found in checks:
        assert found["branches"] == pytest.approx(branches(), rel=1e-12)


@pytest.mark.process
@pytest.mark.parametrize("where", ["parallel parts", "compiled"])
def test_distributed_data_parallel_is_found_wherever_it_is_in_the_model(
    checks: list[dict[str, Any]], where: str
) -> None:
    for found in checks:
        assert found[where] == pytest.approx(found["not parallel"], rel=1e-12)


@pytest.mark.process
def test_a_micro_batch_that_a_rank_leaves_out_does_not_count(checks: list[dict[str, Any]]) -> None:
    net, (x, y) = model(), data()
    indices = [
        i
        for rank in range(2)
        for i in next(iter(ElasticSampler(SAMPLES, "fixed(24)", local_batch=8, rank=rank, world_size=3)))
    ]
    nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
    with torch.no_grad():
        for parameter in net.parameters():  # the linear rule doubles the rate at 16 samples instead of 8
            parameter -= 0.02 * 2 * parameter.grad
    for found in checks:
        torch.testing.assert_close(found["left out"], weights(net).tolist(), rtol=1e-12, atol=1e-14)
