"""The parts of a fit as plain functions: which samples, how many at a time, on whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import KFold
from skorch.dataset import Dataset as ArrayDataset
from skorch.dataset import ValidSplit
from torch.utils.data import Subset, TensorDataset

from ebbflow.errors import ConfigError, DataError
from ebbflow.estimators.batch_size import make_batches
from ebbflow.estimators.dask_rows import by_block
from ebbflow.estimators.fit import runs_on_cluster
from ebbflow.estimators.inputs import DatasetRows, Encoded, Slices, encode
from ebbflow.plan.growing import Geo
from ebbflow.sklearn import EbbflowRegressor

NUMBERS = torch.arange(20.0)
ARRAYS = ArrayDataset(NUMBERS[:, None], NUMBERS)
TENSORS = TensorDataset(NUMBERS[:, None], NUMBERS)


class OneByOne(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return NUMBERS[index : index + 1], NUMBERS[index]


# -- which samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [ARRAYS, TENSORS, OneByOne()])
def test_a_part_of_a_part_fetches_its_own_samples(data: Any) -> None:
    # The odd numbers, and of these the second, fourth, ...: 3, 7, 11, 15, 19.
    part = Subset(Subset(data, [*range(1, 20, 2)]), [1, 3, 5, 7, 9])
    inputs, targets = DatasetRows(part, "cpu").fetch(np.array([4, 0]))
    assert inputs.tolist() == [[19.0], [3.0]]
    assert targets.tolist() == [19.0, 3.0]


@pytest.mark.parametrize("data", [ARRAYS, TENSORS])
def test_slices_go_through_a_part_in_its_order(data: Any) -> None:
    part = Subset(data, [5, 3, 19, 0, 7])
    assert Slices.can(part)
    assert [targets.tolist() for _, targets in Slices(part, 2)] == [[5.0, 3.0], [19.0, 0.0], [7.0]]
    assert not Slices.can(OneByOne())


def test_validation_holds_out_what_it_is_given() -> None:
    seen: list[float] = []

    class Spy(EbbflowRegressor):  # type: ignore[misc]
        def get_loss(self, y_pred: Any, y_true: Any, *args: Any, training: bool = False, **kwargs: Any) -> torch.Tensor:
            seen.extend(y_true.tolist() if training else [])
            return super().get_loss(y_pred, y_true)

    split = ValidSplit(KFold(4))  # the first five of twenty are held out
    Spy(max_epochs=1, train_split=split, batch_size=4).fit(NUMBERS[:, None].numpy() / 20, NUMBERS.numpy())
    assert sorted(seen) == [float(i) for i in range(5, 20)]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_that_were_asked_for_by_block_come_back_in_order(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=sum(sizes))
    starts = np.append(0, np.cumsum(sizes)[:-1])
    blocks = np.split(values, starts[1:])
    indices = rng.permutation(len(values))[: rng.integers(1, len(values) + 1)]
    wanted, back = by_block(indices, starts)
    joined = np.concatenate([blocks[block][rows] for block, rows in wanted.items()])
    np.testing.assert_array_equal(joined[back], values[indices])


def test_labels_become_positions_in_the_classes() -> None:
    classes = np.array(["ebb", "flow", "slack"])
    assert encode(["slack", "ebb"], classes).tolist() == [2, 0]
    with pytest.raises(DataError, match="labels that the classes do not have: tide, wave"):
        encode(["wave", "ebb", "tide"], classes)
    assert Encoded([(0.5, "flow")], classes)[0] == (0.5, 1)


# -- how many at a time ------------------------------------------------------------------------------------------------


def batches(batch_size: Any, samples: int = 1000, **given: Any) -> Any:
    settings = {"base_batch": None, "local_batch": None, "max_workers": None, **given}
    parts = {
        key: settings.pop(key) for key in list(settings) if key not in ("base_batch", "local_batch", "max_workers")
    }
    return make_batches(batch_size, parts, samples=samples, **settings)


def test_a_number_is_the_batch_of_every_step() -> None:
    made = batches(64, local_batch=20)
    step = made.plan.at(12345)
    assert (step.samples, step.workers, made.base_batch, made.growing) == (64, 4, 64, None)  # 64/20 takes four
    assert batches(64, local_batch=20, max_workers=3).plan.at(0).workers == 3
    assert batches(-1).plan.at(0).samples == 1000


def test_a_policy_begins_with_the_base_batch_and_has_workers_for_an_epoch() -> None:
    made = batches("geo", factor=5, delay="60ep")
    assert str(made.growing) == "geo(60ep, factor=5)"
    assert (made.base_batch, made.local_batch, made.plan.at(0).workers) == (32, 32, 32)  # 1000/32 takes 32
    limited = batches("geo(initial=10)", local_batch=25, max_workers=4)
    assert (limited.base_batch, limited.plan.at(0).samples) == (10, 100)
    assert batches(Geo(factor=3.0)).growing == Geo(factor=3.0)


def test_a_policy_of_the_fleet_sees_the_workers_that_it_may_have() -> None:
    assert batches("follow(32)", max_workers=3).plan.at(0).samples == 96
    assert batches("fixed(50)").plan.at(0).samples == 50


def test_settings_beside_something_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is 32, which has no settings such as batch_size__factor"):
        batches(32, factor=2)
    with pytest.raises(ConfigError, match="which has its settings already; leave batch_size__factor out"):
        batches(Geo(), factor=2)


def test_a_setting_replaces_what_the_text_says() -> None:
    assert str(batches("geo(delay=7ep, factor=2)", factor=3).growing) == "geo(7ep, factor=3)"


# -- on whom -----------------------------------------------------------------------------------------------------------


def test_an_engine_is_chosen_by_its_name() -> None:
    assert runs_on_cluster("dask", TENSORS, {})
    assert not runs_on_cluster("emulated", TENSORS, {})
    with pytest.raises(ConfigError, match="engine is 'dusk'; did you mean 'dask'"):
        runs_on_cluster("dusk", TENSORS, {})
