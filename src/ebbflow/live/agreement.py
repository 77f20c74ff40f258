"""What follows from what replicas have said: whose state counts, who is refused, who is dead or out of reach.

Plain functions of values, by which all replicas come to the same answer; `membership.py` decides what to do then. A
lineage is a hash chain over the initial weights and the committed steps: equal lineages mean equal states.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebbflow.data.ledger import Assignment
from ebbflow.live.membership_events import Handshake, QuorumFormed

__all__ = [
    "UNKNOWN", "Agreement", "agree", "describe_difference", "extend_lineage", "fork_lineage", "gone_on_without",
    "group_key", "initial_lineage", "keeps_others_waiting", "links_of", "meeting_key", "out_of_reach",
    "without_heartbeat",
]  # fmt: skip

UNKNOWN = "unknown"
"""What a replica says in its handshake of what it cannot tell; it agrees with everything."""
_LINEAGE_BITS = 48  # a double, and so any reader of JSON, holds such a number exactly


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What follows from the handshakes of a quorum. Ranks are positions in their list."""

    incompatible: frozenset[int]
    """Ranks that are refused. If there are any, no state is sent: they leave, and the others ask for a new quorum."""
    transfers: Mapping[int, int]
    """For each rank that needs the state, the rank that sends it."""
    job: Mapping[str, str]
    """What the fleet trains."""
    established: bool = True
    """Whether any replica is established. If none is, a checkpoint may be further than all of them."""


def agree(handshakes: Sequence[Handshake]) -> Agreement:
    """Decide who may take part and whose state counts, as a pure function: all replicas come to the same answer.

    A replica of another job, model, seed or version is incompatible. The state that counts is the one of the replica
    that has come furthest among the established ones; if there are none, as at the start or after the loss of the
    whole fleet, among all. Replicas with another lineage receive that state, and with it the position in the data.

    >>> from ebbflow.live.membership_events import ReplicaState
    >>> new = ReplicaState(step=0, lineage=5)
    >>> trained = ReplicaState(step=7, lineage=9, established=True)
    >>> agree([Handshake(name=name, store="", state=state) for name, state in [("a", new), ("b", trained)]]).transfers
    {0: 1}
    """
    if not handshakes:
        raise ValueError("there are no handshakes to agree on")
    established = [handshake for handshake in handshakes if handshake.state.established]
    # If nobody has trained yet, the job that most replicas have is the fleet's, or the first of equals.
    votes = Counter(_job_key(handshake) for handshake in established or handshakes)
    job = max(
        established or handshakes,
        key=lambda handshake: (handshake.state.step if established else 0, votes[_job_key(handshake)]),
    ).job
    incompatible = frozenset(rank for rank, one in enumerate(handshakes) if _different_keys(one.job, job))
    compatible = [rank for rank in range(len(handshakes)) if rank not in incompatible]
    states = [handshakes[rank].state for rank in compatible]
    holders = Counter(state.lineage for state in states)
    # Of two states that are equally far, that of more replicas counts.
    lineage = max(states, key=lambda state: (state.established, state.step, holders[state.lineage])).lineage
    senders = [rank for rank in compatible if handshakes[rank].state.lineage == lineage]
    receivers = [rank for rank in compatible if handshakes[rank].state.lineage != lineage]
    transfers = {rank: senders[i % len(senders)] for i, rank in enumerate(receivers)}
    return Agreement(
        incompatible=incompatible, transfers={} if incompatible else transfers, job=job, established=bool(established)
    )


def _job_key(handshake: Handshake) -> str:
    return json.dumps(sorted(item for item in handshake.job.items() if item[1] != UNKNOWN))


def _different_keys(own: Mapping[str, str], fleet: Mapping[str, str]) -> list[str]:
    """In which respects two jobs differ; what is not known of one of them is no difference."""
    keys = [key for key in {**own, **fleet} if own.get(key) != fleet.get(key)]
    return [key for key in keys if UNKNOWN not in (own.get(key), fleet.get(key))]


def describe_difference(own: Mapping[str, str], other: Mapping[str, str], where: str = "in the fleet") -> str:
    """Say in which respects a replica is incompatible, for the message that refuses it.

    >>> describe_difference({"seed": "1", "rule": "linear"}, {"seed": "2", "rule": "linear"})
    "seed is '1' here and '2' in the fleet"
    """
    keys = _different_keys(own, other)
    return "; ".join(f"{key} is {own.get(key)!r} here and {other.get(key)!r} {where}" for key in keys)


def initial_lineage(weights: str) -> int:
    """Give the lineage of a state in which no step was committed, from a digest of its weights."""
    return _hash("root", weights)


def fork_lineage(snapshot: int, given_up: int) -> int:
    """Give the lineage of a state that is that of a snapshot again, after the steps up to another one were given up."""
    return _hash("snapshot", snapshot, given_up)


def extend_lineage(lineage: int, assignment: Assignment, group: str) -> int:
    """Give the lineage after a step: from the state before it, its samples and the quorum group that computed it.

    `group` is the key of the quorum group, which no other group ever has: a step that is repeated after a failure is
    another step.
    """
    return _hash(lineage, assignment.epoch, assignment.start, assignment.stop, group)


def group_key(handshakes: Sequence[Handshake]) -> str:
    """Give the key of a quorum group from the handshakes that all its replicas have. No two groups have the same."""
    return f"{_hash(*((handshake.name, handshake.attempt) for handshake in handshakes)):012x}"


def meeting_key(replicas: Sequence[str]) -> str:
    """Give the key under which the replicas of a quorum leave their handshakes."""
    return f"{_hash(*replicas):012x}"


def _hash(*parts: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[: _LINEAGE_BITS // 8], "big")


def without_heartbeat(names: Iterable[str], ages: Mapping[str, float], timeout_s: float) -> list[str]:
    """Name those whose last heartbeat is older than the timeout. One that the lighthouse does not know is not old.

    >>> without_heartbeat(["a", "b", "c"], {"a": 0.1, "b": 3.0}, timeout_s=0.8)
    ['b']
    """
    return [name for name in names if ages.get(name, 0.0) > timeout_s]


def gone_on_without(own: str, others: Iterable[str], quorum: Collection[str]) -> list[str]:
    """Name those that have formed a quorum without this replica: they do not take part in its group any longer.

    A replica that stood still for a while finds the connections of its group open, and would wait in vain.

    >>> gone_on_without("b", ["a", "c"], ["a", "c"]), gone_on_without("b", ["a", "c"], ["a", "b", "c"])
    (['a', 'c'], [])
    """
    return [] if own in quorum else [name for name in others if name in quorum]


def keeps_others_waiting(computing_s: float, step_s: float, patience_s: float) -> bool:
    """Whether a replica whose peers have given up their step hangs: by how long it computes, and its last step took.

    The peers wait for `patience_s` after they have done their own part, so that one that is only slow is not taken for
    one that hangs.

    >>> keeps_others_waiting(70, 2, patience_s=60), keeps_others_waiting(70, 90, patience_s=60)
    (True, False)
    """
    return computing_s > patience_s + 2 * step_s


def out_of_reach(quorum: QuorumFormed, min_replicas: int = 1) -> frozenset[str]:
    """Name the replicas of a quorum without which all others reach each other, by what all have said in it.

    Of two that do not reach each other, the one that has come less far is left out, so that no committed step is given
    up; of equals, the one with more such links, then the one that has noticed it, which sees when the link is restored,
    then the last one by name.

    Ports that are blocked between two replicas whose stores answer count like a cut link if more than half of the
    quorum stays, and no fewer than `min_replicas`. Else something is wrong that concerns everybody, or nobody could
    train without those that are left out: then all stay, fail together, and end with what the backend says.

    >>> said = {"established": (True,) * 3, "steps": (7,) * 3, "unreachable": (("c",), (), ("a",))}
    >>> out_of_reach(QuorumFormed(now=0, quorum_id=1, replicas=tuple("abc"), rank=0, store="", groups=(), **said))
    frozenset({'c'})
    """
    cut = _reports(quorum.replicas, quorum.unreachable)
    blocked = _reports(quorum.replicas, quorum.blocked)
    if blocked:
        out = _left_out(quorum, cut | blocked)
        stay = len(quorum.replicas) - len(out)
        if 2 * stay > len(quorum.replicas) and stay >= min_replicas:
            return out
    return _left_out(quorum, cut)


def links_of(name: str, replicas: Sequence[str], said: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Name those that a replica does not reach, or that do not reach it, by what each of a quorum has said.

    >>> links_of("b", "abc", ("b", "", ""))
    ('a',)
    """
    links = [set(pair) for pair in _reports(replicas, said) if name in pair]
    return tuple(sorted(set[str]().union(*links) - {name}))


def _reports(replicas: Sequence[str], said: Sequence[Sequence[str]]) -> set[tuple[str, str]]:
    """Who has said of whom that it does not reach it."""
    return {(one, other) for one, names in zip(replicas, said, strict=False) for other in names}


def _left_out(quorum: QuorumFormed, reports: Collection[tuple[str, str]]) -> frozenset[str]:
    """Name replicas of a quorum such that none of the reports is about two of the others."""
    progress = dict(zip(quorum.replicas, zip(quorum.established, quorum.steps, strict=False), strict=False))
    out: set[str] = set()
    while cut := [(one, other) for one, other in reports if {one, other} <= progress.keys() - out]:
        links = Counter(name for link in {frozenset(report) for report in cut} for name in link)
        noticed = Counter(one for one, _ in cut)
        behind = {name: (not progress[name][0], -progress[name][1]) for name in links}
        out.add(max(links, key=lambda name: (behind[name], links[name], noticed[name], name)))
    return frozenset(out)
