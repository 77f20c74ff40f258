"""Keeps the replicas of this machine as they are wanted: starts them, watches them, starts the dead again.

The supervisor is told who is wanted (`want`, `dismiss`) and looks at the processes when asked to (`poll`), so that
whoever uses it keeps the clock. What to do about an ending is decided by `restart`; this module does it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from ebbflow.live.lighthouse import Lighthouse
from ebbflow.live.process import Child
from ebbflow.live.protocol import Job, ReplicaStatus, read_status, replica_folder
from ebbflow.live.restart import Ending, RestartPolicy, describe_exit

__all__ = ["Happening", "Replica", "Supervisor", "What"]

What = Literal["started", "dismissed", "killed", "died", "left", "finished", "gave up", "lighthouse restarted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """Something that happened to a replica, for the log, the table and the account."""

    time: float
    """In seconds since 1970."""
    replica: str
    what: What
    text: str = ""
    lines: tuple[str, ...] = ()
    """The end of its log, when it gave up."""


@dataclass(kw_only=True)
class Replica:
    """One replica of this machine, over all its incarnations."""

    name: str
    slot: int
    wanted: bool = True
    child: Child | None = None
    incarnations: int = 0
    deaths: int = 0
    """Ends that nobody asked for."""
    failures: int = 0
    """Deaths in a row without progress."""
    outcome: Literal["", "finished", "left", "gave up"] = ""
    """Why it is not started again; empty while it may be."""
    status: ReplicaStatus | None = None
    """Of the incarnation that runs or ran last."""
    first_step: int | None = None
    """Where the incarnation that runs or ran last began to train."""
    not_before: float = 0.0
    """Do not start it before (monotonic)."""
    kill_at: float | None = None
    """A dismissed replica that has not left by then is killed (monotonic)."""

    @property
    def running(self) -> bool:
        """Its process is there."""
        return self.child is not None

    @property
    def pending(self) -> bool:
        """It will be started when its pause is over."""
        return self.wanted and self.child is None and not self.outcome

    @property
    def progressed(self) -> bool:
        """The incarnation that runs or ran last has committed a step."""
        step = self.status.step if self.status else None
        return step is not None and self.first_step is not None and step > self.first_step


@dataclass
class Supervisor:
    """The replicas of one machine. Use it as a context: on the way out everything it started is killed.

    with Supervisor(job, lighthouse) as fleet:
        fleet.want("r0")
        while fleet.active:
            for happening in fleet.poll(): ...
            time.sleep(0.1)
    """

    job: Job
    lighthouse: Lighthouse | None = None
    """None where the lighthouse runs elsewhere. Closed with the supervisor."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    replicas: dict[str, Replica] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Some replica runs, or will be started again."""
        return any(replica.running or replica.pending for replica in self.replicas.values())

    def want(self, name: str) -> None:
        """Have a replica, from the next `poll` on; one that left, finished or was given up gets another chance."""
        replica = self.replicas.setdefault(name, Replica(name=name, slot=len(self.replicas)))
        replica.wanted, replica.outcome, replica.failures, replica.not_before = True, "", 0, 0.0

    def dismiss(self, name: str, *, kill: bool = False, grace_s: float = 30.0) -> list[Happening]:
        """Do without a replica: by a notice, and by force if it has not left after the grace; or by force at once."""
        replica = self.replicas[name]
        replica.wanted = False
        if replica.child is None:
            return []
        if kill:
            replica.child.kill()
            return [Happening(time=time.time(), replica=name, what="killed")]
        if replica.kill_at is None:
            replica.kill_at = time.monotonic() + grace_s
            replica.child.send(signal.SIGTERM)
            return [Happening(time=time.time(), replica=name, what="dismissed")]
        return []

    def poll(self) -> list[Happening]:
        """Look after everyone once; what happened since the last time. Takes no time to speak of."""
        happenings = []
        if self.lighthouse is not None and self.lighthouse.keep_alive():
            happenings.append(Happening(time=time.time(), replica="", what="lighthouse restarted"))
        for replica in self.replicas.values():
            if replica.child is not None:
                happenings += self._look_after(replica, replica.child)
            if replica.pending and time.monotonic() >= replica.not_before:
                happenings.append(self._start(replica))
        return happenings

    def _start(self, replica: Replica) -> Happening:
        replica.incarnations += 1
        replica.status = replica.first_step = replica.kill_at = None
        replica.child = Child(
            self.job.command,
            environment=self.job.environment(replica.name, slot=replica.slot, base=dict(os.environ)),
            log=replica_folder(self.job.folder, replica.name) / "log.txt",
            title=f"replica {replica.name}, incarnation {replica.incarnations}",
        )
        return Happening(
            time=replica.child.began, replica=replica.name, what="started", text=f"process {replica.child.pid}"
        )

    def _look_after(self, replica: Replica, child: Child) -> list[Happening]:
        code = child.exit_code()  # before the status is read, so that its last word is heard
        status = read_status(self.job.folder, replica.name)
        if status is not None and status.time >= child.began:  # else it is an earlier incarnation's
            replica.status = status
            if replica.first_step is None and status.state == "training":  # not while it joins: peers bring it ahead
                replica.first_step = status.step
        if code is not None:
            return [self._ended(replica, child, code)]
        if replica.kill_at is not None and time.monotonic() >= replica.kill_at:
            child.kill()
            replica.kill_at = None
            return [Happening(time=time.time(), replica=replica.name, what="killed", text="it did not leave in time")]
        return []

    def _ended(self, replica: Replica, child: Child, code: int) -> Happening:
        replica.child = None
        said = replica.status.state if replica.status else None
        now = time.time()
        if not replica.wanted or replica.kill_at is not None:  # asked for
            # Wanted again meanwhile: `pending` now, and started by this very poll.
            if code == 0 and said == "finished":
                replica.outcome = "finished"
                return Happening(time=now, replica=replica.name, what="finished")
            return Happening(time=now, replica=replica.name, what="left", text=describe_exit(code) if code else "")
        ending = Ending(code=code, state=said, progressed=replica.progressed)
        replica.failures = self.policy.failures(replica.failures, ending)
        verdict, pause = self.policy.judge(ending, replica.failures)
        if verdict == "finished" or verdict == "left":
            replica.outcome = verdict
            return Happening(time=now, replica=replica.name, what=verdict)
        replica.deaths += 1
        if verdict == "gave up":
            replica.outcome = "gave up"
            text = f"{describe_exit(code)}, {replica.failures} times in a row without a step; see {child.log}"
            return Happening(time=now, replica=replica.name, what="gave up", text=text, lines=tuple(child.last_words()))
        replica.not_before = time.monotonic() + pause
        text = describe_exit(code) + (f"; starting again in {pause:g} s" if pause else "; starting again")
        return Happening(time=now, replica=replica.name, what="died", text=text)

    def dismiss_all(self, *, grace_s: float) -> list[Happening]:
        """A notice to everyone."""
        return [happening for name in self.replicas for happening in self.dismiss(name, grace_s=grace_s)]

    def retire_absent(self) -> None:
        """Start nobody again."""
        for replica in self.replicas.values():
            replica.wanted = replica.wanted and replica.running

    def close(self) -> None:
        """Kill whatever still runs, the lighthouse last."""
        for replica in self.replicas.values():
            replica.wanted = False
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
