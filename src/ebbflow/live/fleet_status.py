"""What a fleet is doing now, as one value, and how it is shown to people.

The lighthouse knows the replicas of the last quorum, their steps and their heartbeats. Batch, rate and speed are what
the replicas report: in their status files, or in their stores if those files cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbflow.live.protocol import LighthouseStatus, ReplicaStatus
from ebbflow.live.supervisor import FleetEvent, Supervisor
from ebbflow.plan.goodput import FurtherWorker, further_worker, value_of

__all__ = [
    "FleetDisplay", "FleetStatus", "KnownReplica", "combine", "describe_event", "launcher_table", "members_table",
    "summary", "worth_line",
]  # fmt: skip

_COLOURS = {
    "training": "green", "finished": "green", "left": "dim", "absent": "dim", "dead": "red", "gave up": "red",
    "waiting": "yellow", "incomplete": "red", "diverged": "red", "refused": "red",
}  # fmt: skip
_TABLE_EVERY_S = 0.25
_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownReplica:
    """What is known of one replica."""

    name: str
    state: str
    step: int | None = None
    heard_s: float | None = None
    """Seconds since its last heartbeat."""
    samples_per_s: float | None = None
    pid: int | None = None
    reason: str | None = None
    """Why it is in this state, if it said so: what it waits for, or what ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetStatus:
    """The status of a fleet; the field names are the keys of `ebbflow status --json`."""

    lighthouse: str
    quorum: int | None
    quorum_age_s: float | None
    members: tuple[KnownReplica, ...]
    step: int | None
    epoch: int | None
    batch: int | None
    lr: float | None
    multiplier: float | None
    samples_per_s: float | None
    loss: float | None
    noise_scale: float | None = None
    worth: FurtherWorker | None = None
    """What one further worker is worth, where the noise scale is measured. A step is assumed to take no longer with it,
    so this is the most that it can be worth."""
    problem: str | None = None
    """Why the lighthouse could not be asked although the job is not finished: the replicas are as their files say."""
    finished: bool = False
    """Whether the job is finished, so that no lighthouse answers any more: the replicas are as their files say."""


def combine(
    address: str,
    lighthouse: LighthouseStatus | None,
    statuses: Mapping[str, ReplicaStatus],
    *,
    price: float | None = None,
) -> FleetStatus:
    """Combine what the lighthouse and the replicas say; `price`: USD per hour of one worker.

    If the lighthouse was asked, a replica without quorum membership or heartbeat is dead, unless its status says that
    it starts, left or finished.
    """
    asked = lighthouse or LighthouseStatus(quorum_id=0)
    names = sorted({*statuses, *asked.steps, *asked.heartbeat_ages})
    members = tuple(_known(name, lighthouse, statuses.get(name)) for name in names)
    alive = [statuses[m.name] for m in members if m.name in statuses and m.state not in ("dead", "left")]
    newest = max((s for s in alive if s.batch is not None), key=lambda s: (s.step or 0, s.time), default=None)
    steps = [member.step for member in members if member.step is not None and member.state != "dead"]
    return FleetStatus(
        lighthouse=address,
        quorum=lighthouse.quorum_id if lighthouse else None,
        quorum_age_s=asked.quorum_age_s,
        members=members,
        step=max(steps, default=None),
        epoch=newest.epoch if newest else None,
        batch=newest.batch if newest else None,
        lr=newest.lr if newest else None,
        multiplier=newest.multiplier if newest else None,
        samples_per_s=newest.samples_per_s if newest else None,
        loss=newest.loss if newest else None,
        noise_scale=newest.noise_scale if newest else None,
        worth=_worth(newest, price) if newest else None,
    )


def _worth(status: ReplicaStatus, price: float | None) -> FurtherWorker | None:
    """What a further worker with the same local batch is worth, if all that it depends on is known."""
    workers, batch, speed = status.workers, status.batch, status.samples_per_s
    if not workers or not batch or not speed or not status.ref_batch or status.noise_scale is None:
        return None
    noise, reference, seconds = status.noise_scale, status.ref_batch, batch / speed
    more = round(batch * (workers + 1) / workers)
    return further_worker(
        value_of(workers, batch, seconds, noise_scale=noise, ref_batch=reference, price=price),
        value_of(workers + 1, more, seconds, noise_scale=noise, ref_batch=reference, price=price),
    )


def _known(name: str, lighthouse: LighthouseStatus | None, status: ReplicaStatus | None) -> KnownReplica:
    asked = lighthouse or LighthouseStatus(quorum_id=0)
    age = asked.heartbeat_ages.get(name)
    steps = [step for step in (status.step if status else None, asked.steps.get(name)) if step is not None]
    if status is not None and (status.state in ("left", "finished") or lighthouse is None):
        state = status.state
    elif age is None:
        state = status.state if status and status.state == "starting" else "dead"
    elif name in asked.recovering and not (status and status.state == "waiting"):
        state = "recovering"
    else:
        state = status.state if status else ("training" if name in asked.steps else "joining")
    return KnownReplica(
        name=name,
        state=state,
        step=max(steps, default=None),
        heard_s=age,
        samples_per_s=status.samples_per_s if status else None,
        pid=status.pid if status else None,
        reason=status.reason if status else None,
    )


# For people -----------------------------------------------------------------------------------------------------------


def summary(status: FleetStatus) -> str:
    """Write what is known of step, batch, rate, speed and loss in one line.

    >>> summary(FleetStatus(lighthouse="", quorum=3, quorum_age_s=1.0, members=(), step=120, epoch=2, batch=128,
    ...                     lr=0.2, multiplier=2.0, samples_per_s=5120.4, loss=0.25))
    'step 120  epoch 2  batch 128  rate 0.2 (x2)  5,120 samples/s  loss 0.2500'
    """
    rate = None if status.lr is None else f"rate {status.lr:.4g}"
    if rate is not None and status.multiplier is not None:
        rate += f" (x{status.multiplier:.3g})"
    parts = [
        f"step {status.step}" if status.step is not None else "",
        f"epoch {status.epoch}" if status.epoch is not None else "",
        f"batch {status.batch}" if status.batch is not None else "",
        rate,
        f"{status.samples_per_s:,.0f} samples/s" if status.samples_per_s is not None else "",
        f"loss {status.loss:.4f}" if status.loss is not None else "",
    ]
    return "  ".join(part for part in parts if part) or "no step yet"


def worth_line(worth: FurtherWorker) -> str:
    """Write what a further worker is worth in one line.

    >>> values = [value_of(n, 100 * n, 1.0, noise_scale=300, ref_batch=100, price=0.9) for n in (4, 5)]
    >>> worth_line(further_worker(*values))
    'efficiency 57%  progress 229/s  4.38 USD/million  one more worker: at most +9.4%'
    """
    price = worth.now.usd_per_million
    parts = [
        f"efficiency {worth.now.efficiency:.0%}",
        f"progress {worth.now.goodput:,.0f}/s",
        "" if price is None else f"{price:,.3g} USD/million",
        f"one more worker: at most {worth.gain:+.1%}",
    ]
    return "  ".join(part for part in parts if part)


def members_table(status: FleetStatus) -> RenderableType:
    """Make what `ebbflow status` prints: one row per replica, then the summary."""
    table = _table("replica", "state", "step", "heard")
    for member in status.members:
        table.add_row(
            Text(member.name),
            Text(member.state, style=_COLOURS.get(member.state, "")),
            "" if member.step is None else str(member.step),
            "" if member.heard_s is None else f"{member.heard_s:.1f} s ago",
        )
    alive = sum(member.heard_s is not None for member in status.members)
    quorum = f"quorum {status.quorum}" if status.quorum else "no quorum yet"
    head = f"lighthouse {status.lighthouse}  {quorum}  {alive} alive"
    if status.finished:
        head = f"the job is finished, and its lighthouse {status.lighthouse} has ended"
        status = replace(
            status, batch=None, lr=None, multiplier=None, samples_per_s=None, worth=None
        )  # of the last step
    elif status.problem:
        head = f"lighthouse {status.lighthouse} does not answer; what the replicas said last:"
    if not status.members:
        return Text(f"{head}: nobody has joined")
    reasons = [Text(f"{member.name}: {member.reason}") for member in status.members if member.reason]
    return Group(Text(head), table, *reasons, *_footer(status))


def launcher_table(fleet: Supervisor, status: FleetStatus, *, title: str) -> RenderableType:
    """Make what `ebbflow launch` shows while it runs: one row per replica of this machine, then the summary."""
    table = _table("replica", "state", "step", "up", "started", "died", "process")
    now = time.time()
    for replica in fleet.replicas.values():
        state = _state(fleet, replica.name)
        step = replica.status.step if replica.status else None
        table.add_row(
            Text(replica.name),
            Text(state, style=_COLOURS.get(state, "")),
            "" if step is None else str(step),
            f"{now - replica.child.began:.0f} s" if replica.child else "",
            str(replica.incarnations),
            str(replica.deaths),
            str(replica.child.pid) if replica.child else "",
        )
    return Group(Text(title), table, *_footer(status))


def _footer(status: FleetStatus) -> list[Text]:
    """The summary, and what a further worker is worth where that is known."""
    return [Text(summary(status)), *([Text(line)] if (line := _worth_or_why_not(status)) else [])]


def _worth_or_why_not(status: FleetStatus) -> str:
    """What a further worker is worth, or why the status does not say it; empty before the first step."""
    if status.worth is not None:
        return worth_line(status.worth)
    if status.batch is None or status.noise_scale is not None:
        return ""
    return "one more worker: not known, since neither rule nor policy measures the noise"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("replica", "state") else "right", no_wrap=True)
    return table


def _state(fleet: Supervisor, name: str) -> str:
    replica = fleet.replicas[name]
    if replica.outcome:
        return replica.outcome
    if replica.pending:
        return "waiting"
    if not replica.running:
        return "absent"
    return replica.status.state if replica.status else "starting"


def describe_event(event: FleetEvent) -> str:
    """Write an event with its time of day, and the end of a log below it if there is one."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    what = " ".join(part for part in (event.replica, event.what) if part)
    first = f"{clock} {what}" + (f": {event.text}" if event.text else "")
    return "\n".join([first, *(f"    {line}" for line in event.lines)])


class FleetDisplay:
    """Shows a supervised fleet while it runs: a table on a terminal, lines elsewhere, and every event.

    What cannot be shown, because nobody reads it any longer or a disk is full, does not end the fleet.
    """

    def __init__(self, console: Console, fleet: Supervisor, title: Callable[[], str]) -> None:
        """`title`: the line above the table, asked for each time."""
        self.fleet = fleet
        self.title = title
        self.counts: Counter[str] = Counter()
        """Number of events of each kind."""
        self._console = console
        # It is not refreshed by a thread of its own, since the launcher forks.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_at = 0.0
        self._pause = _TABLE_EVERY_S if console.is_terminal else _FIRST_LINE_S

    def __enter__(self) -> Self:
        # By default rich closes the standard output, too, and ends the process.
        setattr(self._console, "on_broken_pipe", self._nobody_reads)  # noqa: B010
        with contextlib.suppress(OSError):
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._live.__exit__(kind, error, trace)
        delattr(self._console, "on_broken_pipe")

    def _nobody_reads(self) -> None:
        self._console.quiet = True

    def on_event(self, event: FleetEvent) -> None:
        """Print and count an event."""
        self.counts[event.what] += 1
        self.say(describe_event(event))

    def say(self, text: str) -> None:
        """Print a line, if that is possible."""
        with contextlib.suppress(OSError):
            self._console.print(Text(text), soft_wrap=True)

    def on_poll(self) -> None:
        """Show the fleet if that is due."""
        if time.monotonic() - self._shown_at < self._pause:
            return
        self._shown_at = time.monotonic()
        replicas = self.fleet.replicas.values()
        reported = {replica.name: replica.status for replica in replicas if replica.status and replica.running}
        status = combine(self.fleet.job.fleet.lighthouse, None, reported)
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._live.update(launcher_table(self.fleet, status, title=self.title()), refresh=True)
            return
        running = sum(replica.running for replica in replicas)
        self.say(f"{time.strftime('%H:%M:%S')} {running} running  {summary(status)}")
        self._pause = min(2 * self._pause, _LINE_EVERY_S)  # the log of several days is not to consist of such lines
