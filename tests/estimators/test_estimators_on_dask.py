"""Fits on a Dask cluster: the same weights as in one process, blocks that stay where they are, searches."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from sklearn.datasets import load_digits
from skorch.callbacks import Callback
from skorch.dataset import ValidSplit

from ebbflow.errors import ConfigError, DataError
from ebbflow.estimators.dask_arrays import as_blocks
from ebbflow.estimators.fit import active_client
from ebbflow.sklearn import EbbflowClassifier, EbbflowRegressor

pytestmark = pytest.mark.process

DIGITS, LABELS = (part[:400] for part in load_digits(return_X_y=True))
DIGITS = (DIGITS / 16).astype(np.float32)
SETTINGS = {
    "batch_size": "geo(delay=1ep, initial=40)",
    "max_epochs": 2,
    "optimizer": "sgd(momentum=0.9)",
    "lr": 0.05,
    "random_state": 0,
}
BOTH = {"engine": "dask", "engine__min_workers": 2}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two worker processes on this machine, without a dashboard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a cluster says of this machine is no matter of ours
        with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=None,
                worker_dashboard_address=None,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client


def blocks() -> tuple[Any, Any]:
    """The digits as Dask arrays, inputs and targets cut differently."""
    return da.from_array(DIGITS, chunks=(70, 32)), da.from_array(LABELS, chunks=90)


def assert_same_weights(ours: Any, theirs: Any) -> None:
    for own, expected in zip(ours.module_.parameters(), theirs.module_.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


class WhileItFits(Callback):  # type: ignore[misc]
    """Calls a function at the end of the first epoch."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_epoch_end(self, net: Any, **_: Any) -> None:
        if len(net.history) == 1:
            self.function()


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_a_dask_array_without_a_cluster_is_refused_with_advice() -> None:
    with pytest.raises(DataError, match=r"X is a Dask array of 0 MiB in 6 blocks.*start a cluster.*X\.compute\(\)"):
        EbbflowClassifier().fit(*blocks())


def test_without_a_client_the_dask_engine_says_what_to_start() -> None:
    with pytest.raises(ConfigError, match=r"there is no Client; start one.*engine__client='tcp://host:8786'"):
        EbbflowClassifier(engine="dask").fit(DIGITS, LABELS)
    with pytest.raises(
        ConfigError, match="engine__transport is a setting of the Dask engine, but this fit runs in this"
    ):
        EbbflowClassifier(engine__transport="centralized").fit(DIGITS, LABELS)


def test_blocks_are_predicted_and_scored_one_by_one() -> None:
    model = EbbflowClassifier(max_epochs=2, random_state=0).fit(DIGITS, LABELS)
    inputs, labels = blocks()
    sizes = []

    def spy(block: Any) -> Any:
        sizes.append(len(block))
        return block

    watched = inputs.rechunk((70, 64)).map_blocks(spy, dtype=np.float32, meta=np.empty((0, 0), np.float32))
    predicted = model.predict(watched)
    assert sizes == []  # nothing is computed before somebody asks
    np.testing.assert_array_equal(predicted.compute(), model.predict(DIGITS))
    assert max(sizes) == 70
    np.testing.assert_allclose(model.predict_proba(inputs).compute(), model.predict_proba(DIGITS), atol=1e-6)
    assert model.score(inputs, labels) == pytest.approx(model.score(DIGITS, LABELS))
    values = EbbflowRegressor(max_epochs=2, random_state=0).fit(DIGITS, LABELS)
    assert values.score(inputs, labels) == pytest.approx(values.score(DIGITS, LABELS))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, y: (x[:, 0], y), "Expected 2D array, got 1D array"),
        (lambda x, y: (x, y[:-1]), "X has 400 rows and y has 399"),
        (lambda x, y: (x[x[:, 0] >= 0], y), r"unknown number of rows; call X\.compute_chunk_sizes\(\)"),
        (lambda x, y: (x.astype(str), y), "expected numbers"),
        (lambda x, y: (x[:0], y[:0]), "no rows"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_computed(change: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        EbbflowClassifier().fit(*change(*blocks()))


def test_a_frame_of_dask_brings_its_names() -> None:
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame(DIGITS, columns=[f"pixel{i}" for i in range(64)])
    model = EbbflowClassifier(max_epochs=1, random_state=0).fit(frame, LABELS)
    predicted = model.predict(dd.from_pandas(frame, npartitions=3))
    np.testing.assert_array_equal(predicted.compute(), model.predict(frame))
    assert as_blocks(dd.from_pandas(frame, npartitions=3), "X").shape == (400, 64)


# -- on a cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["allreduce", "centralized"])
def test_a_fit_on_a_cluster_equals_one_in_this_process(client: Client, transport: str) -> None:
    here = EbbflowClassifier(**SETTINGS, engine="emulated").fit(DIGITS, LABELS)
    there = EbbflowClassifier(**SETTINGS, **BOTH, engine__transport=transport).fit(DIGITS, LABELS)
    assert [h["workers"] for h in there.history] == [2, 2]
    assert there.n_updates_ == here.n_updates_ == 15  # 10 of 40, 5 of 80
    assert_same_weights(there, here)


@pytest.mark.parametrize("transport", ["allreduce", "centralized"])
def test_a_mean_by_weights_is_that_of_the_whole_step(client: Client, transport: str) -> None:
    """The share of each worker has other weights, and other targets that are ignored."""
    weight = torch.tensor([1.0, 20.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 0.1, 3.0])
    settings = {"criterion": torch.nn.CrossEntropyLoss(weight=weight, ignore_index=3), **SETTINGS}
    # One backward pass over the whole step, in which torch's mean is the one that is meant.
    here = EbbflowClassifier(**settings, engine="loop", local_batch=80, micro_batch=80).fit(DIGITS, LABELS)
    there = EbbflowClassifier(**settings, **BOTH, engine__transport=transport).fit(DIGITS, LABELS)
    assert [h["workers"] for h in there.history] == [2, 2]
    assert_same_weights(there, here)


def test_a_fit_that_goes_on_keeps_what_its_rule_has_measured(client: Client) -> None:
    """The replicas of the second fit begin with the averages of the first one, as a fit in this process does."""
    settings = {
        "rule": "adascale", "batch_size": 60, "base_batch": 10, "local_batch": 20, "max_workers": 3, "max_epochs": 1,
        "optimizer": "sgd(momentum=0.9)", "lr": 0.05, "random_state": 0, "warm_start": True,
    }  # fmt: skip
    ours, theirs = EbbflowClassifier(**settings, **BOTH), EbbflowClassifier(**settings, engine="loop")
    for model in (ours, theirs):
        model.fit(DIGITS, LABELS).fit(DIGITS, LABELS)
    assert_same_weights(ours, theirs)
    rates = [[batch["train_lr"] for batch in model.history[-1]["batches"]] for model in (ours, theirs)]
    np.testing.assert_allclose(rates[0], rates[1], rtol=1e-5)


def spread_over(client: Client, *arrays: Any) -> list[Any]:
    """The same arrays with their blocks on both workers in turn: left alone, a busy machine may compute all on one."""
    workers = [*client.scheduler_info()["workers"]]
    return [
        da.concatenate([client.persist(array.blocks[i], workers=[workers[i % 2]]) for i in range(array.numblocks[0])])
        for array in arrays
    ]


def test_blocks_of_a_dask_array_stay_where_they_are(client: Client) -> None:
    held: dict[str, Any] = {}
    gathered: list[Any] = []
    gather = client.gather
    client.gather = lambda futures, **kw: gathered.append(futures) or gather(futures, **kw)
    try:
        there = EbbflowClassifier(**SETTINGS, **BOTH, callbacks=[WhileItFits(lambda: held.update(client.has_what()))])
        there.fit(*spread_over(client, *blocks()))
    finally:
        client.gather = gather
    places = [set(keys) for keys in held.values()]
    assert [len(place) > 0 for place in places] == [True, True]  # both workers hold some blocks,
    assert not places[0] & places[1]  # none was copied,
    assert not [futures for futures in gathered if np.shape(futures) and len(futures) > 1]  # and none came here
    for epoch in there.history:
        assert sum(batch["train_batch_size"] for batch in epoch["batches"]) == 400
    assert_same_weights(there, EbbflowClassifier(**SETTINGS, engine="emulated").fit(DIGITS, LABELS))
    assert there.score(*blocks()) == pytest.approx(there.score(DIGITS, LABELS))


def test_a_killed_worker_costs_no_sample_and_no_block(client: Client) -> None:
    # A nanny starts another worker; blocks that were lost are computed again.
    def kill() -> None:
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

    there = EbbflowClassifier(**SETTINGS, engine="dask", engine__min_workers=1, callbacks=[WhileItFits(kill)])
    there.fit(*blocks())
    for epoch in there.history:
        assert sum(batch["train_batch_size"] for batch in epoch["batches"]) == 400
    assert_same_weights(there, EbbflowClassifier(**SETTINGS, engine="emulated").fit(DIGITS, LABELS))
    client.wait_for_workers(2, timeout=150)


def test_an_active_client_is_used_unless_told_otherwise(client: Client) -> None:
    auto = EbbflowRegressor(max_epochs=1, engine__min_workers=2, random_state=0).fit(DIGITS, LABELS)
    assert auto.history[-1]["workers"] == 2


def test_a_cluster_is_found_by_its_address_and_left_as_it_was(client: Client) -> None:
    settings = {"engine": "dask", "engine__client": client.scheduler.address, "engine__min_workers": 2}
    model = EbbflowRegressor(max_epochs=1, random_state=0, **settings).fit(DIGITS, LABELS)
    assert model.history[-1]["workers"] == 2
    assert active_client() is client


def test_a_task_does_not_ask_its_own_cluster_for_help(client: Client) -> None:
    def fit(inputs: Any, labels: Any) -> Any:
        assert active_client() is None
        return EbbflowClassifier(max_epochs=1, random_state=0).fit(inputs, labels).history[-1]["workers"]

    assert client.submit(fit, DIGITS, LABELS).result(timeout=150) == 1


def test_numbers_that_are_none_are_found_on_the_workers(client: Client) -> None:
    inputs, labels = blocks()
    with pytest.raises(DataError, match="X has a value that is NaN or infinite"):
        EbbflowClassifier(**SETTINGS, engine="dask").fit(da.where(inputs > 0.99, np.nan, inputs), labels)


def test_what_a_block_raises_is_raised_here(client: Client) -> None:
    model = EbbflowClassifier(random_state=0, engine="emulated").partial_fit(DIGITS[LABELS < 9], LABELS[LABELS < 9])
    with pytest.raises(DataError, match="labels that the classes do not have: 9"):
        model.set_params(engine="dask").partial_fit(*blocks())


def test_settings_that_a_cluster_cannot_follow_are_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="train_split cannot split a Dask array"):
        EbbflowClassifier(train_split=ValidSplit(5)).fit(*blocks())
    with pytest.raises(ConfigError, match="has a get_loss of its own, which cannot be sent to the workers"):
        type("Own", (EbbflowClassifier,), {"get_loss": lambda *_, **__: None})(engine="dask").fit(DIGITS, LABELS)
    with pytest.raises(ConfigError, match=r"engine__ settings.*colour"):
        EbbflowClassifier(engine="dask", engine__colour="red").fit(DIGITS, LABELS)


def test_an_adaptive_search_may_train_candidates_in_tasks(client: Client) -> None:
    """What dask-ml's IncrementalSearchCV does; itself it does not run on the Dask of 2026, whatever the estimator."""

    def train(model: Any, inputs: Any, labels: Any) -> Any:
        return model.partial_fit(inputs, labels, classes=range(10))

    def score(model: Any, inputs: Any, labels: Any) -> Any:
        return model.score(inputs, labels)

    candidates = [EbbflowClassifier(batch_size=20, random_state=0, lr=lr) for lr in (1e-4, 1e-2)]
    for rows in (slice(0, 100), slice(100, 200), slice(200, 300)):
        candidates = [client.submit(train, model, DIGITS[rows], LABELS[rows]) for model in candidates]
    scores = [client.submit(score, model, DIGITS[300:], LABELS[300:]).result(timeout=150) for model in candidates]
    assert scores[1] > scores[0]
    assert candidates[1].result(timeout=150).n_epochs_ == 3


@pytest.mark.parametrize("setting", [{"fused_batch": 7}, {"batch_norm": "frozen"}])
def test_settings_that_dask_cannot_follow_are_refused_with_the_reason(client: Client, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"^{name} is .*, but it belongs to the engine that fuses virtual workers"):
        EbbflowClassifier(**{**SETTINGS, **setting}, engine="dask").fit(DIGITS, LABELS)
