"""One run from its configuration to its record: the rim around the flow, where files and clocks are.

A run lives in a folder: `record.jsonl`, `checkpoint.pt` while it is under way, `weights.pt` at the end if wanted.
Killed at any moment and started again with the same configuration, it continues from its checkpoint and ends, on a
CPU, with the same weights bit for bit as one never interrupted.
"""

from __future__ import annotations

import datetime
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbflow import workloads
from ebbflow._version import __version__
from ebbflow.checkpoint import load_checkpoint, load_model, save_checkpoint, weights_digest
from ebbflow.config import RunConfig, load_plugins
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.loop import Flow
from ebbflow.optim.build import build_optimizer
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan, fit_step_time, make_policy, make_step_time, plan_for
from ebbflow.record import End, Event, Header, RecordWriter, Run, StepRow, ValidationRow, read_record
from ebbflow.traces import Trace
from ebbflow.traces import load as load_trace
from ebbflow.units import parse_seconds
from ebbflow.workloads import Task

__all__ = ["Callbacks", "resolve", "train"]

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


def make_plan(config: RunConfig, samples: int) -> tuple[BatchPlan, Trace | None]:
    """The batch plan of a resolved configuration over a data set, and the trace it comes from."""
    assert config.epochs and config.local_batch  # resolve() filled them in
    if config.plan is not None:
        plan = BatchPlan.read(Path(config.plan), local_batch=config.local_batch)
        plan.for_epochs(samples, config.epochs)  # too short is an error now, not in the middle of the run
        return plan, None
    trace = load_trace(config.trace)
    policy = make_policy(config.policy, config.local_batch)
    offset = parse_seconds(config.offset)
    if config.step_time == "fit":
        step_time = fit_step_time(
            trace, policy, samples=samples, epochs=config.epochs, offset=offset, on_change=config.on_change
        )
    else:
        step_time = parse_seconds(config.step_time)
    plan = plan_for(
        trace,
        policy,
        make_step_time(step_time),
        samples=samples,
        epochs=config.epochs,
        offset=offset,
        repeat=config.repeat,
        on_change=config.on_change,
    )
    return plan, trace


def _header(config: RunConfig, task: Task, plan: BatchPlan, trace: Trace | None, command: str) -> Header:
    described = {} if trace is None else {
        "name": trace.name or config.trace,
        "times": trace.times.tolist(),
        "workers": trace.workers.tolist(),
        "end": trace.end,
    }  # fmt: skip
    recipe = task.recipe
    return Header(
        config={
            **config.as_dict(),
            "trace": config.label,
            "trace_text": config.plan or config.trace,
            "metric": recipe.metric,
            "higher_is_better": recipe.higher_is_better,
            "task": task.describe(),
        },
        trace=described,
        plan=plan.describe(),
        versions={
            "python": platform.python_version(),
            "ebbflow": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        command=command,
        git_commit=_git_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=_device_name(config.device),
    )


def _git_commit() -> str:
    """The commit of the working folder, where the user's own code lies; empty outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


class _Trainer:
    """The parts of one run; `run` is the whole story."""

    def __init__(self, config: RunConfig, folder: Path, command: str) -> None:
        load_plugins(config.plugins)
        self.config = config = resolve(config)
        assert config.epochs and config.lr and config.ref_batch and config.optimizer  # resolve() filled them in
        self.folder = folder
        self.task = workloads.build(config.workload, data=config.data, seed=config.seed, device=config.device)
        samples = len(self.task.train)
        self.plan, self.trace = make_plan(config, samples)
        self.total_samples = config.epochs * samples
        engine = LoopEngine(
            self.task.model,
            lambda indices: self.task.train.batch(indices, train=True),
            self.task.loss,
            self.plan,
            samples=samples,
            seed=config.seed,
            piece=config.piece,
        )
        optimizer = ElasticOptimizer(
            build_optimizer(config.optimizer, self.task.model.parameters(), lr=config.lr),
            config.rule,
            base_batch=config.ref_batch,
            schedule=config.schedule,
            epochs=config.epochs,
            epoch_samples=samples,
        )
        self.flow = Flow(engine, optimizer, Ledger(samples=samples), total_samples=self.total_samples)
        self.record = self._open_record(command)

    def _open_record(self, command: str) -> RecordWriter:
        """Continue from the checkpoint if there is one, else begin a new record."""
        path, checkpoint = self.folder / RECORD, self.folder / CHECKPOINT
        if checkpoint.is_file() and path.is_file():
            record = RecordWriter(path, resume_at=self._restore(checkpoint))
            record.write(Event(step=self.flow.step, what="resumed", text=f"from {CHECKPOINT}"))
            return record
        record = RecordWriter(path)
        record.write(_header(self.config, self.task, self.plan, self.trace, command))
        return record

    def _restore(self, path: Path) -> int:
        """Everything at the last checkpoint; returns the size that the record had then."""
        state = load_checkpoint(path)
        load_model(self.task.model, state["model"], path)
        if state["fingerprint"] != self.config.fingerprint():
            raise CheckpointError(
                f"{path} belongs to a run with other settings; use the settings of its record, or another output folder"
            )
        self.flow.optimizer.load_state_dict(state["optimizer"])
        self.flow.ledger = Ledger.restore(state["ledger"])
        self.flow.step = state["step"]
        self.flow.wall_s = state["wall_s"]
        torch.set_rng_state(state["rng"])
        return int(state["record_bytes"])

    def save(self) -> None:
        """A checkpoint of the last complete step."""
        record_bytes = self.record.flush()
        save_checkpoint(
            self.folder / CHECKPOINT,
            {
                "fingerprint": self.config.fingerprint(),
                "model": self.task.model.state_dict(),
                "optimizer": self.flow.optimizer.state_dict(),
                "ledger": self.flow.ledger.state(),
                "step": self.flow.step,
                "wall_s": self.flow.wall_s,
                "rng": torch.get_rng_state(),
                "record_bytes": record_bytes,
            },
        )

    def run(self, callbacks: Callbacks, *, checkpoint_every_s: float) -> End:
        """All epochs; the record's last row says how it ended."""
        saved = time.monotonic()
        callbacks.on_start(self.flow.ledger.total, self.total_samples)
        try:
            while self.flow.ledger.total < self.total_samples:
                row = self.flow.run_step()
                if row is None:
                    self.record.write(Event(step=self.flow.step, what="lost step", text="a worker left in its middle"))
                    continue
                self.record.write(row)
                callbacks.on_step(row)
                if row.loss is None or not math.isfinite(row.loss):
                    raise Diverged(f"the training loss is {row.loss} at step {row.step} (epoch {row.epoch})")
                if self.flow.ledger.position == 0:
                    self._validate(row, callbacks)
                stop = callbacks.should_stop()
                if stop or time.monotonic() - saved >= checkpoint_every_s:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
        except Diverged as error:
            return self._end("diverged", str(error))
        return self._end("finished", "")

    def _validate(self, row: StepRow, callbacks: Callbacks) -> None:
        """Validate after every `validate_every` epochs, and after the last."""
        epoch = self.flow.ledger.epoch
        assert self.config.epochs is not None
        if epoch % self.config.validate_every and epoch != self.config.epochs:
            return
        began = time.perf_counter()
        metrics = self.task.evaluate(self.task.model)
        self.flow.wall_s += time.perf_counter() - began
        validation = ValidationRow(
            step=self.flow.step,
            epoch=float(epoch),
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

    A folder that holds a finished run of the same configuration is left alone and its record returned.
    """
    done = _finished(config, folder)
    if done is not None:
        return done
    with _cpu_settings(config.threads):
        trainer = _Trainer(config, folder, command)
        with trainer.record:
            trainer.run(callbacks or Callbacks(), checkpoint_every_s=checkpoint_every_s)
            if keep_weights:
                save_checkpoint(folder / WEIGHTS, {"model": trainer.task.model.state_dict()})
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return read_record(folder / RECORD)


@contextmanager
def _cpu_settings(threads: int) -> Iterator[None]:
    """Threads and denormal numbers as a run needs them; the caller's process gets its own back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # denormals late in training slow a CPU down several times
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def _finished(config: RunConfig, folder: Path) -> Run | None:
    """The record in the folder if its run came to an end; an error if it is a run of another configuration."""
    path = folder / RECORD
    if not path.is_file() or (folder / CHECKPOINT).is_file():
        return None
    run = read_record(path)
    if run.status not in ("finished", "diverged"):
        return None
    load_plugins(config.plugins)
    wanted = resolve(config).as_dict()
    wanted |= {"trace": wanted["label"], "trace_text": wanted["plan"] or wanted["trace"]}
    other = [
        f"{key} is {wanted[key]!r}, was {run.header.config.get(key)!r}"
        for key in wanted
        if key not in ("data", "plugins", "device") and run.header.config.get(key) != wanted[key]
    ]
    if other:
        raise ConfigError(f"{folder} holds a run of another configuration ({'; '.join(other)}); choose another folder")
    return run
