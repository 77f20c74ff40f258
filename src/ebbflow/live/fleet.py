"""This process as a replica of a fleet: its training loop runs on whoever is there."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ebbflow._version import __version__
from ebbflow.core.signals import StopSignal
from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.micro_batches import Fetch, Loss, Precision
from ebbflow.errors import ConfigError, Diverged
from ebbflow.live.connection import FleetConnection, LeftFleet, TrainingFinished
from ebbflow.live.engine import LiveEngine, LoadedMicroBatch, Sizes, by_policy
from ebbflow.live.faults import ScriptedFaults
from ebbflow.live.membership import initial_lineage
from ebbflow.live.protocol import STATUS_KEY, ReplicaConfig
from ebbflow.live.replica_files import Checkpoints, ReplicaRecord, StatusFile
from ebbflow.live.state import FleetState, Stateful, job_of
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.plan.growing import Growing
from ebbflow.plan.growth import Growth
from ebbflow.plan.policies import make_policy
from ebbflow.record import End, Header, StepRow, ValidationRow
from ebbflow.run.checkpoint import weights_digest
from ebbflow.run.flow import Flow, OpenStep

__all__ = ["Fleet", "OnEpoch", "Step"]

OnEpoch = Callable[[int], Mapping[str, float] | None]


class Step:
    """One step of the fleet, as this replica sees it: its own micro-batches of the samples.

    The step is complete when the loop asks for the next one: then the gradients are added up, the rule sets the rate
    and the optimizer steps, on every replica alike. If a replica is lost meanwhile nothing has happened, and the next
    step has the same samples again.
    """

    def __init__(self, engine: LiveEngine, opened: OpenStep) -> None:
        self._engine = engine
        self._micro_batch: LoadedMicroBatch | None = None
        self.assignment: Assignment = opened.assignment
        """The samples of the whole step: epoch, and positions in the epoch's order."""
        self.workers = opened.size.workers

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each micro-batch; call `backward` on its loss before the next one."""
        for micro_batch in self._engine.micro_batches():
            self._micro_batch = micro_batch
            yield micro_batch.inputs, micro_batch.targets
        self._micro_batch = None

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of `loss.backward()`: the mean loss over the micro-batch, weighted as the step's mean needs it."""
        if self._micro_batch is None:
            raise ConfigError("backward() was called outside of `for x, y in step`; call it once for each micro-batch")
        self._engine.backward(loss, self._micro_batch)
        self._micro_batch = None


class Fleet:
    """This replica in its fleet: iterate over it to train, inside a `with`.

    Guarantees, whoever comes, goes or is killed: every sample counts exactly once an epoch; all replicas have the same
    weights, bit for bit, after every step that they committed; one that comes has the complete state before it takes
    part. What was trained is lost only when all replicas are lost at once, and then only the steps since the last
    checkpoint.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: ElasticOptimizer,
        fetch: Fetch,
        settings: ReplicaConfig,
        *,
        samples: int,
        epochs: int,
        policy: str | Sizes,
        local_batch: int | None,
        loss: Loss | None,
        seed: int,
        micro_batch: int | None,
        precision: Precision,
        ema: float | None,
        extras: Mapping[str, Stateful],
        notice: Callable[[], bool] | None,
        on_commit: Callable[[StepRow], None] | None,
        on_epoch: OnEpoch | None,
        checkpoint_every_s: float,
        describe: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self._notice = notice
        self._on_commit = on_commit
        self._on_epoch = on_epoch
        self._checkpoint_every_s = checkpoint_every_s
        self._describe = describe
        self._asked_to_leave = False
        self._stop = StopSignal()
        self._stack = ExitStack()
        self._saved = time.monotonic()
        growing: Growing | None = None
        if callable(policy):
            sizes, named = policy, "own"
        else:
            made = make_policy(policy, local_batch)
            sizes, named = by_policy(made), str(made)
            growing = made if isinstance(made, Growing) else None
        job = job_of(
            model,
            job=settings.job,
            samples=samples,
            epochs=epochs,
            seed=seed,
            rule=optimizer.rule,
            base_batch=optimizer.base_batch,
            optimizer=type(optimizer.inner).__name__,
            policy=named,
            micro_batch=micro_batch,
            precision=precision,
        )
        self._checkpoints = Checkpoints(settings.folder / "checkpoints", on_event=self._event)
        self._state = FleetState(model, job, self._checkpoints, epochs, extras)
        average = WeightAverage(model, ema) if ema is not None else None
        faults = ScriptedFaults(os.environ.get("EBBFLOW_FAULT", ""), lambda: self.flow.step)
        self._fault = faults
        device = next(model.parameters()).device
        self._connection = FleetConnection(
            settings, job, self._state, device=device, leaving=self._leaving, on_event=self._event, fault=faults
        )
        self.engine = LiveEngine(
            model,
            fetch,
            self._connection,
            sizes,
            samples=samples,
            lineage=initial_lineage(weights_digest(model)),
            loss=loss,
            seed=seed,
            micro_batch=micro_batch,
            needs=optimizer.rule.needs | (growing.needs if growing is not None else frozenset()),
            parameters=optimizer.layers,
            precision=precision,
            leaving=self._leaving,
            fault=faults,
        )
        self.flow = Flow(
            self.engine,
            optimizer,
            Ledger(samples=samples),
            total_samples=epochs * samples,
            statistics=RunningStatistics(model, follow=False, undoable=optimizer.on_nonfinite == "skip"),
            average=average,
            growth=Growth(growing, ref_batch=optimizer.base_batch, epoch_samples=samples) if growing else None,
        )
        self._state.flow, self._state.engine = self.flow, self.engine
        self._status = StatusFile(
            settings.own_folder / "status.json",
            lambda text: self._connection.publish(STATUS_KEY, text),
            incarnation=self._connection.name,
        )
        self._journal: ReplicaRecord  # from `__enter__` on

    def _header(self) -> Header:
        settings = {**dataclasses.asdict(self.settings), "folder": str(self.settings.folder)}
        return Header(
            config={
                **self._state.job,
                "epoch_samples": self.flow.ledger.samples,
                "epochs": self.epochs,
                "live": settings,
                **self._describe,
            },
            versions={"ebbflow": __version__, "torch": torch.__version__},
            command=" ".join(sys.argv),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=str(next(self.model.parameters()).device),
        )

    def _event(self, what: str, text: str) -> None:
        self._journal.event(self.flow.step, what, text)

    # Upcoming and going -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.settings.own_folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._journal = ReplicaRecord(self.settings.own_folder / "record.jsonl", self._header)
            stack.callback(self._journal.close)
            stack.callback(self._checkpoints.wait)
            self._state.refresh()
            stack.callback(self._connection.close)
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._stop)
            self._connection.start()
            self._status.update("joining", step=self.flow.step)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is not None:
                self._end("diverged" if isinstance(error, Diverged) else "failed", f"{type(error).__name__}: {error}")
                self._status.update("failed")

    def leave(self) -> None:
        """Leave after the step under way, as on SIGTERM."""
        self._asked_to_leave = True

    def _leaving(self) -> bool:
        if not self._asked_to_leave and self._notice is not None and self._notice():
            self._asked_to_leave = True
        return self._asked_to_leave or self._stop.requested

    @property
    def finished(self) -> bool:
        """Whether all epochs are done (all the gain, where the rule counts that)."""
        return self._state.finished

    @property
    def left(self) -> bool:
        """Whether this replica left before the end, because it was told to."""
        return self.engine.left

    @property
    def first(self) -> bool:
        """Whether this replica is the first of those that train now: for what is to be printed or written once."""
        return self.engine.first

    # Training ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Steps to compute, until all epochs are done or this replica leaves."""
        while self._goes_on():
            try:
                opened = self.flow.open()
            except LeftFleet:
                self._gone()
                return
            except TrainingFinished:
                continue
            with opened.keep:
                self.engine.open(opened.assignment, opened.size)
                yield Step(self.engine, opened)
                self._after(self.flow.close(opened, self.engine.add_up()))

    def run(self) -> None:
        """Train to the end with the loss that was given to `join`."""
        while self._goes_on():
            try:
                row = self.flow.run_step()
            except LeftFleet:
                self._gone()
                return
            except TrainingFinished:
                continue
            self._after(row)

    def _goes_on(self) -> bool:
        if self.engine.left:
            self._part()
            return False
        if not self.finished:
            return True
        self._finish()
        return not self.finished  # a peer that knew better took us back

    def _after(self, row: StepRow | None) -> None:
        if row is None:
            self._event("lost step", "a replica left in its middle; the same samples come again")
            return
        self._fault("step")
        row = dataclasses.replace(
            row, stats={**row.stats, "lineage": float(self.engine.lineage), "parent": float(self.engine.parent)}
        )
        self._journal.write(row)
        ledger = self.flow.ledger
        self._status.step(row, epoch=ledger.epoch, position=ledger.position, members=len(self.engine.names))
        if self._on_commit is not None:
            self._on_commit(row)
        if row.loss is not None and row.loss != row.loss and "skipped" not in row.stats:
            raise Diverged(f"the training loss is {row.loss} at step {row.step} (epoch {row.epoch})")
        if ledger.position == 0 and self._on_epoch is not None:
            self._validate(row)
        if self.first and time.monotonic() - self._saved >= self._checkpoint_every_s:
            self._save()

    def _validate(self, row: StepRow) -> None:
        assert self._on_epoch is not None
        metrics = self._on_epoch(self.flow.ledger.epoch)
        if metrics:
            ledger = self.flow.ledger
            self._journal.write(
                ValidationRow(
                    step=self.flow.step,
                    epoch=ledger.total / ledger.samples,
                    samples=row.samples,
                    time_s=row.time_s,
                    wall_s=row.wall_s,
                    metrics=dict(metrics),
                )
            )

    def _save(self) -> None:
        """A checkpoint, in the background."""
        self._saved = time.monotonic()
        self._checkpoints.save(self._state.pack(), step=self.flow.step, lineage=self.engine.lineage)

    def _save_now(self) -> None:
        """The last checkpoint, whatever is under way."""
        self._checkpoints.wait()
        self._save()
        self._checkpoints.wait()

    def _part(self) -> None:
        """The last step with the fleet is done."""
        if self.engine.last_of_all:
            self._save_now()
        self._event("left", "told to leave")
        self._status.update("left", step=self.flow.step)

    def _gone(self) -> None:
        """Told to leave while waiting for others: nobody else may have this state."""
        self.engine.left = True
        if self.engine.established:
            self._save_now()
        self._part()

    def _finish(self) -> None:
        """Meet once more, so that a replica which missed the last sum gets the final state; then the end."""
        self._connection.return_to_lighthouse()
        with contextlib.suppress(LeftFleet, TrainingFinished):
            self.engine.members(self.flow.step)
        if not self.finished:
            return
        if self.first:
            self._save_now()
        self._end("finished")
        self._status.update("finished", step=self.flow.step, epoch=self.flow.ledger.epoch, position=0)

    def _end(self, status: Literal["finished", "diverged", "failed"], text: str = "") -> None:
        self._journal.write(
            End(
                status=status,
                steps=self.flow.step,
                samples=self.flow.ledger.total,
                wall_s=round(self.flow.wall_s, 6),
                text=text,
                weights_sha256=weights_digest(self.model),
            )
        )
