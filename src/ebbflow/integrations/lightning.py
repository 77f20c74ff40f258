"""Lightning's Trainer on workers that come and go.

    trainer = L.Trainer(strategy=ElasticStrategy(trace="spot.csv", rule="sqrt", base_batch=64), max_epochs=10)
    trainer.fit(module, loader)

The LightningModule stays as it is, with automatic optimization.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ebbflow.core.extras import require
from ebbflow.errors import ConfigError
from ebbflow.integrations.session_optimizer import ReferenceSteps, SessionOptimizer, refuse_settings
from ebbflow.run.session import Session, SessionStep
from ebbflow.workloads import DatasetSource

if TYPE_CHECKING:
    from lightning.pytorch import callbacks as _callbacks
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    _NEEDED = {"extra": "lightning", "needed_for": "ElasticStrategy"}
    _callbacks = require("lightning.pytorch.callbacks", **_NEEDED)
    Callback = _callbacks.Callback
    SingleDeviceStrategy = require("lightning.pytorch.strategies", **_NEEDED).SingleDeviceStrategy
    is_overridden = require("lightning.pytorch.utilities.model_helpers", **_NEEDED).is_overridden

__all__ = ["ElasticStrategy"]

_INSTEAD = {
    "epochs": "max_epochs of the Trainer",
    "max_steps": "max_steps of the Trainer",
    "schedule": "a scheduler in configure_optimizers",
    "clip": "gradient_clip_val of the Trainer",
    "precision": "precision of the Trainer",
    "micro_batch": "batch_size of the DataLoader",
    "evaluate": "validation_step of the module",
    "out": "default_root_dir of the Trainer",
    "tracker": "logger of the Trainer",
}

_REFUSED_CALLBACKS = {
    "GradientAccumulationScheduler": "it leaves steps of the session without an update; set accumulate_grad_batches "
    "of the Trainer for the whole run, and let policy= of the session change the batch",
    "LearningRateFinder": "it trains before the session begins; find the rate without ElasticStrategy, at "
    "base_batch samples per step, and use it in configure_optimizers",
    "BatchSizeFinder": "it trains with several DataLoaders; find the size without ElasticStrategy, and use it as "
    "batch_size of the DataLoader",
}
"""Callbacks of Lightning that do not work with the steps of a session, why, and what to do instead."""


class _Steps:
    """What the loop of Lightning takes for its batches: one item per step, whose samples the session reads."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def __iter__(self) -> Iterator[_Steps]:
        while self._strategy.session is not None:
            yield self


class _LogSteps(Callback):  # type: ignore[misc]
    """Gives Lightning's loggers what the rule did in every step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        strategy = trainer.strategy
        row = strategy.optimizer.row
        if row is not None:
            shown = row.tracked(strategy.session.flow.optimizer.base_batch)
            pl_module.log_dict({name: float(value) for name, value in shown.items()}, batch_size=row.batch)


class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning in one process, whose steps follow a trace; or, with `engine="live"`, as a replica of a live fleet.

    Settings are those of an `ebbflow.Session`: base_batch (the batch at which the rate was tuned), rule, trace, policy,
    seed, ... A worker takes `batch_size * accumulate_grad_batches` samples per step, `batch_size` of them in a backward
    pass, for each of which `training_step` is called.

    Guarantees: every sample counts once per epoch; the gradient of a step is the mean over its samples, or over what
    `training_step` counts: with {"loss": mean, "count": tokens} it is the mean over tokens. `gradient_clip_val` sees
    that mean. One step of the fleet is one batch and one `global_step` of the Trainer, for validation, logging and
    checkpoints, which hold the position in the data. A scheduler with `"interval": "step"` counts reference steps
    (`ReferenceSteps`), and the rule multiplies its rate once, for the duration of the step. `max_steps` counts steps at
    the reference batch.

    Limits: one optimizer, automatic optimization, no "16-mixed" precision (use "bf16-mixed"). Hooks that get the batch
    (`on_train_batch_start`, ...) get a placeholder; `training_step` gets the samples. `on_before_backward` and
    `on_after_backward` run once per step, with its mean loss and gradient. `limit_train_batches`,
    `reload_dataloaders_every_n_epochs`, several DataLoaders, samplers of one's own, streams, a `backward` of the module
    and callbacks that search for a rate or a batch or change the accumulation are refused.
    """

    strategy_name = "ebbflow"
    optimizers: list[Any]

    def __init__(self, *, device: torch.device | str = "auto", **settings: Any) -> None:
        """`device`: by default the first GPU, or the CPU if there is none."""
        refuse_settings(settings, _INSTEAD)
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__(device=device)
        self._settings = settings
        self._live = settings.get("engine") == "live"
        self.session: Session | None = None
        """The session of the fit that is under way."""
        self.optimizer: SessionOptimizer
        """What Lightning steps."""
        self._stack = ExitStack()
        self._training = False

    # Beginning and ending -----------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """The optimizer and the schedulers of the module, for the steps of a session."""
        self._check(trainer)
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(f"configure_optimizers returned {len(self.optimizers)} optimizers; expected one")
        if not self.optimizers[0].param_groups:  # what Lightning puts in the place of None
            raise ConfigError("configure_optimizers returned no optimizer; expected one")
        self.optimizer = SessionOptimizer(self.optimizers[0])
        self.optimizers = [self.optimizer]
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                # With a frequency Lightning would ask for every so many updates only, which are not reference steps.
                config.scheduler = ReferenceSteps(config.scheduler, self.optimizer, every=config.frequency)
                config.frequency = 1
        if not any(isinstance(callback, _LogSteps) for callback in trainer.callbacks):
            trainer.callbacks.append(_LogSteps())

    def _check(self, trainer: Any) -> None:
        if not self.lightning_module.automatic_optimization:
            raise ConfigError("the module has automatic_optimization = False; expected automatic optimization")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError("precision is '16-mixed', whose scaler unscales before clipping; use 'bf16-mixed'")
        limit = trainer.limit_train_batches
        if (isinstance(limit, int) or limit != 1.0) and not trainer.fast_dev_run:  # 1 is one batch, 1.0 all of them
            raise ConfigError(
                f"limit_train_batches (or overfit_batches) is {limit}, but every sample counts once per epoch; train "
                f"on a smaller data set"
            )
        if reload := trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                f"reload_dataloaders_every_n_epochs is {reload}, but the session reads one DataLoader in all epochs; "
                f"leave it at 0, and let the data set itself change what it returns"
            )
        if is_overridden("backward", self.lightning_module):
            raise ConfigError(
                "the module overrides backward, which would not be called, since the session weights the gradients of "
                "a step; change the loss in training_step, or the mean gradient in on_after_backward, which runs once "
                "per step"
            )
        self._check_callbacks(trainer)
        if not self._live and (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"this is one of {ranks} processes (WORLD_SIZE), each of which would train the whole run; start "
                f"several with `ebbflow launch` and engine='live', or one without torchrun"
            )

    def _check_callbacks(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            for name, why in _REFUSED_CALLBACKS.items():
                if isinstance(callback, getattr(_callbacks, name)):
                    raise ConfigError(f"{name} is among the callbacks of the Trainer: {why}")
            averaging = _callbacks.StochasticWeightAveraging
            if not isinstance(callback, averaging) or trainer.max_epochs == -1:  # without an end, there is no last pass
                continue
            if averaging.pl_module_contains_batch_norm(self.lightning_module):
                raise ConfigError(
                    "StochasticWeightAveraging is among the callbacks of the Trainer, and the module has batch norm, "
                    "whose statistics it computes in another pass over the data, which a session does not have; leave "
                    "it out and give ema=0.999 to ElasticStrategy: after fit, the weights are the average within "
                    "`with strategy.session.flow.average.swapped_in():`"
                )

    def process_dataloader(self, dataloader: object) -> object:
        """The DataLoader of the training is read by a session, which begins here; others stay as they are."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise ConfigError(f"the data of the training is a {type(dataloader).__name__}; expected one DataLoader")
        if self._training:
            raise ConfigError("the training has several DataLoaders; expected one: combine their data sets")
        DatasetSource.from_loader(dataloader, torch.device("cpu"), pairs=False)  # refuses what cannot be followed
        assert dataloader.batch_size is not None, "a DataLoader without a batch size was refused"
        samples, accumulated = len(dataloader.dataset), trainer.accumulate_grad_batches  # type: ignore[arg-type]
        trainer.accumulate_grad_batches = 1  # the session cuts steps into backward passes
        settings: dict[str, Any] = {"local_batch": dataloader.batch_size * accumulated, **self._settings}
        if not self._live:
            settings = {"engine": "loop", "loader_workers": dataloader.num_workers, **settings}
        total = self._total(trainer, samples)
        self.session = Session(
            self.lightning_module,
            self.optimizer.inner,
            DataLoader(
                dataloader.dataset,
                batch_size=dataloader.batch_size,
                sampler=dataloader.sampler,
                collate_fn=dataloader.collate_fn,
                num_workers=dataloader.num_workers,
                worker_init_fn=dataloader.worker_init_fn,
            ),
            epochs=math.ceil(total / samples),
            micro_batch=dataloader.batch_size,
            **settings,
        )
        self._stack.enter_context(self.session)
        self._training = True
        flow = self.session.flow
        flow.total_samples = flow.optimizer.total_samples = total
        self.optimizer.begin(self.session)
        return _Steps(self)

    def _total(self, trainer: Any, samples: int) -> int:
        """Samples of the whole run; the loop itself does not count steps, since these differ in size."""
        loop, reference = trainer.fit_loop, self._settings.get("base_batch")
        steps, epochs = loop.max_steps, loop.max_epochs
        if steps in (None, -1) and epochs in (None, -1):
            raise ConfigError("max_epochs and max_steps of the Trainer are both -1; expected the length of the run")
        loop.epoch_loop.max_steps = -1
        totals = [epochs * samples] if epochs not in (None, -1) else []
        if steps not in (None, -1) and reference is not None:
            totals.append(steps * reference)
        return int(min(totals, default=samples))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the state for the session, which begins when the data is there."""
        if self._live:
            raise ConfigError("ckpt_path is given, but a live fleet continues from its own checkpoints; leave it out")
        (state,) = checkpoint["optimizer_states"]
        self.optimizer.load_state_dict(state)

    def save_checkpoint(self, *arguments: Any, **others: Any) -> None:
        """Save; in a live fleet on the first replica only."""
        if not self._live or self.session.first:  # type: ignore[union-attr]
            super().save_checkpoint(*arguments, **others)

    def on_train_end(self) -> None:
        """The end of a run that is finished; one that was stopped has none."""
        self._check_applied()
        if self.session is not None and self.session.flow.finished:
            self.session.next_step()
        self._close(None)

    def on_exception(self, exception: BaseException) -> None:
        """Close the session as a `with` would."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        stack, self._stack, self._training = self._stack, ExitStack(), False
        stack.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error else None)

    # One step -----------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, *arguments: Any, **others: Any) -> Any:
        """Move a batch; there is none yet where Lightning asks for it in training."""
        return batch if isinstance(batch, _Steps) else super().batch_to_device(batch, *arguments, **others)

    def training_step(self, batch: Any, *arguments: Any, **others: Any) -> Any:
        """The backward passes of a step, and the sum over all workers; again, if one of them was lost meanwhile."""
        assert self.session is not None
        self._check_applied()
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        while (step := self.session.next_step()) is not None:
            for samples in step:
                self._backward(step, samples, *arguments, **others)
            if step.combine():
                self.optimizer.combined = step
                ledger = self.session.flow.ledger.commit(step.assignment)
                progress.is_last_batch = ledger.epoch > step.epoch
                trainer.should_stop = trainer.should_stop or 0 < self.session.flow.total_samples <= ledger.total
                return torch.tensor(step.loss, device=self.root_device)
        progress.is_last_batch = trainer.should_stop = True  # this replica left, or another one has finished the run
        return torch.zeros((), device=self.root_device)

    def _check_applied(self) -> None:
        """Refuse to go on where a step was computed and its gradient not applied: it would be lost without a word."""
        if self.optimizer.combined is not None:
            raise ConfigError(
                f"step {self.optimizer.combined.number} was computed, but the optimizer was not stepped with its "
                f"gradient, as where optimizer_step of the module or a callback accumulates batches; call "
                f"optimizer.step(closure=optimizer_closure) for every batch, and set accumulate_grad_batches of the "
                f"Trainer instead"
            )

    def _backward(self, step: SessionStep, samples: Any, *arguments: Any, **others: Any) -> None:
        module = self.lightning_module
        samples = self.precision_plugin.convert_input(samples)
        samples = self.batch_to_device(module._on_before_batch_transfer(samples))
        results = module.trainer._results
        results.batch, results.batch_size = samples, None  # for `self.log`, which counts samples
        output = super().training_step(samples, *arguments, **others)
        loss, count = (output["loss"], output.get("count")) if isinstance(output, Mapping) else (output, None)
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"training_step returned {type(output).__name__}; expected a loss for every batch")
        step.backward(loss if count is None else loss * count, count=count)

    def backward(self, closure_loss: torch.Tensor, *arguments: Any, **others: Any) -> torch.Tensor:
        """The hooks around it; the backward passes themselves are part of `training_step`."""
        loss: torch.Tensor = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(loss, self.lightning_module)  # type: ignore[no-any-return]
