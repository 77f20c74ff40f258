"""`train`: a workload from its configuration to its record, on the emulated engine or one of your own.

A run has a folder: `record.jsonl`, `checkpoint.pt` while it is under way, `weights.pt` at the end if wanted. Killed at
any moment and started again with the same configuration, it continues from its checkpoint and ends, on a CPU, with the
same weights bit for bit as one that was never interrupted; the same code is part of that, so a run whose plugins,
parameter count or recipe have changed is refused, unless `allow_code_change` is set. Several processes that torchrun
started train the run together; then only rank 0 reads and writes files, and validates.

A run ends after its epochs. Where the rule counts progress by gain (AdaScale's own stopping rule) it ends when the
steps were worth as many reference steps as the epochs have, which takes more samples; at most ten times the epochs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ebbflow import workloads
from ebbflow.core.files import hold_lock, remove_leftovers
from ebbflow.core.folders import FolderKind, check_folder
from ebbflow.core.plugins import load_plugins
from ebbflow.core.wording import called
from ebbflow.errors import CheckpointError, CodeChanged, ConfigError
from ebbflow.plan import BatchPlan
from ebbflow.record import Event, NoRecord, RecordWriter, Run, has_header, read_record
from ebbflow.run.assemble import (
    assemble,
    check_names,
    engine_maker,
    loader_workers,
    make_evaluate,
    make_optimizer,
    make_tracker,
    resolve,
    with_rule,
)
from ebbflow.run.checkpoint import load_checkpoint, save_checkpoint
from ebbflow.run.config import RunConfig, recipe_settings
from ebbflow.run.device import cpu_settings, enough_memory
from ebbflow.run.flow import Flow
from ebbflow.run.header import make_header
from ebbflow.run.loop import Callbacks, TrainingLoop
from ebbflow.run.planning import make_plan
from ebbflow.run.torchrun import RankGroup, joined
from ebbflow.traces import Trace
from ebbflow.workloads import Task

__all__ = ["RunFiles", "train"]

_LOG = logging.getLogger(__name__)

RECORD = "record.jsonl"
CHECKPOINT = "checkpoint.pt"
WEIGHTS = "weights.pt"


class RunFiles:
    """The record and the checkpoint of a run in its folder."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        ranks: RankGroup,
        *,
        kind: FolderKind = "run",
        by_recipe: Collection[str] = (),
        allow_code_change: bool = False,
    ) -> None:
        """`by_recipe`: the settings that the workload's recipe filled in."""
        self.folder = folder
        self.ranks = ranks
        self._kind: FolderKind = kind
        self.record: RecordWriter = NoRecord()
        self._config = config
        self._by_recipe = by_recipe
        self._allow_code_change = allow_code_change
        self._recorded = config.recorded()  # now: somebody may edit the trace while the run follows it as it was

    def check_kind(self) -> None:
        """Refuse a folder that holds something else than a run of this kind."""
        check_folder(self.folder, self._kind)

    def finished_run(self) -> Run | None:
        """The record in the folder if its run has ended; an error if it is a run of another configuration."""
        path = self.folder / RECORD
        if not path.is_file() or (self.folder / CHECKPOINT).is_file() or not has_header(path):
            return None
        run = read_record(path)
        # The end of a run names its weights; that of one that raised an error does not, and it is tried again.
        ended = run.status in ("finished", "diverged") or bool(run.end and run.end.weights_sha256)
        # One that was killed before its first checkpoint begins anew, but no other run replaces its record.
        other = self._config.differences(run.header.config, by_recipe=self._by_recipe) if ended or run.steps else []
        if other:
            raise ConfigError(
                f"{self.folder} holds a run of another configuration ({'; '.join(other)}); give another {called('out')}"
            )
        if not ended:
            return None
        if moved := self._config.other_data(run.header.config):
            _LOG.warning(
                "%s holds this run, which is not repeated: %s; give another %s for other data",
                self.folder, moved, called("out"),
            )  # fmt: skip
        self.check_code(run.header.config)
        return run

    def lock(self) -> AbstractContextManager[None]:
        """Held while the run writes into its folder: a second run into it is a ConfigError."""
        busy = f"another run is writing into {self.folder}; wait for it to end, or give another {called('out')}"
        return hold_lock(self.folder / ".run.lock", busy=busy) if self.ranks.leads else nullcontext()

    def check_code(self, recorded: Mapping[str, Any], model: nn.Module | None = None) -> str:
        """Compare the code of a recorded run with that of today; what has changed, in words.

        Raises CodeChanged if anything has, unless the user allowed it. `recorded` are the settings of a record or of a
        checkpoint. The `model`, if it is built already, is compared by its number of parameters.
        """
        found = self._config.code_differences(recorded, by_recipe=self._by_recipe)
        before = recorded.get("parameters") or recorded.get("task", {}).get("parameters")
        if model is not None and before not in (None, now := _parameter_count(model)):
            found.append(f"the model has {now:,} parameters, had {before:,}")
        changes = "; ".join(found)
        if found and not self._allow_code_change:
            raise CodeChanged(
                f"{self.folder} holds a run of other code: {changes}; give another {called('out')}, or go on with the "
                f"code of today by {called('allow_code_change', True)}"
            )
        return changes

    def open(self, flow: Flow, header: Any) -> RecordWriter:
        """Continue from the checkpoint if there is one, else begin a new record with `header()`."""
        path, checkpoint = self.folder / RECORD, self.folder / CHECKPOINT
        if self.ranks.shared(self.finished_run) is not None:
            raise ConfigError(f"another process has finished this run in {self.folder}; read its record there")
        found = self.ranks.shared(
            lambda: load_checkpoint(checkpoint) if checkpoint.is_file() and path.is_file() else None
        )
        self._recorded["parameters"] = _parameter_count(flow.engine.model)
        size, changes = (None, "") if found is None else self._restore(flow, found, checkpoint)
        if not self.ranks.leads:
            return self.record
        remove_leftovers(checkpoint)
        if size is None:  # a checkpoint whose record was deleted must not be taken for one of the new record
            with suppress(OSError):  # opening the record reports what is wrong with the folder
                checkpoint.unlink()
        tracker = make_tracker(self._config, self.folder, ref_batch=flow.optimizer.base_batch, step=lambda: flow.step)
        self.record = RecordWriter(path, resume_at=size, tracker=tracker)
        if size is not None:
            self.record.write(Event(step=flow.step, what="resumed", text=f"from {CHECKPOINT}"))
            if changes:
                _LOG.warning("%s goes on with other code: %s", self.folder, changes)
                self.record.write(Event(step=flow.step, what="code changed", text=changes))
            return self.record
        self.record.write(header())
        if idle := flow.engine.idle_processes():
            _LOG.warning(idle)
            self.record.write(Event(step=0, what="idle ranks", text=idle))
        self.record.flush()  # a report can be made from here on
        return self.record

    def _restore(self, flow: Flow, state: dict[str, Any], path: Path) -> tuple[int, str]:
        """Load a checkpoint; returns the size that the record had when it was written, and what the code changed."""
        if other := self._config.differences(state["settings"], by_recipe=self._by_recipe):
            raise CheckpointError(
                f"{path} belongs to a run with other settings ({'; '.join(other)}); go on with those, or choose "
                f"another folder"
            )
        changes = self.check_code(state["settings"], flow.engine.model)
        made_with = flow.optimizer.initial_rates
        flow.load_state_dict(state, origin=f"the checkpoint {path}")
        # Torch restores the rates of an optimizer, whatever it was made with: other ones would be ignored.
        if (restored := flow.optimizer.initial_rates) != made_with:
            was, now = (", ".join(f"{float(rate):g}" for rate in rates) for rates in (restored, made_with))
            raise CheckpointError(
                f"{path} belongs to a run whose optimizer was made with the learning rate {was}, this one was made "
                f"with {now}; go on with that of the run, or choose another folder"
            )
        return int(state["record_bytes"]), changes

    def save(self, flow: Flow) -> None:
        """Write a checkpoint of the last committed step."""
        if self.ranks.leads:
            own = {"settings": self._recorded, "record_bytes": self.record.flush()}
            save_checkpoint(self.folder / CHECKPOINT, {**own, **flow.state_dict()})

    def save_weights(self, flow: Flow) -> None:
        """Write the final weights."""
        if self.ranks.leads:
            ema = {"ema": flow.average.state_dict()} if flow.average is not None else {}
            save_checkpoint(self.folder / WEIGHTS, {"model": flow.engine.model.state_dict(), **ema})

    def remove_checkpoint(self) -> None:
        """Remove the checkpoint of a run that has ended."""
        if self.ranks.leads:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)


def _parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    command: str = "",
    callbacks: Callbacks | None = None,
    checkpoint_every_s: float = 60.0,
    keep_weights: bool = True,
    allow_code_change: bool = False,
) -> Run:
    """Train to the end, or continue a run that was interrupted; returns the record of the whole run.

    A folder that holds a finished run of the same configuration is left alone and its record returned. A run of other
    code (plugins, number of parameters, recipe) is refused, or continued with `allow_code_change`. In processes
    that torchrun started each call trains its part of the one run; rank 0 calls the callbacks, all ranks `should_stop`.

        run = ebbflow.train(ebbflow.RunConfig(workload="digits-mlp", rule="sqrt"), "runs/first")
        run.validations[-1].metrics
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; expected the settings of a run: "
            f"ebbflow.RunConfig(workload='digits-mlp', ...)"
        )
    callbacks = callbacks or Callbacks()
    with joined(config.device) as ranks:
        load_plugins(config.plugins)
        by_recipe = [name for name in recipe_settings() if getattr(config, name) is None]
        config = resolve(config)
        check_names([config])
        open_files = partial(RunFiles, Path(folder), by_recipe=by_recipe, allow_code_change=allow_code_change)
        files = open_files(config=config, ranks=ranks)
        ranks.shared(files.check_kind)  # before data are read, which takes long
        done = ranks.shared(files.finished_run) if config.rule is not None else None
        if done is not None and not config.plugins:
            return done
        if not ranks.leads:
            callbacks = Callbacks(should_stop=callbacks.should_stop)
        with cpu_settings(config.threads), enough_memory(config.device):
            task = workloads.build(
                config.workload, data=config.data, seed=config.seed, device=ranks.device(config.device),
                loader_workers=loader_workers(config),
            )  # fmt: skip
            with closing(task):
                if config.rule is None:  # it depends on the steps, so that the data had to be read
                    config = with_rule(config, task, engine=engine_maker(config.engine))
                    files = open_files(config=config, ranks=ranks)
                    done = ranks.shared(files.finished_run)
                if done is not None:  # its model may come from code that the plugins import
                    files.check_code(done.header.config, task.model)
                    return done
                flow, plan, trace = _assemble(config, task, files)
                evaluate = make_evaluate(task, config.train_scores)
                # The folder is made here: what is refused before leaves none behind.
                header = partial(_header, config, task, flow, plan, trace, command)
                with files.lock(), files.open(flow, header) as record:
                    loop = TrainingLoop(
                        flow,
                        record,
                        evaluate=evaluate,
                        validate_every=config.validate_every,
                        callbacks=callbacks,
                        save=lambda: files.save(flow),
                        save_final=(lambda: files.save_weights(flow)) if keep_weights else None,
                        checkpoint_every_s=checkpoint_every_s,
                    )
                    loop.run()
                    files.remove_checkpoint()
        return ranks.shared(lambda: read_record(files.folder / RECORD))


def _assemble(config: RunConfig, task: Task, files: RunFiles) -> tuple[Flow, BatchPlan, Trace | None]:
    files.ranks.same_weights(task.model)
    optimizer = make_optimizer(config, task)
    by_gain, guards = optimizer.by_gain, optimizer.rule.guards
    plan, trace = make_plan(config, len(task.train), by_gain=by_gain, guards=guards)
    flow: Flow

    def on_event(what: str, text: str) -> None:
        files.record.write(Event(step=flow.step, what=what, text=text))

    maker = engine_maker(config.engine)
    flow = assemble(config, task, maker, optimizer=optimizer, plan=plan, ranks=files.ranks.ranks, on_event=on_event)
    return flow, plan, trace


def _header(config: RunConfig, task: Task, flow: Flow, plan: BatchPlan, trace: Trace | None, command: str) -> Any:
    optimizer, recipe = flow.optimizer, task.require_recipe()
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    described = {
        **config.recorded(),
        "trace": config.label,
        "trace_text": config.plan or config.trace,
        "progress": "gain" if optimizer.by_gain else "samples",
        "layers": [names[id(layer)] for layer in optimizer.layers] if "layers" in optimizer.rule.needs else [],
        "metric": recipe.metric,
        "higher_is_better": recipe.higher_is_better,
        "task": task.describe(),
        "emulation": flow.engine.describe(),
    }
    return make_header(described, device=config.device, plan=plan, trace=trace, command=command)
