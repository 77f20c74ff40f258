"""Lightning's Trainer on a session: what it computes, its schedulers, clipping, validation, loggers and checkpoints."""

from __future__ import annotations

import csv
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'ebbflow[lightning]'")

import lightning

import ebbflow
from ebbflow.data.permutation import Permutation
from ebbflow.errors import ConfigError
from ebbflow.integrations.lightning import ElasticStrategy

pytestmark = pytest.mark.slow  # all of it together: it imports Lightning

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_transformer.py"
FLEET = {"trace": "0s:4 3s:2 7s:5 60s", "step_time": "1s"}
"""Steps of 4, 4, 4, 2, 2, 2, 2, 5, 5, ... workers."""


@cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def trained(**settings: Any) -> tuple[Any, Any]:
    """A run of the example: 120 samples in an epoch, unless said otherwise."""
    defaults = {"fleet": FLEET, "batch_size": 4, "samples": 120, "max_epochs": 1}
    return example()["main"](**{**defaults, **settings})  # type: ignore[no-any-return]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Regression(lightning.LightningModule):
    """A line, whose targets are masked: the loss is the mean over what is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(3, 4).double()
        self.validated: list[tuple[int, int]] = []
        self.counting = True

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        there = ~y.isnan()
        loss = ((self.line(x) - y.nan_to_num()).square() * there).sum() / there.sum()
        return {"loss": loss, "count": there.sum()} if self.counting else loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append((self.trainer.current_epoch, self.trainer.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def masked(samples: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.where(torch.rand(samples, 4, generator=generator) < 0.4, torch.nan, y))


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(masked())


def fitted(module: Any, data: Any = None, *, batch_size: int = 4, **settings: Any) -> Any:
    elastic = {"rule": "linear", "base_batch": 8, **FLEET, **settings.pop("elastic", {})}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(**elastic),
        accelerator="cpu",
        enable_model_summary=False,
        **{"devices": 1, "max_epochs": 2, **quiet, **settings},
    )
    data = masked() if data is None else data
    validation = DataLoader(data, batch_size=60)
    trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=True), validation)
    return trainer


@pytest.mark.parametrize(
    ("rule", "trainer", "session"),
    [
        ("linear", {}, {}),
        ("adascale", {"gradient_clip_val": 0.5}, {"clip": 0.5}),
        ("sqrt", {"accumulate_grad_batches": 2, "batch_size": 2}, {"micro_batch": 2}),
    ],
    ids=["plain", "measured-and-clipped", "accumulation"],
)
def test_lightning_computes_what_a_session_computes_with_the_same_samples(
    rule: str, trainer: dict[str, Any], session: dict[str, Any]
) -> None:
    """The loss of a step is the mean over the targets that are not masked."""
    module = Regression()
    made = fitted(module, elastic={"rule": rule, "seed": 3}, **trainer)
    own = Regression()
    settings = {**FLEET, "rule": rule, "base_batch": 8, "local_batch": 4, "epochs": 2, "seed": 3, **session}
    with ebbflow.Session(own, own.configure_optimizers(), masked(), loader_workers=0, **settings) as plain:
        for step in plain:
            for x, y in step:
                there = ~y.isnan()
                step.backward(((own.line(x) - y.nan_to_num()).square() * there).sum(), count=there.sum())
    assert made.global_step == plain.step
    torch.testing.assert_close(weights(module), weights(own), rtol=1e-5, atol=1e-6)  # clipping adds 1e-6 to the norm


def test_a_module_that_counts_nothing_has_the_mean_over_samples() -> None:
    data = TensorDataset(*(torch.nan_to_num(tensor) for tensor in masked().tensors))
    found = []
    for workers, size in ((8, 2), (1, 16)):
        module = Regression()
        module.counting = False
        fitted(module, data, batch_size=size, elastic={"trace": f"constant(workers={workers})"})
        found.append(weights(module))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Scheduled(Regression):
    """With a scheduler that is stepped after every update."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Order(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """The order of 64 samples that a session has, anew in every epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 64

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(Permutation(64, 3, self.epoch).indices(0, 64).tolist())


def test_at_the_reference_batch_it_trains_what_lightning_alone_trains() -> None:
    """Two workers with 4 samples each, and Lightning with two accumulated batches of 4, for three epochs of 8 steps,
    with clipping and a scheduler."""
    data = TensorDataset(*(torch.nan_to_num(tensor) for tensor in masked(64).tensors))
    plain, module = Scheduled(), Scheduled()
    plain.counting = module.counting = False
    settings = {"max_epochs": 3, "gradient_clip_val": 0.5}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, accumulate_grad_batches=2, **settings, **quiet)
    trainer.fit(plain, DataLoader(data, batch_size=4, sampler=Order()))
    elastic = {"trace": "constant(workers=2)", "base_batch": 8, "seed": 3}
    fitted(module, data, elastic=elastic, **settings)
    assert trainer.global_step == 24
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-9, atol=1e-12)


def test_the_scheduler_counts_reference_steps_and_the_rule_multiplies_once(tmp_path: Path) -> None:
    """Reference steps of 16 samples, a factor of 0.99 for each; the logger of Lightning has what the rule did.

    The first steps have 16 samples (4 workers of 4), then 8, then 20: before the eighth, 3 * 16 + 4 * 8 = 80 samples
    were trained on, which are 5 reference steps.
    """
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(tmp_path), name="", version="")
    trained(logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")])
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["batch"]]
    assert [float(row["batch"]) for row in steps] == [16, 16, 16, 8, 8, 8, 8, 20, 20]
    assert [float(row["workers"]) for row in steps] == [4, 4, 4, 2, 2, 2, 2, 5, 5]
    assert [float(row["multiplier"]) for row in steps[:4]] == pytest.approx([1, 1, 1, 0.5**0.5])
    rates = [float(row["lr-Adam"]) / 3e-3 for row in rows if row.get("lr-Adam")]
    assert rates[:4] == pytest.approx([1, 0.99, 0.99**2, 0.99**3]) and rates[7] == pytest.approx(0.99**5)
    assert any(row.get("train_loss_epoch") for row in rows)


class EveryThird(Regression):
    """With a scheduler that takes a step for every three reference steps, and halves the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 3},
        }

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_the_frequency_of_a_scheduler_counts_reference_steps() -> None:
    """Samples after each step, with 60 in an epoch: 16, 32, 48, 56, 60, 68, 76, 96, 116, 120. In steps of 8 these are
    2, 4, 6, 7, 7, 8, 9, 12, 14 and 15, of which every third halves the rate."""
    module = EveryThird()
    fitted(module)
    assert module.rates == pytest.approx([0.05 * 0.5**third for third in (0, 1, 2, 2, 2, 2, 3, 4, 4, 5)])


def test_a_scheduler_that_is_not_stepped_after_every_update_is_refused() -> None:
    """It would take the steps that were left out in its next one."""

    class Delayed(EveryThird):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.trainer.global_step > 2:
                scheduler.step()

    with pytest.raises(ConfigError, match=r"stepped once for 3 updates of the optimizer.*interval to 'epoch'"):
        fitted(Delayed())


def test_validation_and_epochs_are_those_of_the_samples() -> None:
    """60 samples: steps of 16, 16, 16, 8, 4 in the first epoch, then of 8, 8, 20, 20, 4."""
    module = Regression()
    trainer = fitted(module, num_sanity_val_steps=0)
    assert module.validated == [(0, 5), (1, 10)]
    assert (trainer.current_epoch, trainer.global_step) == (2, 10)


def test_max_steps_count_steps_at_the_reference_batch() -> None:
    """Six steps of 8 samples: 3 * 16 = 48."""
    trainer = fitted(Regression(), max_steps=6, max_epochs=-1)
    assert trainer.global_step == 3 and trainer.strategy.session.flow.ledger.total == 48


@pytest.mark.parametrize("saved_at", [4, 9], ids=["mid-epoch", "epoch"])
def test_a_run_that_was_saved_ends_with_the_same_weights(saved_at: int, tmp_path: Path) -> None:
    """Epochs of 120 samples: 9 steps, and then 6 of 20."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    settings: dict[str, Any] = {"max_epochs": 2}
    model, trainer = trained(callbacks=[saving], enable_checkpointing=True, **settings)
    again, resumed = trained(resume=str(tmp_path / f"step={saved_at}.ckpt"), **settings)
    assert torch.equal(weights(model), weights(again))
    assert (trainer.global_step, trainer.current_epoch) == (resumed.global_step, resumed.current_epoch) == (15, 2)


def test_mixed_precision_in_bfloat16_learns() -> None:
    _, trainer = trained(precision="bf16-mixed", max_epochs=2, logger=False)
    assert trainer.callback_metrics["train_loss_epoch"] < 2.6 and trainer.global_step == 15


@pytest.mark.parametrize(
    ("elastic", "settings", "message"),
    [
        ({"epochs": 3}, {}, "epochs is given for the session.*set max_epochs"),
        ({"clip": 1.0}, {}, "clip is given for the session.*set gradient_clip_val"),
        ({"base_batch": None}, {}, "base_batch is missing"),
        ({}, {"limit_train_batches": 3}, r"limit_train_batches .or overfit_batches. is 3"),
        ({}, {"limit_train_batches": 1}, "is 1, but every sample counts once per epoch"),  # of batches, unlike 1.0
        ({}, {"overfit_batches": 1}, "is 1, but every sample counts once per epoch"),
        ({}, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs is 1, but the session reads"),
        ({}, {"max_epochs": -1}, "max_epochs and max_steps of the Trainer are both -1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(elastic: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(Regression(), elastic=elastic, **settings)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(masked(), batch_sampler=[[0, 1], [2, 3]]), "a sampler of its own .list."),
        ([DataLoader(masked(), batch_size=4), DataLoader(masked(), batch_size=4)], "several DataLoaders"),
        (DataLoader(Stream(), batch_size=4), "Stream is no map-style data set"),
        ([[1.0, 2.0]], "is a list; expected one DataLoader"),
    ],
    ids=["batch-sampler", "two-loaders", "stream", "no-loader"],
)
def test_data_that_cannot_be_followed_is_refused(loader: Any, message: str) -> None:
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(base_batch=8, **FLEET), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Regression(), loader)


def test_a_module_without_an_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regression, "configure_optimizers", lambda self: None)
    with pytest.raises(ConfigError, match="configure_optimizers returned no optimizer; expected one"):
        fitted(Regression())


def test_processes_that_would_all_train_the_whole_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 processes .WORLD_SIZE., each of which would train the whole run"):
        fitted(Regression())


def test_a_trial_run_of_one_batch_is_allowed() -> None:
    assert fitted(Regression(), fast_dev_run=True).global_step == 1


def test_manual_optimization_is_refused() -> None:
    module = Regression()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization = False"):
        fitted(module)


def test_a_backward_of_the_module_is_refused() -> None:
    class Own(Regression):
        def backward(self, loss: torch.Tensor, *_: Any) -> None:
            (0 * loss).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigError, match="the module overrides backward, which would not be called"):
        fitted(Own())


def test_what_follows_backward_runs_once_per_step_and_sees_its_mean_gradient() -> None:
    """Eight samples in steps of two: on one worker, and on two workers with one sample each."""

    class Watching(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def on_after_backward(self) -> None:
            assert self.line.bias.grad is not None
            self.seen.append(self.line.bias.grad.clone())

    found = []
    for workers, size in ((1, 2), (2, 1)):
        module = Watching()
        module.counting = False
        data = TensorDataset(*(torch.nan_to_num(tensor) for tensor in masked(8).tensors))
        elastic = {"trace": f"constant(workers={workers})"}
        trainer = fitted(module, data, batch_size=size, elastic=elastic, max_epochs=1)
        assert len(module.seen) == trainer.global_step == 4
        found.append(torch.stack(module.seen))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class EverySecond(Regression):
    """Steps the optimizer for every second batch only, and otherwise just computes."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Accumulating(lightning.Callback):
    """Changes in the course of the training what the strategy read at its start."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (EverySecond, {}),
        (EverySecond, {"fast_dev_run": True}),  # of one batch, after which there is no other
        (Regression, {"callbacks": [Accumulating()]}),
    ],
    ids=["own-step", "last-step", "callback"],
)
def test_a_step_whose_gradient_was_not_applied_is_an_error(module: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"step 0 was computed, but .*set accumulate_grad_batches of the Trainer"):
        fitted(module(), **settings)


class Normalized(Regression):
    """With batch norm, whose statistics StochasticWeightAveraging computes in another pass over the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3).double()

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        return super().training_step((self.norm(x), y), index)


@pytest.mark.parametrize(
    ("name", "arguments", "advice"),
    [
        ("GradientAccumulationScheduler", {"scheduling": {0: 2}}, "set accumulate_grad_batches of the Trainer"),
        ("LearningRateFinder", {}, "find the rate without ElasticStrategy"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.01}, "give ema=0.999 to ElasticStrategy"),
    ],
)
def test_callbacks_that_do_not_fit_are_refused_by_name(name: str, arguments: dict[str, Any], advice: str) -> None:
    callback = getattr(lightning.pytorch.callbacks, name)(**arguments)
    with pytest.raises(ConfigError, match=f"{name} is among the callbacks of the Trainer.*{advice}"):
        fitted(Normalized(), callbacks=[callback])


def test_a_search_for_a_batch_size_is_refused_by_name(tmp_path: Path) -> None:
    class Searching(Regression):
        batch_size = 4

        def train_dataloader(self) -> Any:  # Lightning searches with loaders of the module only
            return DataLoader(masked(), batch_size=self.batch_size, shuffle=True)

    trainer = lightning.Trainer(
        strategy=ElasticStrategy(base_batch=8, **FLEET), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.BatchSizeFinder()], default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"BatchSizeFinder is among the callbacks.*find the size without Elastic"):
        trainer.fit(Searching())


@pytest.mark.parametrize(
    ("module", "length"),
    [(Regression, {}), (Normalized, {"max_epochs": -1, "max_steps": 30})],
    ids=["no-batch-norm", "no-last-epoch"],
)
def test_averaging_without_another_pass_over_the_data_is_allowed(module: Any, length: dict[str, Any]) -> None:
    """30 steps of 8 samples are four epochs."""
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    trainer = fitted(module(), callbacks=[averaging], **length)
    assert averaging.n_averaged is not None and averaging.n_averaged >= 2
    assert trainer.strategy.session.flow.ledger.epoch == (4 if length else 2)


def test_the_average_of_the_weights_is_in_the_module_while_it_is_swapped_in() -> None:
    module = Normalized()
    trainer = fitted(module, elastic={"ema": 0.5})
    latest = weights(module)
    with trainer.strategy.session.flow.average.swapped_in():
        assert not torch.equal(weights(module), latest)
    assert torch.equal(weights(module), latest)


@pytest.mark.process
def test_modules_are_replicas_of_a_live_fleet(tmp_path: Path) -> None:
    """Two replicas: every sample counts once, and both have the same weights."""
    pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
    from ebbflow.live import read_fleet

    script = tmp_path / "replica.py"
    script.write_text(
        "from ebbflow.workloads.torchvision_import import import_torchvision\n"
        "import_torchvision(needed_for='lightning')\n"
        "import runpy\n"
        f"runpy.run_path({str(EXAMPLE)!r})['main']({{'engine': 'live'}}, samples=120, max_epochs=1)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "ebbflow", "launch", "--replicas", "2", "--out", str(tmp_path / "fleet")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    account, runs = read_fleet(tmp_path / "fleet")
    assert account.exactly_once and account.epochs == 1
    assert len({run.end.weights_sha256 for run in runs if run.end is not None}) == 1
