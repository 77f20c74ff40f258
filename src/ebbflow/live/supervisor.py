"""Keeps the requested replicas of one machine running: starts them, watches them, and starts those again that died.

Its user says which replicas are requested (`request`, `stop`) and when to look at their processes (`poll`).
`RestartPolicy` decides, as a pure function, what is done when a process ends. `supervise` is the loop around it all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from ebbflow.core.signals import StopSignal
from ebbflow.live.processes import ChildProcess, LighthouseProcess
from ebbflow.live.protocol import EXIT_RESTART, FleetConfig, ReplicaStatus, read_status, replica_folder

__all__ = [
    "Act", "Ending", "FleetEvent", "Job", "Outcome", "RestartPolicy", "SupervisedReplica", "Supervisor", "Verdict",
    "describe_exit", "supervise",
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
    """CPU threads per replica, unless OMP_NUM_THREADS is set already; 0 leaves it alone."""

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
        return {**base, **own}


# When a replica is started again --------------------------------------------------------------------------------------

Verdict = Literal["finished", "left", "restart", "gave up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one incarnation of a replica ended."""

    code: int
    """Exit code; negative for a signal."""
    state: str | None
    """The last state in its status file; None if it never wrote one."""
    progressed: bool
    """Whether it committed at least one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a replica that died is started again: the first time at once, then after pauses that double.

    A script with a bug is not started for ever: deaths are counted as consecutive while no incarnation between them
    committed a step.
    """

    max_failures: int = 5
    """Consecutive deaths without a committed step after which a replica is given up."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def failures(self, before: int, ending: Ending) -> int:
        """Count the consecutive deaths without a committed step, with this ending."""
        if ending.progressed or ending.code == 0:
            return 0
        return before + 1

    def judge(self, ending: Ending, failures: int) -> tuple[Verdict, float]:
        """Decide what to do, and after how many seconds; `failures` includes this ending.

        >>> policy = RestartPolicy(max_failures=4)
        >>> died = Ending(code=-9, state="training", progressed=False)
        >>> [policy.judge(died, failures) for failures in (0, 1, 2, 3, 4)]
        [('restart', 0.0), ('restart', 0.0), ('restart', 1.0), ('restart', 2.0), ('gave up', 0.0)]
        """
        if ending.code == 0:
            # A program that never wrote a status is no replica of ours, but with 0 it says that it is done.
            return ("left" if ending.state in ("leaving", "left") else "finished"), 0.0
        if failures >= self.max_failures:
            return "gave up", 0.0
        if failures < 2:
            return "restart", 0.0
        return "restart", min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 2))


def describe_exit(code: int) -> str:
    """Describe an exit code for people.

    >>> describe_exit(-9), describe_exit(75), describe_exit(1)
    ('killed by SIGKILL', 'asked to be started again', 'exit code 1')
    """
    if code == EXIT_RESTART:
        return "asked to be started again"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# The supervisor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetEvent:
    """Something that happened to a replica, or to the lighthouse."""

    time: float
    """In seconds since 1970."""
    replica: str
    """Empty for the lighthouse."""
    what: Literal["started", "told to leave", "killed", "died", "left", "finished", "gave up", "lighthouse restarted"]
    text: str = ""
    lines: tuple[str, ...] = ()
    """The end of its log, if it was given up."""


@dataclass(kw_only=True)
class SupervisedReplica:
    """One replica of this machine, over all its incarnations."""

    name: str
    slot: int
    requested: bool = True
    child: ChildProcess | None = None
    incarnations: int = 0
    deaths: int = 0
    """Number of ends that nobody asked for."""
    failures: int = 0
    """Consecutive deaths without a committed step."""
    outcome: Literal["", "finished", "left", "gave up"] = ""
    """Why it is not started again; empty while it may be."""
    status: ReplicaStatus | None = None
    """Status of the newest incarnation."""
    first_step: int | None = None
    """Step at which the newest incarnation began to train."""
    not_before: float = 0.0
    """It is not started before this time (monotonic)."""
    kill_at: float | None = None
    """It was told to leave, and is killed if it has not left by this time (monotonic)."""

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

    def request(self, name: str) -> None:
        """Keep a replica running from the next `poll` on, also one that left, finished or was given up before."""
        replica = self.replicas.setdefault(name, SupervisedReplica(name=name, slot=len(self.replicas)))
        replica.requested, replica.outcome, replica.failures, replica.not_before = True, "", 0, 0.0

    def stop(self, name: str, *, kill: bool = False, grace_s: float = 30.0) -> list[FleetEvent]:
        """End a replica: tell it to leave, and kill it if it has not left after `grace_s`; or kill it at once."""
        replica = self.replicas[name]
        replica.requested = False
        if replica.child is None:
            return []
        if kill:
            replica.child.kill()
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
        if self.lighthouse is not None and self.lighthouse.restart_if_dead():
            events.append(FleetEvent(time=time.time(), replica="", what="lighthouse restarted"))
        for replica in self.replicas.values():
            if replica.child is not None:
                events += self._check(replica, replica.child)
            if replica.pending and time.monotonic() >= replica.not_before:
                events.append(self._start(replica))
        return events

    def _start(self, replica: SupervisedReplica) -> FleetEvent:
        replica.incarnations += 1
        replica.status = replica.first_step = replica.kill_at = None
        replica.child = ChildProcess(
            self.job.command,
            environment=self.job.environment(replica.name, slot=replica.slot, base=dict(os.environ)),
            log=replica_folder(self.job.fleet.folder, replica.name) / "log.txt",
            title=f"replica {replica.name}, incarnation {replica.incarnations}",
        )
        return FleetEvent(
            time=replica.child.began, replica=replica.name, what="started", text=f"process {replica.child.pid}"
        )

    def _check(self, replica: SupervisedReplica, child: ChildProcess) -> list[FleetEvent]:
        code = child.exit_code()  # before the status is read, so that the last status of a process is seen
        status = read_status(self.job.fleet.folder, replica.name)
        if status is not None and status.time >= child.began:  # else it is from an earlier incarnation
            replica.status = status
            # While it joins, its step is the one of its peers: that is no progress of its own.
            if replica.first_step is None and status.state == "training":
                replica.first_step = status.step
        if code is not None:
            return [self._ended(replica, child, code)]
        if replica.kill_at is not None and time.monotonic() >= replica.kill_at:
            child.kill()
            replica.kill_at = None
            return [FleetEvent(time=time.time(), replica=replica.name, what="killed", text="it did not leave in time")]
        return []

    def _ended(self, replica: SupervisedReplica, child: ChildProcess, code: int) -> FleetEvent:
        replica.child = None
        state = replica.status.state if replica.status else None
        now = time.time()
        if not replica.requested or replica.kill_at is not None:  # it was stopped
            # If it was requested again meanwhile, it is pending now, and this very poll starts it.
            if code == 0 and state == "finished":
                replica.outcome = "finished"
                return FleetEvent(time=now, replica=replica.name, what="finished")
            return FleetEvent(time=now, replica=replica.name, what="left", text=describe_exit(code) if code else "")
        ending = Ending(code=code, state=state, progressed=replica.progressed)
        replica.failures = self.policy.failures(replica.failures, ending)
        verdict, pause = self.policy.judge(ending, replica.failures)
        if verdict == "finished" or verdict == "left":
            replica.outcome = verdict
            return FleetEvent(time=now, replica=replica.name, what=verdict)
        replica.deaths += 1
        if verdict == "gave up":
            replica.outcome = "gave up"
            text = f"{describe_exit(code)}, {replica.failures} times in a row without a step; see {child.log}"
            return FleetEvent(time=now, replica=replica.name, what="gave up", text=text, lines=tuple(child.log_tail()))
        replica.not_before = time.monotonic() + pause
        text = describe_exit(code) + (f"; starting again in {pause:g} s" if pause else "; starting again")
        return FleetEvent(time=now, replica=replica.name, what="died", text=text)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# The loop around it ---------------------------------------------------------------------------------------------------

Act = Callable[[], Iterable[FleetEvent] | None]
"""Changes the requested replicas and returns what it did; None when it has nothing more to do."""

Outcome = Literal["finished", "stopped", "failed", "left"]
"""The job is done; somebody stopped it; every replica was given up; every replica left by itself."""


def supervise(
    fleet: Supervisor,
    *,
    stop: StopSignal,
    grace_s: float,
    on_event: Callable[[FleetEvent], None],
    on_poll: Callable[[], None],
    act: Act | None = None,
) -> Outcome:
    """Poll the supervisor until the job is finished, no replica is left, or somebody stops it.

    `act` is called at every poll; as long as it has something to do, a fleet without replicas is not the end. The first
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
        if acted is None and not fleet.active:
            return _outcome(fleet, finished=finished_at is not None, stopped=stop.requested)
        time.sleep(_POLL_EVERY_S)


def _outcome(fleet: Supervisor, *, finished: bool, stopped: bool) -> Outcome:
    if finished:
        return "finished"
    if stopped:
        return "stopped"
    gave_up = any(replica.outcome == "gave up" for replica in fleet.replicas.values())
    return "failed" if gave_up else "left"
