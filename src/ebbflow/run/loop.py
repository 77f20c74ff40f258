"""The training loop: steps of a flow until the run ends, each written to the record, with validations and
checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ebbflow.core.wording import called
from ebbflow.engines.module_modes import modes_kept
from ebbflow.errors import ConfigError, Diverged, PlanError
from ebbflow.optim.rule_optimizer import Update
from ebbflow.record import End, Event, LayersRow, Row, StepRow, ValidationRow, layers_due
from ebbflow.run.checkpoint import weights_digest
from ebbflow.run.flow import Flow, check_loss
from ebbflow.run.planning import MAX_EPOCHS

__all__ = ["Callbacks", "Evaluate", "RowWriter", "TrainingLoop", "numbers"]

Evaluate = Callable[[], Mapping[str, Any] | None]
"""Scores of the model over the validation samples: numbers, or tensors with one."""


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain numbers; tensors and arrays of one element count as numbers."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"evaluate() returned a {type(metrics).__name__}; expected the scores by name, such as {{'accuracy': 0.93}}"
        )
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"the metric {name!r} is a {type(value).__name__}; expected one number, or a tensor with one"
            ) from None
    return found


def _probe_text(factor: float, coefficient: float) -> str:
    """What came of a probe.

    >>> _probe_text(2.0, 2.0)
    'the coefficient is 2 from here on, 2 times what it was'
    """
    if not factor:
        return f"abandoned: the workers changed; the coefficient stays {coefficient:g}"
    if factor == 1:
        return f"the coefficient stays {coefficient:g}: no other was better"
    return f"the coefficient is {coefficient:g} from here on, {factor:g} times what it was"


class RowWriter(Protocol):
    """Where the rows of a record go."""

    def write(self, row: Row) -> None:
        """Append one row."""

    def flush(self) -> int:
        """Make what was written so far survive a crash."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions that are called while a run goes on."""

    on_start: Callable[[int, int], None] = lambda done, total: None
    """Called once with the samples that are committed already and the samples of the whole run."""
    on_resume: Callable[[int, float], None] = lambda step, epoch: None
    """Called before that if the run goes on from a checkpoint, with the steps and epochs that are committed already."""
    on_step: Callable[[StepRow], None] = lambda row: None
    """Called after every committed step."""
    on_validation: Callable[[ValidationRow], None] = lambda row: None
    """Called after every validation."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every step; if True, a checkpoint is written and KeyboardInterrupt raised."""


class TrainingLoop:
    """Runs the steps of a flow: the same loop for all engines and front ends.

    After each committed step the row is written to the record, the callbacks are called and the loss is checked. After
    every `validate_every` epochs, and at the end, the model is evaluated. `save` is called every `checkpoint_every_s`
    seconds, and before the run is interrupted because `should_stop` said so; `save_final` before the last row.
    """

    def __init__(
        self,
        flow: Flow,
        record: RowWriter,
        *,
        evaluate: Evaluate | None = None,
        validate_every: int = 1,
        callbacks: Callbacks | None = None,
        save: Callable[[], None] | None = None,
        save_final: Callable[[], None] | None = None,
        checkpoint_every_s: float = math.inf,
    ) -> None:
        self.flow = flow
        self.record = record
        self.evaluate = evaluate
        self.validate_every = validate_every
        self.callbacks = callbacks or Callbacks()
        self.save = save or (lambda: None)
        self.save_final = save_final or (lambda: None)
        self.checkpoint_every_s = checkpoint_every_s
        self.ending: End | None = None
        """The last row of the record, once it was written."""
        self._saved_at = time.monotonic()
        self._should_stop = flow.engine.agree_to_stop(self.callbacks.should_stop)

    def run(self) -> End:
        """All epochs, or all the gain where the rule counts that; the last row of the record says how it ended."""
        self.begin()
        try:
            while self.continues():
                self.after(self.next_step())
        except Diverged as error:
            return self.end("diverged", str(error))
        assert self.ending is not None
        return self.ending

    def begin(self) -> None:
        """Tell the callbacks where the run begins, or goes on."""
        flow = self.flow
        if flow.step:
            self.callbacks.on_resume(flow.step, flow.ledger.total / flow.ledger.samples)
        self.callbacks.on_start(flow.ledger.total, flow.total_samples)

    def continues(self) -> bool:
        """Whether there is another step; if not, the end of the run is written."""
        self.validate()  # what was interrupted in the evaluation of an epoch makes up for it
        if self.ending is not None:
            return False
        flow = self.flow
        if flow.finished:
            self.end("finished", self._gained() if flow.optimizer.by_gain else "")
            return False
        if 0 < MAX_EPOCHS * flow.total_samples <= flow.ledger.total:
            self.end("failed", self._too_little_gain())
            return False
        return True

    def next_step(self) -> StepRow:
        """Compute steps until one is committed."""
        while (row := self._try_step()) is None:
            self.lost_step()
        return row

    def lost_step(self) -> None:
        """Write to the record that a step was lost."""
        self.event("lost step", "a worker left during the step; the same samples are assigned again")

    def _try_step(self) -> StepRow | None:
        with self.plan_errors_explained():
            return self.flow.run_step()

    @contextmanager
    def plan_errors_explained(self) -> Iterator[None]:
        """Around the beginning of a step: a plan that ends before the gain is there says what to do about it."""
        try:
            yield
        except PlanError as error:
            if not self.flow.optimizer.by_gain:
                raise
            raise PlanError(
                f"the plan ends before the run: after {self._gained()} of {self._reference_steps:g} ({error}). A run "
                f"that counts gain takes more samples than its epochs: repeat the trace ({called('repeat', True)}), or "
                f"count samples"
            ) from None

    def after(self, row: StepRow) -> None:
        """Everything that follows a committed step."""
        if row.step == self.flow.planned_steps:
            text = f"after {row.step:,} steps; what was given back is trained on again with the last fleet of the plan"
            self.event("end of the plan", text, step=row.step)
        self.record.write(row)
        update = self.flow.optimizer.last
        if update is not None and update.moments is not None and update.moments.layer_noise:
            self._write_layers(row, update)
        self.flow.incomplete = False
        self.callbacks.on_step(row)
        if "skipped" in row.stats and "given_back" not in row.stats:
            self.event("skipped step", "its gradient was not finite", step=row.step)
        if self.flow.ledger.position == 0 and (dropped := row.stats.get("dropped_in_epoch")):
            text = f"{dropped:,.0f} of the {self.flow.ledger.samples:,} samples of epoch {row.epoch} were dropped"
            self.event("dropped samples", text, step=row.step)
        if (size := row.stats.get("too_large_gb")) is not None:
            large = f"a state of {size:.3g} GB takes more than a quarter of the free memory of the host"
            decided = "nothing is guarded or probed from here on"
            if not self.flow.engine.single_process:
                decided = "it is kept all the same, since all processes must decide alike"
            self.event("large snapshots", f"{large}; {decided}", step=row.step)
        if (factor := row.stats.get("probed")) is not None:
            self.event("probe", _probe_text(factor, row.stats["coefficient"]), step=row.step)
        if "given_back" in row.stats and "probe" not in row.stats:
            back = f"{row.stats['given_back']:.0f} samples are given back and trained on again"
            self.event(
                "went back", f"the loss was {row.loss:.4g}: back to the last confirmed snapshot, {back}", step=row.step
            )
        check_loss(row)
        self.validate()
        stop = self._should_stop()
        if stop or time.monotonic() - self._saved_at >= self.checkpoint_every_s:
            self.save()
            self._saved_at = time.monotonic()
        if stop:
            raise KeyboardInterrupt

    def _write_layers(self, row: StepRow, update: Update) -> None:
        """What a layer-wise rule measured and decided for each layer, in about 200 steps of the run."""
        assert update.moments is not None
        if update.applied and layers_due(row, total_samples=self.flow.total_samples):
            noise, signal = update.moments.layer_noise, update.moments.layer_signal
            multiplier = update.scaling.by_layer(len(noise))
            warm_up = update.scaling.warm_up
            self.record.write(LayersRow.of(row, noise=noise, signal=signal, multiplier=multiplier, warm_up=warm_up))

    def validate(self) -> None:
        """Evaluate the model, if an epoch has ended since it was evaluated last, and this epoch is one that counts."""
        flow, ledger = self.flow, self.flow.ledger
        if flow.validation_due is None:
            return
        due = flow.finished or ledger.epoch % self.validate_every == 0
        if self.evaluate is None or not due or not flow.engine.writes_files:
            flow.validation_due = None
            return
        samples, time_s = flow.validation_due
        began = time.perf_counter()
        flow.engine.sync()
        with modes_kept(flow.engine.model), flow.engine.autocast():
            metrics = numbers(self.evaluate())
        if flow.average is not None:
            with flow.average.swapped_in(), modes_kept(flow.engine.model), flow.engine.autocast():
                averaged = numbers(self.evaluate())
            metrics |= {f"ema_{name}": value for name, value in averaged.items()}
        flow.wall_s += time.perf_counter() - began
        if not metrics:
            flow.validation_due = None
            return
        validation = ValidationRow(
            step=flow.step,
            epoch=ledger.total / ledger.samples,
            samples=samples,
            time_s=time_s,
            wall_s=round(flow.wall_s, 6),
            metrics=metrics,
        )
        self.record.write(validation)
        flow.validation_due = None
        self.callbacks.on_validation(validation)

    def event(self, what: str, text: str, *, step: int | None = None) -> None:
        """Write an event to the record."""
        self.record.write(Event(step=self.flow.step if step is None else step, what=what, text=text))

    def end(self, status: Literal["finished", "diverged", "failed"], text: str = "") -> End:
        """Save the final state, then write the last row of the record, which says that the run has ended."""
        self.flow.engine.sync()
        self.save_final()
        end = End(
            status=status,
            steps=self.flow.step,
            samples=self.flow.ledger.total,
            wall_s=round(self.flow.wall_s, 6),
            text=text,
            weights_sha256=weights_digest(self.flow.engine.model),
        )
        self.record.write(end)
        self.record.flush()
        self.ending = end
        return end

    @property
    def _reference_steps(self) -> float:
        return self.flow.total_samples / self.flow.optimizer.base_batch

    def _gained(self) -> str:
        done = self.flow.optimizer.progress / self.flow.optimizer.base_batch
        return f"{self.flow.step} steps and {self.flow.ledger.total} samples, worth {done:.1f} reference steps"

    def _too_little_gain(self) -> str:
        return (
            f"the gain is too small for the run ever to end: {self._gained()} of {self._reference_steps:g}, after "
            f"{MAX_EPOCHS} times the samples of its epochs; use smaller batches, or count progress by samples"
        )
