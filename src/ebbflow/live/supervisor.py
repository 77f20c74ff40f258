"""Keeps the requested replicas of one machine running: starts them, watches them, and starts those again that died.

Its user says which replicas are requested (`request`, `stop`) and when to look at their processes (`poll`).
`RestartPolicy` decides, as a pure function, what is done when a process ends. `supervise` is the loop around it all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

from ebbflow.core.endings import Ending
from ebbflow.core.signals import StopSignal
from ebbflow.core.storage import Storage
from ebbflow.core.units import plural
from ebbflow.errors import ConfigError, DataError, InputError, OutputError, StorageUnreachable
from ebbflow.live.checkpoint_names import list_checkpoints
from ebbflow.live.processes import LighthouseProcess, ReplicaProcesses, describe_exit
from ebbflow.live.protocol import (
    EXIT_RESTART,
    FINAL_WEIGHTS,
    FleetConfig,
    ReplicaStatus,
    read_status,
    replica_folder,
)

__all__ = [
    "Act", "FleetEvent", "Job", "ProcessEnd", "RestartPolicy", "SupervisedReplica", "Supervisor", "Verdict",
    "judge_fleet", "supervise",
]  # fmt: skip

_POLL_EVERY_S = 0.05
_OTHERS_MAY_FINISH_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the replicas of a fleet run on this machine."""

    command: tuple[str, ...]
    """The program and its arguments."""
    fleet: FleetConfig
    """What all replicas of the fleet need to know."""
    gpus: int = 0
    """GPUs per replica; 0 leaves CUDA_VISIBLE_DEVICES alone."""
    threads: int = 0
    """CPU threads per process, unless OMP_NUM_THREADS is set already; 0 leaves it alone."""
    ranks: int = 1
    """Processes per replica."""

    def environment(self, replica: str, *, slot: int, base: dict[str, str]) -> dict[str, str]:
        """Give the environment of a replica: that of the launcher, and the variables of the fleet.

        `slot` numbers the replicas of this machine from 0. If `gpus` is set, slot i sees the i-th group of the GPUs
        that the launcher sees.

        >>> from pathlib import Path
        >>> fleet = FleetConfig(job="j", folder=Path("/f"), lighthouse="127.0.0.1:1")
        >>> job = Job(command=("python",), fleet=fleet, gpus=2)
        >>> job.environment("r1", slot=1, base={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"]
        '6,7'
        """
        own = self.fleet.for_replica(replica).environment()
        own["PYTHONUNBUFFERED"] = "1"  # so that the log of a killed process ends with what it printed last
        if self.threads and "OMP_NUM_THREADS" not in base:
            own["OMP_NUM_THREADS"] = str(self.threads)
        if self.gpus:
            visible = base.get("CUDA_VISIBLE_DEVICES", "")
            numbers = visible.split(",") if visible else [str(i) for i in range((slot + 1) * self.gpus)]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(numbers[slot * self.gpus : (slot + 1) * self.gpus])
        if self.ranks > 1 and sys.platform.startswith("linux"):
            own["GLOO_SOCKET_IFNAME"] = base.get("GLOO_SOCKET_IFNAME") or "lo"  # the ranks are on this machine
        return {**base, **own}


# When a replica is started again --------------------------------------------------------------------------------------

Verdict = Literal["finished", "left", "incomplete", "diverged", "refused", "restart", "gave up"]


def _permanent_errors() -> set[str]:
    """Names of the exceptions that say that an input, the code or its packages cannot be used."""
    found: set[type[Exception]] = set()
    todo: list[type[Exception]] = [InputError, ImportError, SyntaxError]
    while todo:
        found.add(kind := todo.pop())
        todo += kind.__subclasses__()
    return {kind.__name__ for kind in found}


_SAME_FAILURE = 3  # the same exception at the same step, although steps were committed between
_SAME_FAILURE_BEFORE_JOINING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEnd:
    """How one incarnation of a replica ended."""

    code: int
    """Exit code; negative for a signal."""
    state: str | None
    """The last state in its status file; None if it never wrote one."""
    progressed: bool
    """Whether it committed at least one step."""
    step: int | None = None
    """Its number of committed steps, with those that it received."""
    error: str = ""
    """What it raised: the reason in its status file, else the last line of its log."""

    @property
    def permanent(self) -> bool:
        """Whether every other start would end in the same way: a missing package, a wrong option, a syntax error.

        Exit code 2 stands for wrong input, for this command as for argparse; after joining it may have other reasons.
        So may samples that cannot be read then: a disk that does not answer, or a process that reads and was killed.
        """
        if self._error_name == DataError.__name__ and self.step is not None:
            return False
        wrong_input = self.code == 2 and self.state is None and not self.passes
        return self.code > 0 and (self._error_name in _permanent_errors() or wrong_input)

    @property
    def _error_name(self) -> str:
        """Name of the exception that it raised, if there was one."""
        return self.error.partition(":")[0].rpartition(".")[2]

    @property
    def passes(self) -> bool:
        """Whether it failed for a reason that may pass while nobody changes the job: a full disk, a bucket that is
        away."""
        return self.code > 0 and self._error_name in ("OutputError", "StorageUnreachable")

    @property
    def failure(self) -> tuple[int | None, str] | None:
        """What a failure has in common with its repetition; None if a signal ended the process, or nothing is known."""
        asks = self.code == EXIT_RESTART or self.passes
        return (self.step, self.error) if self.code > 0 and not asks and self.error else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a replica that died is started again: the first time at once, then after pauses that double.

    An error that another start would repeat, such as a missing package, is final at once. A script with another bug is
    not started for ever, either. Deaths are counted as consecutive while no incarnation between them committed a step.
    The same exception at the same step is final at the third time even if steps were committed between, and before
    joining the fleet at the second time. Both limits are at most `max_failures`. What passes by itself, such as a full
    disk, is tried for as long as it takes.
    """

    max_failures: int = 5
    """Consecutive deaths without a committed step after which a replica is given up."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def failures(self, before: int, end: ProcessEnd) -> int:
        """Count the consecutive deaths without a committed step, with this one."""
        return 0 if end.progressed or end.code == 0 else before + 1

    def repeats(self, before: int, last: ProcessEnd | None, end: ProcessEnd) -> int:
        """Count how often in a row a replica has failed in the same way, with this time."""
        if end.failure is None:
            return 0
        return before + 1 if last is not None and last.failure == end.failure else 1

    def judge(self, end: ProcessEnd, failures: int, repeats: int = 0) -> tuple[Verdict, float]:
        """Decide what to do, and after how many seconds; `failures` and `repeats` include this end.

        What the replica says of itself in its status file counts, whatever its exit code.

        >>> policy = RestartPolicy(max_failures=4)
        >>> died = ProcessEnd(code=-9, state="training", progressed=False)
        >>> [policy.judge(died, failures) for failures in (0, 1, 2, 3, 4)]
        [('restart', 0.0), ('restart', 0.0), ('restart', 1.0), ('restart', 2.0), ('gave up', 0.0)]
        """
        if end.state in ("leaving", "left"):
            return "left", 0.0
        if end.state in ("diverged", "refused"):
            return ("diverged" if end.state == "diverged" else "refused"), 0.0
        if end.permanent:
            return "refused", 0.0
        if end.code == 0:
            return ("finished" if end.state == "finished" else "incomplete"), 0.0
        limit = _SAME_FAILURE_BEFORE_JOINING if end.state is None else _SAME_FAILURE
        if not end.passes and (failures >= self.max_failures or repeats >= min(limit, self.max_failures)):
            return "gave up", 0.0
        if failures < 2:
            return "restart", 0.0
        return "restart", min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 2))


# The supervisor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetEvent:
    """Something that happened to a replica, or to the lighthouse."""

    time: float
    """In seconds since 1970."""
    replica: str
    """Empty for the lighthouse."""
    what: Literal[
        "started", "waiting", "told to leave", "killed", "died", "left", "finished", "incomplete", "diverged",
        "refused", "gave up", "lighthouse restarted", "lighthouse down",
    ]  # fmt: skip
    text: str = ""
    lines: tuple[str, ...] = ()
    """The end of its log, if it was given up."""


@dataclass(kw_only=True)
class SupervisedReplica:
    """One replica of this machine, over all its incarnations."""

    name: str
    slot: int
    requested: bool = True
    child: ReplicaProcesses | None = None
    incarnations: int = 0
    deaths: int = 0
    """Number of ends that nobody asked for."""
    failures: int = 0
    """Consecutive deaths without a committed step."""
    repeats: int = 0
    """How often in a row it failed in the same way."""
    last_end: ProcessEnd | None = None
    trained: bool = False
    """Whether any incarnation committed a step."""
    outcome: Literal["", "finished", "left", "incomplete", "diverged", "refused", "gave up"] = ""
    """Why it is not started again; empty while it may be."""
    reason: str = ""
    """Why it ended so, in one line, if that is known."""
    status: ReplicaStatus | None = None
    """Status of the newest incarnation."""
    first_step: int | None = None
    """Step at which the newest incarnation began to train."""
    not_before: float = 0.0
    """It is not started before this time (monotonic)."""
    kill_at: float | None = None
    """It was told to leave, and is killed if it has not left by this time (monotonic); or it was killed then."""

    @property
    def running(self) -> bool:
        """Whether it has a process."""
        return self.child is not None

    @property
    def pending(self) -> bool:
        """Whether it will be started, perhaps after a pause."""
        return self.requested and self.child is None and not self.outcome

    @property
    def progressed(self) -> bool:
        """Whether the newest incarnation has committed a step."""
        step = self.status.step if self.status else None
        return step is not None and self.first_step is not None and step > self.first_step


@dataclass
class Supervisor:
    """The replicas of one machine, as a context manager: at its end, everything that it started is killed.

    with Supervisor(job, lighthouse) as fleet:
        fleet.request("r0")
        while fleet.active:
            for event in fleet.poll(): ...
            time.sleep(0.1)
    """

    job: Job
    lighthouse: LighthouseProcess | None = None
    """None if the lighthouse runs elsewhere. Closed with the supervisor."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    replicas: dict[str, SupervisedReplica] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether a replica runs or will be started."""
        return any(replica.running or replica.pending for replica in self.replicas.values())

    @property
    def hopeless(self) -> bool:
        """Whether replicas are requested and all of them have ended in a way that another start would repeat."""
        requested = [replica for replica in self.replicas.values() if replica.requested]
        return bool(requested) and all(replica.outcome in _ENDINGS for replica in requested)

    def unsaved(self, step: int) -> str:
        """What is missing of the final state of a job that finished at this step, in one line; empty if nothing is.

        The folder of a job whose lighthouse runs elsewhere may be elsewhere, too, and is not looked at.
        """
        if self.lighthouse is None:
            return ""
        config = self.job.fleet
        try:
            complete, _ = list_checkpoints(Storage(config.checkpoint_place))
        except StorageUnreachable as error:
            return f"whether the final state, of step {step}, is saved cannot be seen: {error}"
        if not any(name.step == step for name in complete):
            found = f"the newest checkpoint is of step {complete[0].step}" if complete else "there is no checkpoint"
            return f"the final state, of step {step}, was not saved: {found}; free some space and run it again"
        weights = config.folder / FINAL_WEIGHTS
        return "" if weights.is_file() else f"{weights} was not written"

    def repeats_after(self, step: int) -> str:
        """What a job that was stopped after this step will have to repeat, in one line; empty if nothing is.

        A replica that cannot save its last state because the disk is full may not be able to say so either.
        """
        if self.lighthouse is None:
            return ""
        try:
            complete, _ = list_checkpoints(Storage(self.job.fleet.checkpoint_place))
        except StorageUnreachable as error:
            return f"whether the last state is saved cannot be seen: {error}"
        if complete and complete[0].step >= step:
            return ""
        found = f"the newest checkpoint is of step {complete[0].step}" if complete else "there is no checkpoint"
        return f"the last state, of step {step} or later, was not saved: {found}; the steps since will be repeated"

    def request(self, name: str) -> None:
        """Keep a replica running from the next `poll` on, also one that left, finished or was given up before."""
        replica = self.replicas.setdefault(name, SupervisedReplica(name=name, slot=len(self.replicas)))
        replica.requested, replica.outcome, replica.failures, replica.not_before = True, "", 0, 0.0
        replica.repeats, replica.last_end, replica.reason = 0, None, ""

    def stop(self, name: str, *, kill: bool = False, grace_s: float = 30.0) -> list[FleetEvent]:
        """End a replica: tell it to leave, and kill it if it has not left after `grace_s`; or kill it at once."""
        replica = self.replicas[name]
        replica.requested = False
        if replica.child is None:
            return []
        if kill:
            replica.child.kill()
            replica.kill_at = time.monotonic()  # so that this end was asked for, also if it is requested again at once
            return [FleetEvent(time=time.time(), replica=name, what="killed")]
        if replica.kill_at is None:
            replica.kill_at = time.monotonic() + grace_s
            replica.child.send(signal.SIGTERM)
            return [FleetEvent(time=time.time(), replica=name, what="told to leave")]
        return []

    def stop_all(self, *, grace_s: float) -> list[FleetEvent]:
        """Tell all replicas to leave."""
        return [event for name in self.replicas for event in self.stop(name, grace_s=grace_s)]

    def start_no_more(self) -> None:
        """Let those that run go on, and start none again."""
        for replica in self.replicas.values():
            replica.requested = replica.requested and replica.running

    def poll(self) -> list[FleetEvent]:
        """Look at every process once and do what is due; return what has happened since the last call."""
        events = []
        if self.lighthouse is not None and (happened := self.lighthouse.restart_if_dead()):
            events.append(FleetEvent(time=time.time(), replica="", what=happened[0], text=happened[1]))
        for replica in self.replicas.values():
            if replica.child is not None:
                events += self._check(replica, replica.child)
            if replica.pending and time.monotonic() >= replica.not_before:
                events.append(self._start(replica))
        return events

    def _start(self, replica: SupervisedReplica) -> FleetEvent:
        """Start a replica. What keeps one from starting does not end the others."""
        replica.incarnations += 1
        replica.status = replica.first_step = replica.kill_at = None
        folder = replica_folder(self.job.fleet.folder, replica.name)
        with contextlib.suppress(OSError):  # so that every status is of this incarnation, whatever clocks say
            (folder / "status.json").unlink()
        try:
            replica.child = child = ReplicaProcesses(
                self.job.command,
                ranks=self.job.ranks,
                environment=self.job.environment(replica.name, slot=replica.slot, base=dict(os.environ)),
                log=folder / "log.txt",
                title=f"replica {replica.name}, incarnation {replica.incarnations}",
            )
        except (ConfigError, OutputError) as problem:
            if not any(other.running for other in self.replicas.values()):
                raise
            return self._not_started(replica, problem)
        text = "; ".join(filter(None, (f"process {child.pid}", child.log_problem)))
        return FleetEvent(time=child.began, replica=replica.name, what="started", text=text)

    def _not_started(self, replica: SupervisedReplica, problem: Exception) -> FleetEvent:
        end = ProcessEnd(code=1, state=None, progressed=False, error=f"{type(problem).__name__}: {problem}")
        replica.failures = self.policy.failures(replica.failures, end)
        verdict, pause = self.policy.judge(end, replica.failures)
        replica.deaths += 1
        if verdict == "restart":
            replica.not_before = time.monotonic() + pause
            text = f"{problem}; trying again" + (f" in {pause:g} s" if pause else "")
            return FleetEvent(time=time.time(), replica=replica.name, what="died", text=text)
        replica.outcome, replica.reason = ("refused" if verdict == "refused" else "gave up"), str(problem)
        return FleetEvent(time=time.time(), replica=replica.name, what=replica.outcome, text=replica.reason)

    def _check(self, replica: SupervisedReplica, child: ReplicaProcesses) -> list[FleetEvent]:
        code = child.exit_code()  # before the status is read, so that the last status of a process is seen
        status = read_status(self.job.fleet.folder, replica.name)
        if status is not None:
            waits = status.state == "waiting" and (replica.status is None or replica.status.reason != status.reason)
            replica.status = status
            replica.trained = replica.trained or status.batch is not None
            # While it joins, its step is the one of its peers: that is no progress of its own.
            if replica.first_step is None and status.state == "training":
                replica.first_step = status.step
            if waits and code is None:
                return [FleetEvent(time=time.time(), replica=replica.name, what="waiting", text=status.reason or "")]
        if code is not None:
            return [self._ended(replica, child, code)]
        if replica.kill_at is not None and time.monotonic() >= replica.kill_at:
            child.kill()
            replica.kill_at = None
            return [FleetEvent(time=time.time(), replica=replica.name, what="killed", text="it did not leave in time")]
        return []

    def _ended(self, replica: SupervisedReplica, child: ReplicaProcesses, code: int) -> FleetEvent:
        replica.child = None
        state = replica.status.state if replica.status else None
        now = time.time()
        if not replica.requested or replica.kill_at is not None:  # it was stopped
            # If it was requested again meanwhile, it is pending now, and this very poll starts it.
            if state == "finished":  # whatever its exit code: it may have been told to leave when it had just finished
                replica.outcome = "finished"
                return FleetEvent(time=now, replica=replica.name, what="finished")
            return FleetEvent(time=now, replica=replica.name, what="left", text=describe_exit(code) if code else "")
        reason = (replica.status.reason if replica.status else None) or ""
        end = ProcessEnd(
            code=code, state=state, progressed=replica.progressed, step=replica.status.step if replica.status else None,
            error=reason or _last_line(child),
        )  # fmt: skip
        replica.failures = self.policy.failures(replica.failures, end)
        replica.repeats = self.policy.repeats(replica.repeats, replica.last_end, end)
        replica.last_end = end
        verdict, pause = self.policy.judge(end, replica.failures, replica.repeats)
        if verdict == "restart":
            replica.deaths += 1
            replica.not_before = time.monotonic() + pause
            # The last line of its log says why only if it names an exception.
            why = f" ({end.error})" if code > 0 and (state == "failed" or _EXCEPTION.match(end.error)) else ""
            text = describe_exit(code) + why + (f"; starting again in {pause:g} s" if pause else "; starting again")
            return FleetEvent(time=now, replica=replica.name, what="died", text=text)
        replica.outcome = verdict
        if verdict == "finished" or verdict == "left":
            return FleetEvent(time=now, replica=replica.name, what=verdict, text=reason)
        if verdict == "incomplete":
            # The last line of its log is what a script printed, not why it ended.
            replica.reason = reason or (
                "the script ended without joining the fleet" if state is None else f"the script ended while {state}"
            )
            return FleetEvent(time=now, replica=replica.name, what=verdict, text=replica.reason)
        replica.deaths += 1
        replica.reason = end.error
        if verdict == "gave up":
            times = "without a step" if replica.failures >= self.policy.max_failures else f"with {end.error}"
            count = max(replica.failures, replica.repeats)
            text = f"{describe_exit(code)}, {count} {plural(count, 'time')} in a row {times}; see {child.log}"
            return FleetEvent(time=now, replica=replica.name, what="gave up", text=text, lines=tuple(child.log_tail()))
        lines = tuple(child.log_tail()) if state is None else ()  # what it printed before it could join
        return FleetEvent(time=now, replica=replica.name, what=verdict, text=replica.reason, lines=lines)

    def close(self) -> None:
        """Kill whatever still runs, the lighthouse last."""
        for replica in self.replicas.values():
            replica.requested = False
            if replica.child is not None:
                replica.child.kill()
                replica.child = None
        if self.lighthouse is not None:
            self.lighthouse.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The loop around it ---------------------------------------------------------------------------------------------------

Act = Callable[[], Iterable[FleetEvent] | None]
"""Changes the requested replicas and returns what it did; None when it has nothing more to do."""


def supervise(
    fleet: Supervisor,
    *,
    stop: StopSignal,
    grace_s: float,
    on_event: Callable[[FleetEvent], None],
    on_poll: Callable[[], None],
    act: Act | None = None,
) -> tuple[Ending, str]:
    """Poll the supervisor until the job is finished, no replica is left, or somebody stops it; then `judge_fleet`.

    `act` is called at every poll; as long as it has something to do, a fleet without replicas is not the end, unless
    all that were requested have ended for good. The first
    signal tells all replicas to leave and waits for `grace_s`; a second one raises KeyboardInterrupt, and the context
    of the supervisor then kills what is left.
    """
    finished_at: float | None = None
    stopping = False
    while True:
        for event in fleet.poll():
            on_event(event)
            if event.what == "finished" and finished_at is None:
                finished_at = time.monotonic()
        acted = None
        if act is not None and finished_at is None and not stopping:
            acted = act()
            for event in acted or ():
                on_event(event)
        on_poll()
        overdue = finished_at is not None and time.monotonic() - finished_at > _OTHERS_MAY_FINISH_S
        if not stopping and (stop.requested or overdue):
            stopping = True
            for event in fleet.stop_all(grace_s=grace_s):
                on_event(event)
        elif finished_at is not None:
            fleet.start_no_more()  # the job is done: replicas that died need not come back
        if not fleet.active and (acted is None or fleet.hopeless):
            return judge_fleet(fleet, stopped=stop.requested)
        time.sleep(_POLL_EVERY_S)


def judge_fleet(fleet: Supervisor, *, stopped: bool) -> tuple[Ending, str]:
    """How the job ended, and why, in one line: by what the replicas wrote into its folder, not by their exit codes."""
    by_outcome: dict[str, list[SupervisedReplica]] = {}
    for replica in fleet.replicas.values():
        by_outcome.setdefault(replica.outcome, []).append(replica)
    if finished := by_outcome.get("finished"):
        missing = fleet.unsaved(max((replica.status.step or 0 for replica in finished if replica.status), default=0))
        return (Ending.INCOMPLETE, missing) if missing else (Ending.FINISHED, "")
    if stopped:
        statuses = [replica.status for replica in fleet.replicas.values() if replica.status]
        unsaved = [status.reason for status in statuses if status.state == "left" and status.reason]
        if trained := [status.step for status in statuses if status.step and status.batch is not None]:
            unsaved = unsaved or [fleet.repeats_after(max(trained))]
        return Ending.STOPPED, "; ".join(filter(None, [Ending.STOPPED.line, *dict.fromkeys(unsaved)]))
    for outcome, ending in _ENDINGS.items():
        if replicas := by_outcome.get(outcome):
            return ending, f"{replicas[0].name}: {replicas[0].reason or ending.line}"
    return Ending.STOPPED, Ending.STOPPED.line


_ENDINGS = {
    "diverged": Ending.DIVERGED,
    "gave up": Ending.FAILED,
    "refused": Ending.WRONG_INPUT,
    "incomplete": Ending.INCOMPLETE,
}
"""The first of these that happened to a replica is the ending of a job that nobody finished or stopped."""


_EXCEPTION = re.compile(r"[\w.]*[A-Z]\w*(Error|Exception|Extra|Exit|Interrupt)(:|$)")


def _last_line(child: ReplicaProcesses) -> str:
    """The last line of a log that names an exception, as tracebacks end, or else the last one with words in it."""
    lines = [line.strip(" \u2502") for line in child.log_tail() if not line.startswith("--- ")]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    words = [line for line in lines if any(character.isalnum() for character in line)]
    return (raised or words or [""])[-1]
