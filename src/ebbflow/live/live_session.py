"""A training script as a replica of a live fleet.

with ebbflow.live.join(model, optimizer, data, local_batch=32, base_batch=256, epochs=10) as fleet:
    for step in fleet:                              # until all epochs are done, whoever comes and goes
        for x, y in step:                           # this replica's micro-batches of the step
            step.backward(loss_fn(model(x), y))
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbflow import workloads
from ebbflow.core.files import hold_lock
from ebbflow.core.folders import check_folder
from ebbflow.core.signals import StopSignal
from ebbflow.engines.allreduce import check_dense, check_real
from ebbflow.engines.base import Engine, EngineParts
from ebbflow.engines.batches import map_batch
from ebbflow.engines.replica_ranks import local_shard, replica_ranks
from ebbflow.engines.replica_step import Loss
from ebbflow.errors import (
    CheckpointError,
    ConfigError,
    Diverged,
    OutputError,
    StorageUnreachable,
    UnreadableCheckpoints,
)
from ebbflow.live.agreement import initial_lineage
from ebbflow.live.checkpoint_names import list_checkpoints
from ebbflow.live.checkpoints import Checkpoints
from ebbflow.live.connection import FleetConnection, LeftFleet, TrainingFinished, TransportUnusable
from ebbflow.live.faults import ScriptedFaults
from ebbflow.live.job_description import check_job, check_record, describe_job, describe_replica
from ebbflow.live.live_engine import LiveEngine, StepSizes, by_policy
from ebbflow.live.protocol import FINAL_WEIGHTS, STATUS_KEY, ReplicaConfig, create_secret
from ebbflow.live.rank_watch import RankWatch
from ebbflow.live.replica_files import ReplicaRecord, StatusFile
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.policies import make_policy
from ebbflow.record import NoRecord, Run, StepRow, read_record
from ebbflow.run.assemble import (
    assemble,
    loader_workers,
    make_evaluate,
    make_optimizer,
    make_tracker,
    resolve,
    with_rule,
)
from ebbflow.run.checkpoint import save_checkpoint, weights_digest
from ebbflow.run.config import RunConfig, shows_settings
from ebbflow.run.flow import OpenStep, Stateful
from ebbflow.run.header import make_header
from ebbflow.run.loop import Callbacks, Evaluate, TrainingLoop
from ebbflow.run.session import Session
from ebbflow.run.sharded_checkpoint import whole_tensor
from ebbflow.run.sharded_state import shard_maker, whole_state, with_shards, without_shards
from ebbflow.run.torchrun import RankGroup, rank_info

__all__ = ["LiveSession", "OnEpoch", "Stateful", "join", "join_workload"]

OnEpoch = Callable[[int], Mapping[str, Any] | None]
"""Called with the number of completed epochs; the scores that it returns go into the record."""
STATE_VERSION = 1
_OF_THE_FLEET = ("lighthouse", "replica", "folder", "job", "bind", "checkpoints", "transport")
"""What the environment says, unless it is given."""
_NOT_OF_A_FLEET = {
    "out": "a replica writes into its own part of the fleet's folder; give folder=, or --out to ebbflow launch",
    "callbacks": "a replica calls on_commit(row) after every step and on_epoch(epoch) after every epoch; give these",
}
"""Arguments of other sessions, and what a replica has instead."""
_LONGEST_REASON = 2000  # characters of a status: what a backend says, with what to do about it
_LOOK_AGAIN_S = 0.1
_MEET_S = 60.0  # for which a replica that has the final state waits for others: they may be gone for good


@shows_settings("session")
class LiveSession(Session):
    """This process as a replica of a fleet: iterate over it to train, inside a `with`.

    Guarantees, whoever comes, leaves or is killed: every sample counts exactly once per epoch; all replicas have the
    same weights, bit for bit, after every step that they committed; a replica that joins has the complete state before
    it takes part. What was trained is lost only when all replicas are lost at once, and then only the steps since the
    last checkpoint.
    """

    _planned = False
    _whose_state = "the fleet's: a replica that joins later"
    _keeps_state = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | ElasticOptimizer,
        data: Any,
        *,
        engine: str = "live",
        loss: Loss | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        max_steps: int | None = None,
        evaluate: Evaluate | None = None,
        on_epoch: OnEpoch | None = None,
        on_commit: Callable[[StepRow], None] = lambda row: None,
        extras: Mapping[str, Stateful] | None = None,
        notice: Callable[[], bool] = lambda: False,
        checkpoint_every_s: float = 60.0,
        data_mesh: Any = None,
        config: RunConfig | None = None,
        **settings: Any,
    ) -> None:
        """See `join`."""
        self._ranks = replica_ranks(model, data_mesh)
        if isinstance(model, DistributedDataParallel) and self._ranks.size > 1:
            wrapped, given, model = model, loss, model.module
            loss = (lambda _, x, y: given(wrapped, x, y)) if given is not None else None
        if evaluate is not None and on_epoch is not None:
            raise ConfigError("evaluate and on_epoch are both called after every epoch; give one of them")
        for name, instead in _NOT_OF_A_FLEET.items():
            if name in settings:
                raise ConfigError(f"{name} is given, but {instead}")
        fleet = {name: settings.pop(name) for name in _OF_THE_FLEET if name in settings}
        self._sizes: StepSizes | None = settings.pop("policy") if callable(settings.get("policy")) else None
        super().__init__(
            model,
            optimizer,
            data,
            engine=self._make_engine,
            loss=loss,
            reduction=reduction,
            max_steps=max_steps,
            extras=extras,
            evaluate=evaluate if on_epoch is None else lambda: on_epoch(self.flow.ledger.epoch),
            checkpoint_every_s=checkpoint_every_s,
            config=config,
            **settings,
        )
        self.config.check_engine("live")
        if self.config.compile and loss is None:
            raise ConfigError(
                "compile needs loss=...; in your own loop, call a compiled function: torch.compile(model)"
            )
        if self.config.precision == "fp16":
            raise ConfigError("precision is 'fp16', whose loss scale a fleet does not share; use bf16")
        check_real(self._optimizer.layers)
        check_dense(self.model)
        self.fleet = ReplicaConfig.from_environment(**fleet)
        check_folder(self.fleet.folder, "fleet")
        self._on_commit = on_commit
        self._notice = notice
        self._asked_to_leave = False
        self._meets_until = math.inf
        self._stop = StopSignal()
        self._fault = ScriptedFaults(os.environ.get("EBBFLOW_FAULT", ""), lambda: self.flow.step)
        self._initial_groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.inner.param_groups
        ]
        self._saved_at = time.monotonic()
        device = next(model.parameters()).device
        self._job = describe_job(
            self.fleet.job, self.model, self._optimizer, self.config, samples=len(self.task.train),
            own_sizes=self._sizes is not None, max_steps=self._max_steps, groups=self._initial_groups,
            ranks=self._ranks,
        )  # fmt: skip
        compared = describe_replica(self.fleet, self.model, self._optimizer, self.task.train, device, self.config)
        self._checkpoints = Checkpoints(
            self.fleet.checkpoint_place, on_event=self._event, ranks=self._ranks, pinned=device.type == "cuda"
        )
        self._secret = self._ranks.share(create_secret(self.fleet.folder) if self._ranks.leads else b"")
        self._connection = FleetConnection(
            self.fleet, {**self._job, **compared}, self, secret=self._secret,
            device=device, ranks=self._ranks, leaving=self._leaving, on_event=self._event, fault=self._fault,
        )  # fmt: skip
        self._status = StatusFile(
            self.fleet.own_folder / "status.json" if self._ranks.leads else None,
            lambda text: self._connection.publish(STATUS_KEY, text),
            incarnation=self._connection.name,
        )

    @classmethod
    def _own_arguments(cls) -> list[str]:
        return [*super()._own_arguments(), *_OF_THE_FLEET]

    def _make_engine(self, parts: EngineParts) -> Engine:
        sizes = self._sizes or by_policy(make_policy(self.config.policy, self.config.local_batch))
        digest = "/".join(self._ranks.gather(weights_digest(self.model)))
        return LiveEngine(
            parts.model,
            parts.fetch,
            self._connection,
            sizes,
            samples=parts.samples,
            lineage=initial_lineage(digest),
            loss=torch.compile(parts.loss) if self.config.compile and parts.loss is not None else parts.loss,
            seed=parts.seed,
            micro_batch=self.config.micro_batch,
            needs=parts.needs,
            parameters=parts.parameters,
            precision=self.config.precision,
            norm=self._optimizer.needs_norm,
            leaving=self._leaving,
            fault=self._fault,
            captured_samples=self._captured_samples(),
            on_event=self._event,
        )

    def _captured_samples(self) -> int:
        """The largest micro-batch that is replayed from a CUDA graph, as compiled passes are on a GPU; 0: none."""
        on_gpu = next(self.model.parameters()).device.type == "cuda"
        largest = self.config.micro_batch or self.config.local_batch or 0
        return largest if self.config.compile and on_gpu else 0

    _make_engine.measures = True  # type: ignore[attr-defined]

    # Beginning and ending -----------------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> TrainingLoop:
        own, ranks = self.fleet.own_folder, self._ranks
        stack.callback(ranks.close)
        if ranks.leads:
            busy = f"{own} is in use by another replica of this name; give each replica a name of its own"
            stack.enter_context(hold_lock(own / "replica.lock", busy=busy))
        try:
            ranks.check_same(self._connection.membership.job)
        except ConfigError as error:
            self._status.update("refused", reason=str(error))
            raise
        stack.enter_context(RankWatch(ranks, self.fleet.bind, self._secret))
        flow = assemble(self.config, self.task, self._maker, optimizer=self._optimizer)
        flow.max_steps, flow.extras = self._max_steps, self._extras
        tracker = make_tracker(  # of the fleet: the rows are the same on all replicas, and the first one sends them
            self.config,
            self.fleet.folder,
            ref_batch=self._optimizer.base_batch,
            step=lambda: flow.step,
            when=lambda: self._loop is not None and self.first,
        )
        if ranks.leads:
            self._check_earlier_record(own / "record.jsonl")
        record = ReplicaRecord(own / "record.jsonl", self._header, tracker) if ranks.leads else NoRecord()
        stack.callback(record.close)
        stack.callback(self._checkpoints.wait)
        self._loop = loop = TrainingLoop(
            flow,
            record,
            evaluate=self._evaluate,
            validate_every=self.config.validate_every,
            callbacks=Callbacks(on_step=self._committed),
            save=self._save_if_due,
            checkpoint_every_s=self._checkpoint_every_s if ranks.size == 1 else 0.0,  # else rank 0 decides
        )
        try:
            self._begin_with_checkpoint()
        except CheckpointError as error:
            self._status.update("refused", reason=str(error))
            raise
        stack.callback(self.task.close)
        if isinstance(self.task.train, workloads.DatasetSource):
            # Before there are connections, which the processes would inherit: a peer sees the end of one only when all
            # who have it are gone.
            self.task.train.start()
        stack.callback(self._connection.close)
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(self._stop)
        self._status.update("joining", step=flow.step)
        self._connection.start()
        return loop

    def _check_earlier_record(self, path: Path) -> None:
        """Refuse to go on with the record of another job; where there are checkpoints, these are compared instead."""
        try:
            if list_checkpoints(self._checkpoints.storage)[0]:
                return
            check_record(self._header().config, path, jobs_have=self._job, allow_changes=bool(self.fleet.allow_changes))
        except StorageUnreachable:
            return
        except CheckpointError as error:
            self._status.update("refused", reason=str(error))
            raise

    def _header(self) -> Any:
        settings = {**dataclasses.asdict(self.fleet), "folder": str(self.fleet.folder)}
        described = {
            **self.config.recorded(),
            **self._job,
            "epoch_samples": len(self.task.train),
            "epochs": self.config.epochs,
            "trace": "live",
            "engine": "live",
            "live": settings,
        }
        if self.task.recipe is not None:
            described |= {"metric": self.task.recipe.metric, "higher_is_better": self.task.recipe.higher_is_better}
        if self.task.left_out:
            described["task"] = {"left_out": dict(self.task.left_out)}
        device = str(next(self.model.parameters()).device)
        return make_header(described, device=device, command=" ".join(sys.argv))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with self._stack:
            if self._loop is None:
                return
            if error is None and (self.left or self._status.state in ("finished", "incomplete")):
                return
            if error is None or (isinstance(error, SystemExit) and not error.code):
                if self.engine.first and error is None:
                    self._save_now()
                text = f"the loop ended after step {self.step}, in epoch {self.epoch}, before the end of the training"
                self._status.update("incomplete", step=self.step, reason=text)
                self._event("incomplete", text)
                return
            text = f"{type(error).__name__}: {error}"
            status: Literal["diverged", "failed"] = "diverged" if isinstance(error, Diverged) else "failed"
            if isinstance(error, TransportUnusable) and self.engine.established and self.engine.first:
                self._save_now()  # all replicas end with this error, and none of them is lost
            self.loop.end(status, text)
            state = "refused" if isinstance(error, CheckpointError | ConfigError) else status
            self._status.update(state, step=self.step, reason=text.partition("\n")[0][:_LONGEST_REASON])

    def leave(self) -> None:
        """Leave after the current step, as on SIGTERM."""
        self._asked_to_leave = True

    def _leaving(self) -> bool:
        self._asked_to_leave = self._asked_to_leave or self._notice()
        met_nobody = time.monotonic() > self._meets_until and self._connection.membership.waits_for_quorum
        return self._asked_to_leave or self._stop.requested or met_nobody

    @property
    def engine(self) -> LiveEngine:
        """The engine of this replica."""
        engine = self.flow.engine
        assert isinstance(engine, LiveEngine)
        return engine

    @property
    def record(self) -> Run:
        """What this replica has recorded so far; after the `with`, its whole record."""
        self.loop.record.flush()
        return read_record(self.fleet.own_folder / "record.jsonl")

    @property
    def left(self) -> bool:
        """Whether this replica left before the end, because it was told to."""
        return self.engine.left

    @property
    def first(self) -> bool:
        """Whether this process is the first of those that train now: for what is to be printed or written once."""
        return self.engine.first and self._ranks.leads

    # Training -----------------------------------------------------------------------------------------------------

    def _continues(self) -> bool:
        if self.engine.left:
            self._leave_fleet(save=self.engine.last_of_all)
            return False
        if not self.finished:
            return True
        self._finish()
        return not self.finished  # a peer with another state that counts took this replica back

    def _open_step(self) -> OpenStep | None:
        try:
            return super()._open_step()
        except LeftFleet:  # told to leave while waiting for others: nobody else may have this state
            self.engine.left, self.engine.last_of_all = True, self.engine.established
        except TrainingFinished:
            pass
        return None

    def _after(self, row: StepRow | None) -> None:
        if row is not None:
            self._fault("step")
            lineage = {"lineage": float(self.engine.lineage), "parent": float(self.engine.parent)}
            if self.engine.fork is not None:
                lineage["fork"] = float(self.engine.fork)
            row = dataclasses.replace(row, stats={**row.stats, **lineage})
        super()._after(row)

    def _committed(self, row: StepRow) -> None:
        ledger = self.flow.ledger
        self._status.step(
            row, epoch=ledger.epoch, position=ledger.position, members=len(self.engine.names),
            ref_batch=self.flow.optimizer.base_batch,
        )  # fmt: skip
        self._on_commit(row)

    def _event(self, what: str, text: str) -> None:
        record = self.loop.record
        if not isinstance(record, ReplicaRecord):  # rank 0 of this replica writes it
            return
        record.event(self.flow.step, what, text)
        if what == "waiting":
            self._status.update("waiting", reason=text)

    def _leave_fleet(self, *, save: bool) -> None:
        problem = None
        if save:
            self._save_now()
            if not self._ranks.share(self._ranks.leads and self._state_saved()):
                problem = f"the state of step {self.flow.step} could not be saved; only older ones may be there"
        self._event("left", problem or "told to leave")
        self._status.update("left", step=self.flow.step, reason=problem)

    def _finish(self) -> None:
        """Form one more quorum group, so that a replica that missed the last sum receives the final state; then end.

        There may be too few others for a quorum, for ever, since they have finished: so this one waits for a minute at
        most. The final state is saved before it waits for those to which it sends it: their link may be slow.
        """
        self._connection.return_to_lighthouse()
        self._meets_until = time.monotonic() + _MEET_S
        with contextlib.suppress(LeftFleet, TrainingFinished):
            self.engine.participants(self.flow.step)
        self._meets_until = math.inf
        if not self.finished:
            return
        position = {"step": self.flow.step, "epoch": self.flow.ledger.epoch, "position": self.flow.ledger.position}
        problem = "" if self._first_saves() else self._save_final_state()
        self._connection.finish_transfers()
        if problem:
            self._event("incomplete", problem)
            self._status.update("incomplete", reason=problem, **position)
            return
        self.loop.end("finished")
        self._status.update("finished", reason=None, **position)

    def _state_saved(self) -> bool:
        """Whether somebody has saved the state of this step; the weights are written before the checkpoint."""
        return self._checkpoints.has(self.flow.step, self.engine.lineage)

    def _first_saves(self) -> bool:
        """Wait while the first replica of the group saves the final state, unless this is the first one.

        False if this replica is to save it: the first one is gone, or cannot be seen.
        """
        membership, seen = self._connection.membership, False
        group = membership.group
        first = min(set(range(len(group.names))) - membership.listening) if group is not None else 0
        if self._ranks.leads and group is not None and group.rank != first:
            alive = True
            while not seen and alive and not self._leaving():
                time.sleep(_LOOK_AGAIN_S)
                alive = self._connection.sends_heartbeats(group.names[first])
                seen = self._state_saved()
        return self._ranks.share(seen)

    def _save_final_state(self) -> str:
        """Write the final weights and the last checkpoint; what went wrong, or nothing."""
        average = {"ema": self.flow.average.state_dict()} if self.flow.average is not None else {}
        state: Mapping[str, Any] = {"model": self.model.state_dict(), **average}
        if self._ranks.size > 1:
            state = whole_state(state, self._ranks)
        if problem := self._ranks.share(self._write_weights(state) if self._ranks.leads else ""):
            return problem
        self._fault("save")
        self._save_now()
        if not self._ranks.share(self._ranks.leads and self._state_saved()):
            return f"the final state, of step {self.flow.step}, could not be saved; free some space and run it again"
        return ""

    def _write_weights(self, state: Mapping[str, Any]) -> str:
        try:
            save_checkpoint(self.fleet.folder / FINAL_WEIGHTS, state)
        except OutputError as error:
            return f"the final weights could not be saved: {error}"
        return ""

    # The state, which peers and checkpoints have --------------------------------------------------------------------

    def _save_if_due(self) -> None:
        """Write a checkpoint if this replica is the first one; of several ranks, the clock of rank 0 says when."""
        if self._ranks.size > 1:
            if not self._ranks.share(time.monotonic() - self._saved_at >= self._checkpoint_every_s):
                return
            self._saved_at = time.monotonic()
        if self.engine.first:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint in the background. Weights that are not finite are not saved: nobody could go on."""
        norm = float(torch.nn.utils.get_total_norm([local_shard(one.detach()) for one in self.model.parameters()]))
        if not all(self._ranks.gather(math.isfinite(norm))):
            raise Diverged(f"the weights are not finite after step {self.flow.step}")
        self._checkpoints.save(self._complete_state(), step=self.flow.step, lineage=self.engine.lineage)

    def _save_now(self) -> None:
        """Write the last checkpoint, after any that is under way."""
        self._checkpoints.wait()
        self._save()
        self._checkpoints.wait()

    def _complete_state(self) -> dict[str, Any]:
        """The state after the last committed step."""
        # Any number of ranks can read a checkpoint, into shards of their own.
        job = {name: value for name, value in self._job.items() if name not in ("ranks", "shards")}
        own = {"version": STATE_VERSION, "job": job, "lineage": self.engine.lineage}
        own["fork"] = self.engine.fork  # a replica that receives this state records the same parent as the others
        return {**own, **self.flow.state_dict()}

    def pack(self) -> dict[str, Any]:
        """The state after the last committed step, in plain containers, for a peer that needs it.

        Nothing in it changes before the next step is committed, although that is computed meanwhile: the tensors are
        the model's and the optimizer's own, and what a forward pass may change, buffers and extras, is copied. Of a
        sharded model these are the shards of this rank.
        """
        state = self._complete_state()
        buffers = {name for name, _ in self.model.named_buffers()}
        model = {name: value.clone() if name in buffers else value for name, value in state["model"].items()}
        extras = map_batch(state["extras"], lambda value: value.clone() if isinstance(value, torch.Tensor) else value)
        state |= {"model": model, "extras": extras}
        return without_shards(state) if self._ranks.size > 1 else state

    def unpack(self, state: Any) -> tuple[int, int]:
        """Load what `pack` returned; return its number of committed steps and its lineage.

        A state of another job is a CheckpointError and changes nothing.
        """
        return self._load_complete_state(state, "the state of a peer")

    def _load_complete_state(self, state: Any, origin: str) -> tuple[int, int]:
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"{origin} is not of this version of ebbflow; delete it, or use the version that wrote it"
            )
        changed = check_job(self._job, state["job"], origin, allow_changes=bool(self.fleet.allow_changes))
        if self._ranks.size > 1:
            state = with_shards(state, self.model, self._optimizer.inner)
        self.flow.load_state_dict(state, origin=origin)
        if changed:
            self._event("settings changed", changed)
            for group, initial in zip(self._optimizer.inner.param_groups, self._initial_groups, strict=True):
                group.update(initial)
            self._optimizer.base_rates_changed()
        self.engine.lineage, self.engine.fork = int(state["lineage"]), state.get("fork")
        return self.flow.step, self.engine.lineage

    def refresh(self) -> tuple[int, int] | None:
        """Load the newest checkpoint if it is further than this state; return its steps and lineage, or None."""
        make = shard_maker(self.model, self._optimizer.inner) if self._ranks.size > 1 else whole_tensor
        found = self._checkpoints.newest(beyond=self.flow.step, make=make)
        if found is None:
            return None
        name, state = found
        loaded = self._load_complete_state(state, f"the checkpoint {name}")
        self._event("restored", f"from {name}")
        return loaded

    def _begin_with_checkpoint(self) -> None:
        """Load the newest checkpoint. If none can be read, the peers may have the state.

        Should there be no peers, the checkpoints are read once more before the first step, and then it is an error. A
        checkpoint of another job is one at once.
        """
        try:
            self.refresh()
        except (StorageUnreachable, UnreadableCheckpoints) as error:
            self._event("no checkpoint", f"{error}; the state of a peer is used if there is one")


def join(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any, **settings: Any) -> LiveSession:
    """Join the fleet that `ebbflow launch` describes in the environment.

    Use the result in a `with`, and iterate over it.

    `optimizer`: any optimizer of torch, whose rates were tuned at `base_batch` samples and follow the batch by `rule`;
    or an `ElasticOptimizer` without a sampler. `data`: a map-style data set, a DataLoader of one (its `collate_fn`,
    `num_workers`, `worker_init_fn` and `batch_size` are used), or a source with `batch(indices, train=True)`.
    `loss(model, x, y)`: for `fleet.run()`, which needs no loop. `reduction`: "mean" or "sum", what the loss of your
    own loop is. `max_steps`: training ends after this many steps, or after `epochs` if that comes first. `extras`:
    whatever else belongs to the state, by name, with `state_dict` and `load_state_dict`; it goes back to a snapshot
    with the rest. `notice`: asked before every step whether this machine is about to be taken away.
    `evaluate()`, or `on_epoch(epoch)`: called after every epoch on every replica; the scores that it returns go into
    the record.
    `data_mesh`: if a replica has several ranks of which some get the same samples (tensor parallel), the
    one-dimensional DeviceMesh over which the samples are divided.

    Settings are those of a `Session`: epochs, local_batch (samples of one replica per step), rule, base_batch,
    schedule, policy (a text, or a function (step, replicas) -> (workers, samples)), seed, micro_batch, precision, ema,
    clip, ... lighthouse, replica, folder, job, bind and checkpoints are what the environment says unless given.
    """
    return LiveSession(model, optimizer, data, **settings)


_shown = inspect.signature(LiveSession)
_NOT_OF_JOIN = ("engine", "config")  # of Session(engine="live") and join_workload
join.__signature__ = _shown.replace(  # type: ignore[attr-defined]
    parameters=[p for name, p in _shown.parameters.items() if name not in _NOT_OF_JOIN], return_annotation=LiveSession
)


def join_workload(config: RunConfig, **settings: Any) -> LiveSession:
    """Join a fleet that trains a workload; `run()` trains to the end. `settings`: what else `join` takes.

    A replica of several ranks shards the model by `fully_shard`.
    """
    config.check_engine("live")
    config = resolve(config).replace(label="")  # the label is that of a trace
    here = rank_info(os.environ)
    device = RankGroup(here).device(config.device)
    task = workloads.build(
        config.workload, data=config.data, seed=config.seed, device=device, loader_workers=loader_workers(config)
    )
    if here is not None:
        from torch.distributed.fsdp import fully_shard

        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        fully_shard(task.model)
    config = with_rule(config, task, planned=False)
    evaluate = make_evaluate(task, config.train_scores)
    session = LiveSession(
        task.model,
        make_optimizer(config, task),
        task.train,
        loss=task.loss,
        on_epoch=lambda epoch: evaluate(),
        config=config,
        **settings,
    )
    session.task = dataclasses.replace(
        session.task,
        recipe=task.recipe,
        scores=task.scores,  # with `validation`: without them, the recipe's metric would be refused
        validation=task.validation,
        left_out=task.left_out,
    )
    return session
