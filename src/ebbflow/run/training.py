"""One run from its configuration to its record: the rim around the flow, where files and clocks are.

A run lives in a folder: `record.jsonl`, `checkpoint.pt` while it is under way, `weights.pt` at the end if wanted.
Killed at any moment and started again with the same configuration, it continues from its checkpoint and ends, on a
CPU, with the same weights bit for bit as one never interrupted. Several processes that torchrun started train the run
together; files are then the business of rank 0, and so are validations.

A run ends after its epochs. Where the rule counts progress by gain (AdaScale's own stopping rule) it ends when the
steps were worth as many reference steps as the epochs have, which takes more samples; ten times the epochs at most.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ebbflow import workloads
from ebbflow.core.files import remove_leftovers
from ebbflow.core.plugins import load_plugins
from ebbflow.data.ledger import Ledger
from ebbflow.errors import CheckpointError, ConfigError, Diverged, PlanError
from ebbflow.optim.elastic import ElasticOptimizer, OnNonfinite
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.optim.optimizers import build_optimizer
from ebbflow.record import (
    End,
    Event,
    LayersRow,
    NoRecord,
    RecordWriter,
    Run,
    StepRow,
    ValidationRow,
    layers_due,
    read_record,
)
from ebbflow.run.assemble import idle_ranks, loader_workers, make_engine
from ebbflow.run.checkpoint import load_checkpoint, load_model, save_checkpoint, weights_digest
from ebbflow.run.config import RunConfig
from ebbflow.run.device import cpu_settings, enough_memory
from ebbflow.run.flow import Flow
from ebbflow.run.header import make_header
from ebbflow.run.planning import MAX_EPOCHS, check_measurable, make_growth, make_plan
from ebbflow.run.torchrun import Group, joined

__all__ = ["Callbacks", "resolve", "train"]

_LOG = logging.getLogger(__name__)

RECORD = "record.jsonl"
CHECKPOINT = "checkpoint.pt"
WEIGHTS = "weights.pt"


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a caller wants to be told while a run goes on."""

    on_start: Callable[[int, int], None] = lambda done, total: None
    """(samples committed already, samples in all), once."""
    on_step: Callable[[StepRow], None] = lambda row: None
    on_validation: Callable[[ValidationRow], None] = lambda row: None
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every step; if so, a checkpoint is written and KeyboardInterrupt raised."""


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with everything that was left open filled in from the workload's recipe."""
    recipe = workloads.recipe(config.workload)
    open_fields = ("epochs", "lr", "ref_batch", "local_batch", "optimizer", "schedule")
    filled = {name: getattr(recipe, name) for name in open_fields if getattr(config, name) is None}
    return replace(config, **filled, label=config.label or (Path(config.plan).stem if config.plan else config.trace))


class _Trainer:
    """The parts of one run; `run` is the whole story."""

    def __init__(self, config: RunConfig, folder: Path, command: str, group: Group) -> None:
        load_plugins(config.plugins)
        self.config = config = resolve(config)
        assert config.epochs and config.lr and config.ref_batch and config.optimizer  # resolve() filled them in
        self.folder = folder
        self.group = group
        device = group.device(config.device)
        self.task = workloads.build(
            config.workload, data=config.data, seed=config.seed, device=device,
            loader_workers=loader_workers(config),
        )  # fmt: skip
        samples = len(self.task.train)
        self.total_samples = config.epochs * samples
        model = self.task.model
        group.same_weights(model)
        optimizer = ElasticOptimizer(
            build_optimizer(config.optimizer, model, lr=config.lr),
            config.rule,
            base_batch=config.ref_batch,
            schedule=config.schedule,
            epochs=config.epochs,
            epoch_samples=samples,
            memory_steps=config.memory_steps,
            measure_every=config.measure_every,
            clip=config.clip,
            on_nonfinite=cast(OnNonfinite, config.on_nonfinite),
        )
        self.recorded = config.recorded()  # now: somebody may edit the trace while the run follows it as it was
        self.plan, self.trace = make_plan(config, samples, by_gain=optimizer.by_gain)
        growth = make_growth(config, samples)
        needs = optimizer.rule.needs | (growth.policy.needs if growth is not None else frozenset())
        if needs:
            check_measurable(config, self.plan, samples)
        self.engine = make_engine(
            config, self.task, self.plan, optimizer, needs=needs, ranks=group.ranks,
            on_event=lambda what, text: self.record.write(Event(step=self.flow.step, what=what, text=text)),
        )  # fmt: skip
        if isinstance(self.task.train, workloads.PrefetchingSource):
            self.task.train.follow(self.engine.upcoming)
        skips = config.on_nonfinite == "skip"
        self.flow = Flow(
            self.engine,
            optimizer,
            Ledger(samples=samples),
            total_samples=self.total_samples,
            statistics=RunningStatistics(model, follow=config.bn_follows_batch, undoable=skips)
            if skips or config.bn_follows_batch
            else None,
            average=WeightAverage(model, config.ema) if config.ema is not None else None,
            growth=growth,
        )
        self.record = self._open_record(command)

    def _open_record(self, command: str) -> RecordWriter:
        """Continue from the checkpoint if there is one, else begin a new record."""
        path, checkpoint = self.folder / RECORD, self.folder / CHECKPOINT
        found = self.group.shared(
            lambda: load_checkpoint(checkpoint) if checkpoint.is_file() and path.is_file() else None
        )
        size = None if found is None else self._restore(found, checkpoint)
        if not self.group.leads:
            return NoRecord()
        remove_leftovers(checkpoint)
        if size is None:  # a checkpoint whose record was deleted must not be taken for one of the new record
            with suppress(OSError):  # the record tells what is wrong with the folder
                checkpoint.unlink()
        record = RecordWriter(path, resume_at=size)
        if size is not None:
            record.write(Event(step=self.flow.step, what="resumed", text=f"from {CHECKPOINT}"))
            return record
        record.write(
            make_header(
                self.config, self.task, self.plan, self.trace, self.flow.optimizer,
                command=command, emulation=self.engine.describe(),
            )
        )  # fmt: skip
        if idle := idle_ranks(self.engine):
            _LOG.warning(idle)
            record.write(Event(step=0, what="idle ranks", text=idle))
        return record

    def _restore(self, state: dict[str, Any], path: Path) -> int:
        """Everything at the last checkpoint; returns the size that the record had then."""
        if other := self.config.differences(state["settings"]):
            raise CheckpointError(
                f"{path} belongs to a run with other settings ({'; '.join(other)}); go on with those, or choose "
                f"another folder"
            )
        load_model(self.task.model, state["model"], path)
        self.flow.optimizer.load_state_dict(state["optimizer"])
        for name, part in (("average", self.flow.average), ("growth", self.flow.growth)):
            if part is not None:
                part.load_state_dict(state[name])
        self.flow.ledger = Ledger.restore(state["ledger"], samples=len(self.task.train))
        self.flow.step = state["step"]
        self.flow.wall_s = state["wall_s"]
        self.engine.restore(state.get("engine", {}))
        torch.set_rng_state(state["rng"])
        return int(state["record_bytes"])

    def save(self) -> None:
        """A checkpoint of the last complete step."""
        if not self.group.leads:
            return
        save_checkpoint(
            self.folder / CHECKPOINT,
            {
                "settings": self.recorded,
                "model": self.task.model.state_dict(),
                "optimizer": self.flow.optimizer.state_dict(),
                "average": self.flow.average.state_dict() if self.flow.average is not None else None,
                "growth": self.flow.growth.state_dict() if self.flow.growth is not None else None,
                "engine": self.engine.state(),
                "ledger": self.flow.ledger.state(),
                "step": self.flow.step,
                "wall_s": self.flow.wall_s,
                "rng": torch.get_rng_state(),
                "record_bytes": self.record.flush(),
            },
        )

    def run(self, callbacks: Callbacks, *, checkpoint_every_s: float) -> End:
        """All epochs, or all the gain; the record's last row says how it ended."""
        flow, saved = self.flow, time.monotonic()
        should_stop = self._agree_to_stop(callbacks)
        callbacks.on_start(flow.ledger.total, self.total_samples)
        try:
            while not flow.optimizer.finished:
                if flow.ledger.total >= MAX_EPOCHS * self.total_samples:
                    return self._end("failed", self._too_little_gain())
                row = self._step()
                if row is None:
                    self.record.write(Event(step=flow.step, what="lost step", text="a worker left in its middle"))
                    continue
                self.record.write(row)
                self._write_layers(row)
                callbacks.on_step(row)
                if "skipped" in row.stats:
                    self.record.write(Event(step=row.step, what="skipped step", text="its gradient was not finite"))
                elif row.loss is None or not math.isfinite(row.loss):
                    raise Diverged(f"the training loss is {row.loss} at step {row.step} (epoch {row.epoch})")
                if flow.ledger.position == 0 or flow.optimizer.finished:
                    self._validate(row, callbacks)
                stop = should_stop()
                if stop or time.monotonic() - saved >= checkpoint_every_s:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
        except Diverged as error:
            return self._end("diverged", str(error))
        return self._end("finished", self._by_gain() if flow.optimizer.by_gain else "")

    def _agree_to_stop(self, callbacks: Callbacks) -> Callable[[], bool]:
        """Ranks stop after the same step, though a signal reaches each in its own time."""
        together = self.engine.step_sum
        if together is None:
            return callbacks.should_stop
        together.should_stop = callbacks.should_stop
        return lambda: together.stopping

    def _write_layers(self, row: StepRow) -> None:
        """What a layer-wise rule heard and said of each layer, in about 200 steps of the run."""
        update = self.flow.optimizer.last
        if update is None or update.moments is None or not update.moments.layer_noise:
            return
        if update.applied and layers_due(row, total_samples=self.total_samples):
            noise, signal = update.moments.layer_noise, update.moments.layer_signal
            multiplier = update.scaling.by_layer(len(noise))
            self.record.write(LayersRow.of(row, noise=noise, signal=signal, multiplier=multiplier))

    def _step(self) -> StepRow | None:
        try:
            return self.flow.run_step()
        except PlanError as error:
            if not self.flow.optimizer.by_gain:
                raise
            raise PlanError(
                f"the plan ends before the run: after {self._by_gain()} of {self._reference_steps:g} ({error}). A run "
                f"by gain takes more samples than its epochs: repeat the trace (--repeat), or count progress by samples"
            ) from None

    @property
    def _reference_steps(self) -> float:
        return self.total_samples / self.flow.optimizer.base_batch

    def _by_gain(self) -> str:
        done = self.flow.optimizer.progress / self.flow.optimizer.base_batch
        return f"{self.flow.step} steps and {self.flow.ledger.total} samples, worth {done:.1f} reference steps"

    def _too_little_gain(self) -> str:
        return (
            f"the gain is too small for the run ever to end: {self._by_gain()} of {self._reference_steps:g}, after "
            f"{MAX_EPOCHS} times the samples of its epochs; use smaller batches, or count progress by samples"
        )

    def _validate(self, row: StepRow, callbacks: Callbacks) -> None:
        """Validate after every `validate_every` epochs, and at the end of the run."""
        ledger = self.flow.ledger
        due = self.flow.optimizer.finished or ledger.epoch % self.config.validate_every == 0
        if not (due and self.group.leads):
            return
        began = time.perf_counter()
        with self.engine.autocast():
            metrics = self.task.evaluate(self.task.model)
        if self.flow.average is not None:
            with self.flow.average.swapped_in(), self.engine.autocast():
                averaged = self.task.evaluate(self.task.model)
            metrics |= {f"ema_{name}": value for name, value in averaged.items()}
        self.flow.wall_s += time.perf_counter() - began
        validation = ValidationRow(
            step=self.flow.step,
            epoch=ledger.total / ledger.samples,
            samples=row.samples,
            time_s=row.time_s,
            wall_s=round(self.flow.wall_s, 6),
            metrics=metrics,
        )
        self.record.write(validation)
        callbacks.on_validation(validation)

    def _end(self, status: Any, text: str) -> End:
        end = End(
            status=status,
            steps=self.flow.step,
            samples=self.flow.ledger.total,
            wall_s=round(self.flow.wall_s, 6),
            text=text,
            weights_sha256=weights_digest(self.task.model),
        )
        self.record.write(end)
        self.record.flush()
        return end


def train(
    config: RunConfig,
    folder: Path,
    *,
    command: str = "",
    callbacks: Callbacks | None = None,
    checkpoint_every_s: float = 60.0,
    keep_weights: bool = True,
) -> Run:
    """Train to the end, or continue a run that was interrupted; the record of the whole run.

    A folder that holds a finished run of the same configuration is left alone and its record returned. In processes
    that torchrun started each call trains its part of the one run; rank 0 calls the callbacks, all ranks `should_stop`.
    """
    callbacks = callbacks or Callbacks()
    with joined(config.device) as group:
        done = group.shared(lambda: _finished(config, folder))
        if done is not None:
            return done
        if not group.leads:
            callbacks = Callbacks(should_stop=callbacks.should_stop)
        with cpu_settings(config.threads), enough_memory(config.device):
            trainer = _Trainer(config, folder, command, group)
            with trainer.record, closing(trainer.task):
                trainer.run(callbacks, checkpoint_every_s=checkpoint_every_s)
                if keep_weights and group.leads:
                    average = trainer.flow.average
                    ema = {"ema": average.state_dict()} if average is not None else {}
                    save_checkpoint(folder / WEIGHTS, {"model": trainer.task.model.state_dict(), **ema})
        if group.leads:
            (folder / CHECKPOINT).unlink(missing_ok=True)
        return group.shared(lambda: read_record(folder / RECORD))


def _begun(path: Path) -> bool:
    """Whether the record has its header; not if the run was killed before it wrote one."""
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def _finished(config: RunConfig, folder: Path) -> Run | None:
    """The record in the folder if its run came to an end; an error if it is a run of another configuration."""
    path = folder / RECORD
    if not path.is_file() or (folder / CHECKPOINT).is_file() or not _begun(path):
        return None
    run = read_record(path)
    if run.status not in ("finished", "diverged"):
        return None
    load_plugins(config.plugins)
    other = resolve(config).differences(run.header.config)
    if other:
        raise ConfigError(f"{folder} holds a run of another configuration ({'; '.join(other)}); give another --out")
    if moved := config.other_data(run.header.config):
        _LOG.warning("%s holds this run, which is not repeated: %s; give another --out for other data", folder, moved)
    return run
