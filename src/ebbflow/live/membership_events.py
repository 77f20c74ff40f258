"""What the membership protocol takes and gives: handshakes of replicas, events, and instructions.

All of them are plain values. `membership.py` turns events into instructions; `connection.py` executes instructions and
reports events.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from ebbflow.data.ledger import Assignment

__all__ = [
    "AskLighthouse", "CheckHeartbeats", "CheckLinks", "CheckpointLoaded", "ComputeStep", "Connect", "ConnectionFailed",
    "DropConnections", "GiveUp", "GroupConnected", "Handshake", "HandshakeFailed", "HandshakesReceived",
    "HeartbeatsReceived", "Instruction", "KeptPart", "LeaveFleet", "LighthouseUnreachable", "LighthouseWanted",
    "LinksChecked", "LoadCheckpoint", "MembershipEvent", "NoNewerCheckpoint", "PeerAsksAgain", "PublishGroup",
    "PublishedGroup",
    "QuorumFormed", "ReceiveState", "RecordEvent", "Refuse", "Register", "Registered", "ReplicaState", "SendHandshake",
    "SendState", "Started", "StateReceived", "StateSent", "StepCommitted", "StepFailed", "StepRequested", "TellPeers",
    "Tick", "ToldToLeave", "Unregister", "WeightsDiffer",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """How far a replica has come."""

    step: int
    """Number of committed steps."""
    lineage: int
    """Hash chain over the initial weights and all committed steps. Equal lineages mean equal states, bit for bit; a
    replica that committed a step which the others did not has another lineage at the same step number."""
    established: bool = False
    """Whether it has committed a step with this fleet since it started: its state is live, not from a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPart:
    """What a replica has computed of a step that failed, and keeps for the next attempt at it."""

    workers: int
    samples: int
    """The size of the step, as the policy gave it."""
    micro_batches: tuple[int, ...]
    """Numbers of the micro-batches, counted from the beginning of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handshake:
    """What a replica tells the others of a quorum before they connect."""

    name: str
    """Name of the incarnation, such as r2:5f3a..."""
    store: str
    """HOST:PORT of its store, where others can connect without the lighthouse."""
    state: ReplicaState
    job: Mapping[str, str] = field(default_factory=dict)
    """What must be the same for all: job, versions, model, seed, rule, ..."""
    objects: bool = False
    """Whether this must not become a quorum group, because replicas that it lacks are alive: then all ask again."""
    attempt: int = 0
    """How often this replica had asked for a quorum. With the name, it distinguishes this handshake from all others."""
    kept: KeptPart | None = None
    """What it has computed of the step that follows this state, in an attempt that failed."""

    def encode(self) -> str:
        """Write it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Read what `encode` wrote; anything else is a ValueError."""
        try:
            body = json.loads(text)
            state = ReplicaState(
                step=int(body["state"]["step"]),
                lineage=int(body["state"]["lineage"]),
                established=bool(body["state"]["established"]),
            )
            kept = body["kept"]
            return cls(
                name=str(body["name"]),
                store=str(body["store"]),
                state=state,
                job={str(key): str(value) for key, value in body["job"].items()},
                objects=bool(body["objects"]),
                attempt=int(body["attempt"]),
                kept=kept
                and KeptPart(
                    workers=int(kept["workers"]),
                    samples=int(kept["samples"]),
                    micro_batches=tuple(int(number) for number in kept["micro_batches"]),
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a handshake of ebbflow: {error!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedGroup:
    """What a replica says of itself to those that form a quorum without it."""

    names: tuple[str, ...] = ()
    """Replicas of its last quorum group."""
    established: bool = False
    """Whether it has committed a step with this fleet since it started."""
    step: int = 0
    """Number of committed steps."""

    def encode(self) -> str:
        """Write it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Read what `encode` wrote; anything else is a ValueError."""
        try:
            body = json.loads(text)
            return cls(
                names=tuple(str(name) for name in body["names"]),
                established=bool(body["established"]),
                step=int(body["step"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a quorum group of ebbflow: {error!r}") from None


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipEvent:
    """Something that happened to this replica."""

    now: float
    """When it happened, in seconds of a monotonic clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(MembershipEvent):
    """The replica is ready to join the fleet; it may request its first step later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequested(MembershipEvent):
    """The training loop is ready for its next step."""

    step: int
    lineage: int
    kept: KeptPart | None = None
    """What it has computed of this step, in an attempt that failed."""
    registered: bool = True
    """False if its heartbeats were stopped, because it kept the others waiting for too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered(MembershipEvent):
    """The manager server runs."""

    name: str
    """Name of this replica at the lighthouse; no other incarnation ever has it."""
    store: str
    """HOST:PORT of the store of this replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseUnreachable(MembershipEvent):
    """Registering failed, or the lighthouse did not answer the request for a quorum."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumFormed(MembershipEvent):
    """The lighthouse answered the request for a quorum."""

    quorum_id: int
    """Number of the quorum. A lighthouse that was restarted begins again with 1, so nothing may depend on it alone."""
    replicas: tuple[str, ...]
    """Names by rank."""
    rank: int
    store: str
    """HOST:PORT of the store where the replicas of the quorum meet."""
    groups: tuple[str, ...]
    """By rank: the key of the quorum group in which the replica is still connected, or nothing."""
    established: tuple[bool, ...]
    """By rank: whether it has committed a step with this fleet since it started."""
    steps: tuple[int, ...] = ()
    """By rank: how many steps it has committed."""
    unreachable: tuple[tuple[str, ...], ...] = ()
    """By rank: the replicas that it does not reach, although they send heartbeats."""
    blocked: tuple[tuple[str, ...], ...] = ()
    """By rank: the replicas whose stores it reaches, but not their other ports (`LinksChecked`)."""
    hopeless: tuple[bool, ...] = ()
    """By rank: whether it is certain that it fails for ever with the replicas with which it failed last."""
    attempts: tuple[int, ...] = ()
    """By rank: the number of the request with which it takes part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatsReceived(MembershipEvent):
    """The lighthouse was asked about heartbeats."""

    ages: Mapping[str, float]
    """Seconds since the last heartbeat of each replica; empty if the lighthouse did not answer."""
    groups: Mapping[str, PublishedGroup | None] = field(default_factory=dict)
    """What each living replica that was asked for it has published; None if it did not answer."""
    quorum: frozenset[str] = frozenset()
    """The replicas of the last quorum, as far as the lighthouse was asked for it."""
    connected: bool = True
    """Whether the lighthouse also answered over the connection over which this replica waits for a quorum, if that was
    tried. If it did not, the request or the answer to it is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksChecked(MembershipEvent):
    """It was tried which replicas can be reached."""

    unreachable: tuple[str, ...]
    """Those whose store does not answer, and that still send heartbeats a heartbeat timeout later."""
    blocked: tuple[str, ...] = ()
    """Those whose store answers, while a connection fails, there or back, to a port like those of the backend: as with
    a firewall that knows the ports of the stores only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandshakesReceived(MembershipEvent):
    """The handshakes of all replicas of the quorum are there."""

    handshakes: tuple[Handshake, ...]
    """By rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandshakeFailed(MembershipEvent):
    """The store where the replicas meet cannot be used."""

    reason: str
    foreign: bool = False
    """Whether this replica and another one do not have the same secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAsksAgain(MembershipEvent):
    """A replica of the quorum says that it does not have the answer of the lighthouse to one of its requests."""

    name: str
    attempt: int
    """The number of this request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConnected(MembershipEvent):
    """The quorum group is connected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionFailed(MembershipEvent):
    """The quorum group could not be connected, or broke while the state was sent."""

    reason: str
    backend: bool = False
    """Whether the backend failed, for a reason that may have nothing to do with a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLoaded(MembershipEvent):
    """A checkpoint that is further than this replica was loaded."""

    step: int
    lineage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NoNewerCheckpoint(MembershipEvent):
    """No checkpoint is further than this replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateReceived(MembershipEvent):
    """The complete state of a peer was received and loaded.

    The peers may have committed steps since they had it. Their sums were heard, and are applied now: `ComputeStep`
    follows for each of them.
    """

    step: int
    lineage: int
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSent(MembershipEvent):
    """The state of this replica is on its way to all peers that need it; if one is lost, the step fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(MembershipEvent):
    """The sum of the step's gradients arrived here, so that the step counts on this replica."""

    assignment: Assignment
    leaving: frozenset[int] = frozenset()
    """Ranks that said in this step that they leave."""
    lighthouse_wanted: bool = False
    """Whether a participant wants to ask the lighthouse again (`Membership.wants_lighthouse`)."""
    arrived: frozenset[int] = frozenset()
    """Ranks that said in this step that they have the state now, and compute from the next step on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailed(MembershipEvent):
    """The sum of the step's gradients did not arrive here."""

    reason: str
    backend: bool = False
    """Whether the backend failed, for a reason that may have nothing to do with a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsDiffer(MembershipEvent):
    """The weights of this replica are not those of most participants, although their lineage is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseWanted(MembershipEvent):
    """The next step is to begin at the lighthouse, so that all replicas meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldToLeave(MembershipEvent):
    """This replica was told to leave the fleet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(MembershipEvent):
    """Time has passed while this replica waits for the lighthouse, for handshakes or for connections."""


# Instructions ---------------------------------------------------------------------------------------------------------


class Instruction:
    """Something to do. After an arrow, each instruction names the events with which its outcome is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Register(Instruction):
    """Start the manager server -> `Registered`, `LighthouseUnreachable`."""

    after_s: float = 0.0
    """How long to wait before."""


@dataclass(frozen=True, slots=True)
class Unregister(Instruction):
    """Stop the manager server, so that the lighthouse forgets this replica; it gets a new name when it registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskLighthouse(Instruction):
    """Request a quorum; meanwhile report `Tick` and `ToldToLeave` -> `QuorumFormed`, `LighthouseUnreachable`."""

    step: int
    group: str = ""
    """Key of the quorum group in which this replica is connected, or nothing."""
    established: bool = False
    unreachable: tuple[str, ...] = ()
    """Replicas that this one does not reach, although they send heartbeats."""
    blocked: tuple[str, ...] = ()
    """Replicas whose stores it reaches, but not their other ports."""
    hopeless: bool = False
    """Whether it is certain that it fails for ever with the replicas with which it failed last."""
    attempt: int = field(default=0, compare=False)
    """The number of this request. Two that differ in nothing else ask for the same."""
    reconnect: bool = False
    """Whether to ask over a new connection. The lighthouse counts a replica that asks twice once."""
    after_s: float = 0.0
    """How long to wait before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLinks(Instruction):
    """Try to reach the stores and other ports of these replicas -> `LinksChecked`.

    Meanwhile report `Tick` and `ToldToLeave`.
    """

    names: tuple[str, ...]
    after_s: float = 0.0
    """How long to wait before, as long as one of them sends heartbeats."""


@dataclass(frozen=True, slots=True)
class CheckHeartbeats(Instruction):
    """Ask the lighthouse about heartbeats -> `HeartbeatsReceived`."""

    besides: tuple[str, ...] = ()
    """If not empty: ask all living replicas except these for their quorum group, too."""
    connection: bool = False
    """Whether to ask for the last quorum, too, and, if there is an answer, to try the connection over which the next
    one is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellPeers(Instruction):
    """Tell these replicas, as far as they can be reached, that this one lacks the answer to one of its requests: they
    need not wait for its handshake (`PeerAsksAgain`)."""

    names: tuple[str, ...]
    attempt: int
    """The number of this request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendHandshake(Instruction):
    """Exchange handshakes; meanwhile report `Tick` and `PeerAsksAgain` -> `HandshakesReceived`, `HandshakeFailed`."""

    rendezvous: str
    """HOST:PORT/PREFIX of the store and of the keys in it."""
    names: tuple[str, ...]
    """Of the quorum, by rank."""
    rank: int
    handshake: Handshake


@dataclass(frozen=True, kw_only=True, slots=True)
class Connect(Instruction):
    """Connect the quorum group; meanwhile report `Tick` -> `GroupConnected`, `ConnectionFailed`."""

    rendezvous: str
    """HOST:PORT/PREFIX of the store and of the keys in it."""
    names: tuple[str, ...]
    """By rank."""
    rank: int


@dataclass(frozen=True, slots=True)
class PublishGroup(Instruction):
    """Tell whoever asks (`CheckHeartbeats`) in which quorum group this replica takes part in steps."""

    group: PublishedGroup


@dataclass(frozen=True, slots=True)
class DropConnections(Instruction):
    """Close the quorum group, so that no replica waits for this one any longer."""


@dataclass(frozen=True, slots=True)
class LoadCheckpoint(Instruction):
    """Load the newest checkpoint if it is further -> `CheckpointLoaded`, `NoNewerCheckpoint`."""


@dataclass(frozen=True, slots=True)
class SendState(Instruction):
    """Begin to send the complete state to these ranks, while the step is computed -> `StateSent`."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveState(Instruction):
    """Receive the complete state from a rank and load it -> `StateReceived`, `ConnectionFailed`.

    Meanwhile the others go on: this replica takes part in the sums of their steps, and keeps them.
    """

    source: int
    listen: bool = True
    """Whether it does that; else the others wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeStep(Instruction):
    """Compute this replica's part of a step with these participants -> `StepCommitted`, `StepFailed`."""

    step: int
    participants: tuple[str, ...]
    """Names by rank."""
    rank: int
    kept: tuple[KeptPart | None, ...] = ()
    """What each rank has computed of this step, in an attempt that failed; empty if none has anything."""
    receiving: frozenset[int] = frozenset()
    """Ranks that compute nothing, since the state is on its way to them, or has just come."""


@dataclass(frozen=True, slots=True)
class LeaveFleet(Instruction):
    """End the training loop of this replica."""

    save_state: bool
    """Whether to write a checkpoint first, because no other replica may have this state."""


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """End this replica with an error: it is incompatible with the fleet."""

    difference: str


@dataclass(frozen=True, slots=True)
class GiveUp(Instruction):
    """End this replica with an error: it fails again and again with the same replicas, which are all there."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordEvent(Instruction):
    """Write an event into the record of this replica."""

    what: str
    text: str
