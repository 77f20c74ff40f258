"""A worker of Ray Train in Ray's local mode, in which the loop runs in this process: what it restores and refuses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("ray", reason="ray is not installed: pip install 'ebbflow[ray]'")

import ray.train
from ray.train.torch import TorchTrainer

from ebbflow.errors import CheckpointError, ConfigError, EbbflowError
from ebbflow.integrations.ray import RayWorker, prepare

pytestmark = pytest.mark.slow  # it imports Ray

X = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
SETTINGS = {"rule": "sqrt", "base_batch": 4}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(X)


def parts(loader: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, loader if loader is not None else DataLoader(DATA, batch_size=4, shuffle=True)


def fit(loop: Callable[[], None], folder: Path) -> dict[str, Any]:
    """What the loop reports at last."""
    trainer = TorchTrainer(
        lambda config: loop(),
        train_loop_config={},
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(storage_path=str(folder)),
    )
    found: dict[str, Any] = trainer.fit().metrics
    return found


def train(worker: RayWorker, steps: int) -> list[float]:
    """So many micro-batches, or what is left of the epoch; the sums of their inputs, as a mark of which they are."""
    seen = []
    for (x, y), _ in zip(worker.loader, range(steps), strict=False):
        (worker.model(x) - y).square().mean().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        seen.append(x.sum().item())
    return seen


def test_a_report_in_the_middle_of_an_epoch_is_where_the_next_worker_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 micro-batches of 4 samples per epoch, in steps of 8: the report after 7 of them holds 3 complete steps, and
    the next worker computes the seventh again."""
    # In local mode Ray copies no checkpoint; it has to be there when the next worker asks for it.
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: nullcontext(tempfile.mkdtemp(dir=tmp_path)))
    whole: list[Any] = []
    stopped: list[Any] = []

    def uninterrupted() -> None:
        worker = prepare(*parts(), **SETTINGS, policy="fixed(8)")
        whole.extend(train(worker, 15))
        worker.report()
        whole.append(worker.model.state_dict())

    def interrupted() -> None:
        first = prepare(*parts(), **SETTINGS, policy="fixed(8)")
        stopped.extend(train(first, 7)[:6])
        first.report({"note": 1})
        second = prepare(*parts(), **SETTINGS, policy="fixed(8)")
        assert (second.epoch, second.optimizer.updates) == (0, 3)
        stopped.extend(train(second, 15))
        second.report()
        stopped.append(second.model.state_dict())

    assert fit(uninterrupted, tmp_path)["updates"] == 8
    found = fit(interrupted, tmp_path)
    assert (found["updates"], found["workers"], found["epoch"]) == (8, 1, 1)
    assert found["multiplier"] == 1.0  # of the last step, which has 4 samples
    assert whole[:-1] == stopped[:-1]
    for name, value in whole[-1].items():
        assert torch.equal(value, stopped[-1][name])


@pytest.mark.parametrize(
    ("loader", "settings", "message"),
    [
        (None, {"rule": "sqtr"}, "did you mean 'sqrt'"),
        (None, {"base_batch": None}, "base_batch is missing"),
        (None, {"ema": 0.9}, "ema is 0.9, but the loop keeps an average of its weights itself"),
        (None, {"precision": "bf16"}, "precision is 'bf16', but the loop has its own autocast"),
        (None, {"step_time": "1s"}, "step_time is '1s', but there is no trace"),
        (None, {"tracker": "tenserboard"}, "did you mean 'tensorboard'"),
        ([1, 2], {}, "the loader is a list; expected a DataLoader"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), {}, "a sampler of its own .list."),
        (DataLoader(Stream(), batch_size=4), {}, "Stream is no map-style data set"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    loader: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EbbflowError, match=message):
        fit(lambda: prepare(*parts(loader), **{**SETTINGS, **settings}), tmp_path)  # type: ignore[arg-type, return-value]


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model, _, loader = parts()
    _, other, _ = parts()
    with pytest.raises(ConfigError, match="no parameter of the optimizer belongs to the model"):
        fit(lambda: prepare(model, other, loader, **SETTINGS), tmp_path)  # type: ignore[arg-type, return-value]


def test_a_checkpoint_of_another_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.pt").touch()

    def loop() -> None:
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(str(tmp_path / "own")))
        prepare(*parts(), **SETTINGS)

    with pytest.raises(CheckpointError, match=r"holds model.pt, and no ebbflow.pt: report with worker.report"):
        fit(loop, tmp_path)
