"""A fleet for people: a table for a terminal, a line for a log."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebbflow.live.status import FleetStatus
from ebbflow.live.supervisor import Happening, Supervisor

__all__ = ["fleet_line", "fleet_table", "happening_line", "members_table", "summary"]

_COLOURS = {
    "training": "green", "finished": "green", "left": "dim", "absent": "dim", "dead": "red", "gave up": "red",
    "waiting": "yellow",
}  # fmt: skip


def summary(status: FleetStatus) -> str:
    """The fleet in a line: what is known of step, batch, rate, speed and loss.

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


def members_table(status: FleetStatus) -> RenderableType:
    """What `ebbflow status` prints: the members, then the fleet in a line."""
    table = _table("replica", "state", "step", "heard")
    for member in status.members:
        table.add_row(
            member.name,
            Text(member.state, style=_COLOURS.get(member.state, "")),
            "" if member.step is None else str(member.step),
            "" if member.heard_s is None else f"{member.heard_s:.1f} s ago",
        )
    alive = sum(member.heard_s is not None for member in status.members)
    quorum = f"quorum {status.quorum}" if status.quorum else "no quorum yet"
    head = f"lighthouse {status.lighthouse}  {quorum}  {alive} alive"
    return Group(Text(head), table, Text(summary(status))) if status.members else Text(f"{head}: nobody has joined")


def fleet_table(fleet: Supervisor, status: FleetStatus, *, title: str) -> RenderableType:
    """What `ebbflow launch` shows while it runs: the replicas of this machine, then the fleet in a line."""
    table = _table("replica", "state", "step", "up", "started", "died", "process")
    now = time.time()
    for replica in fleet.replicas.values():
        state = _state(fleet, replica.name)
        step = replica.status.step if replica.status else None
        table.add_row(
            replica.name,
            Text(state, style=_COLOURS.get(state, "")),
            "" if step is None else str(step),
            f"{now - replica.child.began:.0f} s" if replica.child else "",
            str(replica.incarnations),
            str(replica.deaths),
            str(replica.child.pid) if replica.child else "",
        )
    return Group(Text(title), table, Text(summary(status)))


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


def fleet_line(fleet: Supervisor, status: FleetStatus) -> str:
    """The same for a log: one line."""
    running = sum(replica.running for replica in fleet.replicas.values())
    return f"{running} running  {summary(status)}"


def happening_line(happening: Happening) -> str:
    """One happening, with its time of day; the end of a log below it, where there is one."""
    clock = time.strftime("%H:%M:%S", time.localtime(happening.time))
    what = " ".join(part for part in (happening.replica, happening.what) if part)
    first = f"{clock} {what}" + (f": {happening.text}" if happening.text else "")
    return "\n".join([first, *(f"    {line}" for line in happening.lines)])
