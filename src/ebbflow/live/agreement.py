"""Who may take part, and whose state counts: decided by every replica alone, from the same greetings.

Before replicas compute together each says who it is (`Hello`): its job, how far it has come and along which line of
steps. `settle` is a pure function of the greetings, so all come to the same answer without a further message:

* A *stranger*, a replica of another job, model, seed or version, is refused; the others go on without it.
* The *state that counts* is that of the replica which has come furthest among those that have trained in this fleet;
  only if there is none, as at the start or after the loss of the whole fleet, among all. Every other line of steps is
  given up: its replicas get the state, and with it the position in the data.

A *lineage* is a number for the whole history of a state: the initial weights and every step committed since. Two
replicas with the same lineage have the same state, bit for bit; a replica that committed a step which the others did
not has another one, even when its step number is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ebbflow.data.ledger import Assignment

__all__ = ["Hello", "Settlement", "Standing", "extend", "root", "settle", "strangeness"]

_BITS = 48  # a double, and so any reader of JSON, holds such a number exactly


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far a replica has come."""

    step: int
    """Steps committed."""
    lineage: int
    established: bool = False
    """Whether it has committed a step with this fleet since it started: its state is live, not from a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a replica says of itself before it takes part."""

    name: str
    """Unique for each start of a replica: r2:5f3a..."""
    store: str
    """HOST:PORT of its store, where others can meet without the lighthouse."""
    standing: Standing
    job: Mapping[str, str] = field(default_factory=dict)
    """What must be the same for all: job, version, model, seed, rule, ..."""
    objects: bool = False
    """Whether it misses somebody whose heart beats: then all ask the lighthouse again."""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """The inverse of `encode`; ValueError for anything else."""
        try:
            body = json.loads(text)
            standing = Standing(
                step=int(body["standing"]["step"]),
                lineage=int(body["standing"]["lineage"]),
                established=bool(body["standing"]["established"]),
            )
            job = {str(key): str(value) for key, value in body["job"].items()}
            return cls(
                name=str(body["name"]),
                store=str(body["store"]),
                standing=standing,
                job=job,
                objects=bool(body["objects"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a greeting of ebbflow: {error!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """What follows from the greetings; ranks are positions in their list."""

    strangers: frozenset[int]
    """Ranks that are refused. If there are any, nobody transfers anything: they leave, and the others meet again."""
    transfers: Mapping[int, int]
    """For each rank that needs the state: the rank that sends it."""
    job: Mapping[str, str]
    """What the fleet trains."""
    live: bool = True
    """Whether anybody has trained already. If not, a state on a disk may be further than all of them."""


def settle(hellos: Sequence[Hello]) -> Settlement:
    """Who may take part and whose state counts.

    >>> def hello(name, step, lineage, established):
    ...     return Hello(name=name, store="", standing=Standing(step=step, lineage=lineage, established=established))
    >>> settle([hello("a", 0, 5, False), hello("b", 7, 9, True), hello("c", 7, 9, True)]).transfers
    {0: 1}
    """
    if not hellos:
        raise ValueError("nobody is there to agree")
    live = [hello for hello in hellos if hello.standing.established]
    # Two started replicas that disagree have no fleet to be measured by: the larger party is it, or the first.
    parties = Counter(_key(hello) for hello in live or hellos)
    job = max((live or hellos), key=lambda hello: (hello.standing.step if live else 0, parties[_key(hello)])).job
    strangers = frozenset(rank for rank, hello in enumerate(hellos) if hello.job != job)
    own = [rank for rank in range(len(hellos)) if rank not in strangers]
    best = max(own, key=lambda rank: (hellos[rank].standing.established, hellos[rank].standing.step))
    lineage = hellos[best].standing.lineage
    donors = [rank for rank in own if hellos[rank].standing.lineage == lineage]
    needy = [rank for rank in own if hellos[rank].standing.lineage != lineage]
    transfers = {rank: donors[i % len(donors)] for i, rank in enumerate(needy)}
    return Settlement(strangers=strangers, transfers={} if strangers else transfers, job=job, live=bool(live))


def _key(hello: Hello) -> str:
    return json.dumps(sorted(hello.job.items()))


def strangeness(own: Mapping[str, str], fleet: Mapping[str, str]) -> str:
    """In which respects a replica is of another job, for the message that refuses it.

    >>> strangeness({"seed": "1", "rule": "linear"}, {"seed": "2", "rule": "linear"})
    "seed is '1' here and '2' in the fleet"
    """
    keys = [key for key in {**own, **fleet} if own.get(key) != fleet.get(key)]
    return "; ".join(f"{key} is {own.get(key)!r} here and {fleet.get(key)!r} in the fleet" for key in keys)


def root(weights: str) -> int:
    """The lineage of a state in which no step was committed, from a digest of its weights."""
    return _number("root", weights)


def extend(lineage: int, assignment: Assignment, circle: str) -> int:
    """The lineage after a step: of the state before it, its samples, and who computed it.

    `circle` names the replicas that computed together, and which of their meetings it was: a step that is repeated
    after a failure is another step.
    """
    return _number(lineage, assignment.epoch, assignment.start, assignment.stop, circle)


def _number(*parts: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[: _BITS // 8], "big")
