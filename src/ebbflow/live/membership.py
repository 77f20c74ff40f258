"""Who takes part in a step and whose state counts: the membership protocol as a state machine without I/O.

`Membership.handle` takes an event and returns the instructions that follow from it. Nothing in this module waits, opens
a connection, reads a clock or draws a random number: times, names and what other replicas said are fields of events
(`membership_events.py`). `connection.py` executes the instructions and reports what came of them as further events.

    register    start torchft's manager server; from now on the lighthouse waits for this replica
    ask         request a quorum from the lighthouse: the replicas of the next steps
    handshake   every replica of the quorum tells the others its job and its replica state
    connect     form the quorum group
    heal        replicas with another lineage receive the complete state of one that has the right one
    compute     the step; if it is committed, every participant extends its lineage in the same way

A replica that receives the state listens: it takes part in the sums of the steps that the others compute meanwhile, and
applies them when it has the state. As long as somebody listens, the group goes on without asking the lighthouse. If the
group fails or a replica leaves it, the listeners begin anew: they never have a part of a state.

If anything fails on the way, the connections are dropped and the lighthouse is asked again. After two failures in a
row, replicas find out whom they do not reach, at all or except at its store, and tell each other through the
lighthouse; one side of a cut link then stops its heartbeats until it reaches the other again, and the rest go on
(`out_of_reach`). If it fails all the same, they end with what the backend said (`repeated_failures.py`). If all
replicas of the next quorum are still connected in the same quorum group, it stays. A replica that leaves says so in its
last step, and the others form the next quorum group among themselves at once: the lighthouse would wait until the
leaver's heartbeat times out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ebbflow.live.agreement import (
    Agreement,
    agree,
    describe_difference,
    extend_lineage,
    group_key,
    links_of,
    meeting_key,
    out_of_reach,
    without_heartbeat,
)
from ebbflow.live.membership_events import (
    AskLighthouse,
    CheckHeartbeats,
    CheckLinks,
    CheckpointLoaded,
    ComputeStep,
    Connect,
    ConnectionFailed,
    DropConnections,
    GiveUp,
    GroupConnected,
    Handshake,
    HandshakeFailed,
    HandshakesReceived,
    HeartbeatsReceived,
    Instruction,
    KeptPart,
    LeaveFleet,
    LighthouseUnreachable,
    LighthouseWanted,
    LinksChecked,
    LoadCheckpoint,
    MembershipEvent,
    NoNewerCheckpoint,
    PeerAsksAgain,
    PublishedGroup,
    PublishGroup,
    QuorumFormed,
    ReceiveState,
    RecordEvent,
    Refuse,
    Register,
    Registered,
    ReplicaState,
    SendHandshake,
    SendState,
    Started,
    StateReceived,
    StateSent,
    StepCommitted,
    StepFailed,
    StepRequested,
    TellPeers,
    Tick,
    ToldToLeave,
    Unregister,
    WeightsDiffer,
)
from ebbflow.live.objections import Objections
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S
from ebbflow.live.repeated_failures import RepeatedFailures

__all__ = ["Membership", "MembershipPhase", "QuorumGroup", "answer_holds"]

_RETRY_PAUSE_S = 0.2  # before an unreachable lighthouse is tried again
_OBJECTION_PAUSE_S = 0.1  # before the lighthouse is asked for a better quorum, or after several failures
_TOO_FEW_PAUSE_S = 1.0  # before the lighthouse is asked for a larger one
_MAX_FOREIGN = 3  # attempts with another secret, before a replica that never met one with its own gives up
_MAX_FAILURES = 2  # in a row, before a replica looks for peers that it does not reach
_LEFT_OUT_S = 5.0  # between two attempts of a replica that was left out to reach its peers
_FIRST_CONTACT_S = 2.0  # after which a replica that waits for a quorum looks whether the lighthouse still answers
_CONTACT_EVERY_S = 5.0  # between two such looks
_HELD_UP_S = 5.0  # in a step that then fails: the lighthouse lets the others wait about twice as long
_EXPLAIN_AFTER_S = 10.0  # for which a replica waits for the others without a word
_ANSWER_HOLDS_S = 10.0  # if it was asked for before the step began: others that it names wait for a handshake as long
_ALONE_HOLDS_S = 1.0  # the same, if it names nobody else


def _explain_wait(here: Sequence[str], min_replicas: int) -> str:
    """Say what a replica waits for that has asked for a quorum, by the replicas that send heartbeats."""
    names = ", ".join(name.partition(":")[0] for name in here)
    if not here:
        return "the lighthouse does not answer"
    if len(here) < min_replicas:
        return f"{len(here)} of at least {min_replicas} replicas (--min-replicas) are here: {names}"
    return (
        f"the lighthouse forms no quorum of the replicas that are here ({names}); it waits for more (--min-replicas of "
        f"the lighthouse), or for one of them that is late"
    )


def _explain_blocked(names: Sequence[str]) -> str:
    """Say what is wrong with replicas that are reached at their stores only."""
    return f"connections with {', '.join(names)} fail, except to the stores, while gradients need any port that is free"


class MembershipPhase(Enum):
    """What this replica is doing."""

    IDLE = auto()  # between two steps, or before the first one
    REGISTERING = auto()
    PROBING = auto()  # which peers can be reached, after several failures
    LEFT_OUT = auto()  # until the peers can be reached again; the lighthouse does not know of this replica
    ASKING = auto()  # for a quorum
    CHECKING = auto()  # whether replicas that the quorum lacks still send heartbeats
    HANDSHAKE = auto()
    CONNECTING = auto()
    LOADING = auto()  # a checkpoint, if one is further than all replicas
    HEALING = auto()  # sending or receiving the state
    COMPUTING = auto()
    LEFT = auto()
    REFUSED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumGroup:
    """Replicas that compute together, or are about to."""

    key: str
    """A name for this group: no other group, not even one of the same replicas, ever has it. Until the handshakes are
    there it is empty."""
    rendezvous: str
    names: tuple[str, ...]
    rank: int
    stores: tuple[str, ...] = ()
    """HOST:PORT of the store of each replica."""


def answer_holds(answer: MembershipEvent | None, *, asked: float, now: float) -> bool:
    """Whether the answer of the lighthouse to a question that was asked before the step began may still be used.

    `answer` is None if it has not come yet. One that names nobody else is soon asked for again: nobody waits for this
    replica, and a lighthouse that was restarted since would know nothing of its state while it computes the step.
    """
    if isinstance(answer, QuorumFormed) and len(answer.replicas) == 1:
        return now - answer.now < _ALONE_HOLDS_S
    return now - asked < _ANSWER_HOLDS_S


class Membership:
    """The membership protocol of one replica."""

    def __init__(
        self,
        job: Mapping[str, str],
        *,
        min_replicas: int = 1,
        heartbeat_timeout_s: float = 0.8,
        connect_timeout_s: float = 10.0,
    ) -> None:
        """`job`: what must be the same for all replicas. `min_replicas`: fewer do not train. `heartbeat_timeout_s`: the
        lighthouse's; a replica whose last heartbeat is older is dead. `connect_timeout_s`: how long the handshake may
        take, and how long a replica that was told to leave waits for the others of its last step."""
        self.job = dict(job)
        self.min_replicas = min_replicas
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.phase = MembershipPhase.IDLE
        self.state = ReplicaState(step=0, lineage=0)
        self.name = self.store = ""  # not registered
        self.group: QuorumGroup | None = None
        self._forming: QuorumGroup | None = None
        self._agreement: Agreement | None = None
        self._own_kept: KeptPart | None = None
        self._kept: tuple[KeptPart | None, ...] = ()  # of the replicas of the group that forms, for its first step
        self._step_requested = False
        self._told_to_leave = False
        self._attempt = 0  # requests for a quorum
        self._attempts: Mapping[str, int] = {}  # of the replicas of the quorum, of which it was formed
        self.listening: frozenset[int] = frozenset()
        """Ranks of the group that do not have its state yet."""
        self._independent_since: float | None = None  # the group goes on without asking the lighthouse
        self.objections = Objections(heartbeat_timeout_s=heartbeat_timeout_s, patience_s=2 * connect_timeout_s)
        """What this replica knows that speaks against a quorum."""
        self._contact_lost = False  # the lighthouse did not answer while a quorum was waited for
        self._next_contact_check: float | None = None
        self._reconnect = False  # the connection to the lighthouse is dead, although nothing has failed
        self._explains = False
        self._wait_for_others_until = 0.0
        self._handshake_deadline = 0.0
        self._next_heartbeat_check = 0.0
        self._repeated = RepeatedFailures()
        self._failures = 0  # of steps and of groups, since the last committed step
        self._suspects: tuple[str, ...] = ()  # peers that are to be tried before the lighthouse is asked
        self._unreachable: tuple[str, ...] = ()  # those of them that did not answer
        self._blocked: tuple[str, ...] = ()  # those of them that are reached at their stores only
        self._others_went_on = False  # without this replica, or may have, since its last committed step
        self._held_up_with: frozenset[str] = frozenset()
        """The replicas of a step that failed late: those of them that are gone by then may have gone on, too."""
        self._met_others = False  # has exchanged handshakes, so that its secret is that of the fleet
        self._foreign = 0  # attempts that failed because another replica has another secret
        self._reported = ""
        self._waiting_since = 0.0
        self._explained = False  # why this replica waits

    def handle(self, event: MembershipEvent) -> list[Instruction]:
        """Take an event and return what is to be done, in this order. An event that cannot happen now is an error."""
        handler, phases = _HANDLERS[type(event)]
        if self.phase not in phases:
            raise RuntimeError(f"{event} cannot happen in phase {self.phase.name}")
        return handler(self, event)

    def wants_lighthouse(self, now: float) -> bool:
        """Whether a group that goes on by itself should ask the lighthouse again, since that has forgotten the leaver.

        Clocks differ between replicas, so the participants tell each other and all return as soon as one wants to.
        """
        forgotten_after_s = self.heartbeat_timeout_s + 2 * HEARTBEAT_INTERVAL_S
        return self._independent_since is not None and now - self._independent_since > forgotten_after_s

    # From the request for a step to a quorum --------------------------------------------------------------------------

    def _on_started(self, event: Started) -> list[Instruction]:
        self._waiting_since = event.now
        return [] if self.name else self._register()

    def _on_step_requested(self, event: StepRequested) -> list[Instruction]:
        self.state = dataclasses.replace(self.state, step=event.step, lineage=event.lineage)
        self._own_kept = event.kept
        self._step_requested = True
        self._reported = ""
        if self.name or not self._explained:
            self._waiting_since, self._explained = event.now, False
        # A replica that is told to leave takes part in one more step, in which it says so. If it is alone, or the
        # others do not come, it just leaves.
        self._wait_for_others_until = event.now + (self.connect_timeout_s if self.group is not None else 0.0)
        if not event.registered:
            self._others_went_on = True
            self.name = self.store = ""
            return [Unregister(), *self._fail("the others went on without this replica, which kept them waiting")]
        if self.group is not None and (self._independent_since is not None or self.listening):
            return self._compute()
        return self._begin()

    def _register(self, after_s: float = 0.0) -> list[Instruction]:
        self.phase = MembershipPhase.REGISTERING
        return [Register(after_s=after_s)]

    def _begin(self, after_s: float = 0.0) -> list[Instruction]:
        """Begin an attempt to form a quorum group, or to go on with the one that is connected."""
        if not self.name:
            return self._register(after_s)
        if self._suspects:
            names, self._suspects = self._suspects, ()
            self.phase = MembershipPhase.PROBING
            return [CheckLinks(names=names)]
        self._attempt += 1
        self.phase = MembershipPhase.ASKING
        self._contact_lost, self._next_contact_check = False, None
        reconnect, self._reconnect = self._reconnect, False
        return [self._question(self._attempt, reconnect=reconnect, after_s=after_s)]

    def _question(self, attempt: int, *, reconnect: bool = False, after_s: float = 0.0) -> AskLighthouse:
        return AskLighthouse(
            step=self.state.step,
            group=self.group.key if self.group is not None else "",
            established=self.state.established,
            unreachable=self._unreachable,
            blocked=self._blocked,
            hopeless=self._repeated.hopeless,
            attempt=attempt,
            reconnect=reconnect,
            after_s=after_s,
        )

    @property
    def next_question(self) -> AskLighthouse | None:
        """What the lighthouse can be asked right after a committed step, since the next step will ask just this.

        None unless this replica trains alone. Replicas that train together must all use one answer, or none of them,
        and how much time passes before the next step differs between them.
        """
        alone = self.phase is MembershipPhase.IDLE and self.group is not None and len(self.group.names) == 1
        asks = alone and bool(self.name) and self._independent_since is None and not self._told_to_leave
        return self._question(self._attempt + 1) if asks and not self._reconnect else None

    def _on_links_checked(self, event: LinksChecked) -> list[Instruction]:
        if self.phase is MembershipPhase.PROBING:
            self._unreachable, self._blocked = event.unreachable, event.blocked
            if event.unreachable:
                self._repeated.forget()
            return self._begin(self._repeated.pause_s or _OBJECTION_PAUSE_S)
        if names := event.unreachable + event.blocked:
            return [CheckLinks(names=names, after_s=_LEFT_OUT_S)]
        return self._register()

    def _leave_out(self, names: Collection[str], quorum: QuorumFormed) -> list[Instruction]:
        """Go on without replicas that others do not reach; if this is one of them, wait until it reaches those."""
        if self.name not in names:
            reason = f"{', '.join(sorted(names))}: left out, since not every other replica can be reached from there"
            return self._fail(reason, _OBJECTION_PAUSE_S)
        cut = links_of(self.name, quorum.replicas, quorum.unreachable)
        blocked = links_of(self.name, quorum.replicas, quorum.blocked)
        reasons = []
        if cut:
            reasons.append(f"{', '.join(cut)} cannot be reached from here, although both sides reach the lighthouse")
        if blocked:
            reasons.append(f"{_explain_blocked(blocked)}: look for a firewall between the two")
        dropped = self._drop()
        self.name = self.store = ""
        self._failures, self._unreachable, self._blocked = 0, (), ()
        self._others_went_on = True
        self.phase = MembershipPhase.LEFT_OUT
        told = f"left out of the fleet while {'; '.join(reasons)}. Tried again every {_LEFT_OUT_S:g} s"
        check = CheckLinks(names=tuple(dict.fromkeys(cut + blocked)), after_s=_LEFT_OUT_S)
        return [RecordEvent("waiting", told), *dropped, Unregister(), check]

    def _on_registered(self, event: Registered) -> list[Instruction]:
        self.name, self.store = event.name, event.store
        self.objections.watch.reached(event.now)
        if self._step_requested:
            return self._begin()
        self.phase = MembershipPhase.IDLE
        return []

    def _on_lighthouse_unreachable(self, event: LighthouseUnreachable) -> list[Instruction]:
        self.objections.watch.reached(event.now)
        explained = [RecordEvent("waiting", event.reason)] if self._explanation_due(event.now) else []
        if not self._step_requested:
            self.phase = MembershipPhase.IDLE  # the first step tries again
            return [*explained]
        if leave := self._leave_if_due(event.now):
            return leave
        # The quorum group has nothing to do with it, and stays connected.
        return [*explained, *self._record_loss(event.reason), *self._begin(_RETRY_PAUSE_S)]

    def _explanation_due(self, now: float) -> bool:
        """Whether it is time to say what this replica waits for; once per step."""
        due = not self._explained and now - self._waiting_since >= _EXPLAIN_AFTER_S
        self._explained = self._explained or due
        return due

    def _on_told_to_leave(self, event: ToldToLeave) -> list[Instruction]:
        self._told_to_leave = True
        if self.phase is MembershipPhase.REGISTERING and not self._step_requested:
            self.phase = MembershipPhase.IDLE  # the first step leaves
        return self._on_time(event)

    @property
    def waits_for_quorum(self) -> bool:
        """Whether this replica waits for a quorum, without end if none is formed; told to leave, it leaves."""
        return self.phase in (MembershipPhase.ASKING, MembershipPhase.REGISTERING, MembershipPhase.LEFT_OUT)

    def _leave_if_due(self, now: float) -> list[Instruction]:
        if not self.waits_for_quorum or not self._told_to_leave:
            return []
        if self.phase is MembershipPhase.ASKING and now < self._wait_for_others_until:
            return []
        self.phase = MembershipPhase.LEFT
        return [LeaveFleet(save_state=self.state.established)]

    def _on_time(self, event: MembershipEvent) -> list[Instruction]:
        if leave := self._leave_if_due(event.now):
            return leave
        if self.phase is MembershipPhase.ASKING:
            self._explains = self._explanation_due(event.now)
            if self._next_contact_check is None:
                self._next_contact_check = event.now + _FIRST_CONTACT_S
            if self._explains or event.now >= self._next_contact_check:
                self._next_contact_check = event.now + _CONTACT_EVERY_S
                return [CheckHeartbeats(connection=True)]
        if self.phase in (MembershipPhase.HANDSHAKE, MembershipPhase.CONNECTING):
            if event.now > self._next_heartbeat_check:
                self._next_heartbeat_check = event.now + self.heartbeat_timeout_s / 2
                return [CheckHeartbeats()]
            if self.phase is MembershipPhase.HANDSHAKE and event.now > self._handshake_deadline:
                reason = f"not every replica sent its handshake within {self.connect_timeout_s:g} s"
                return self._fail_with_peers(reason)
        return []

    def _on_quorum_formed(self, event: QuorumFormed) -> list[Instruction]:
        group = self.group
        if group is not None and event.replicas == group.names and set(event.groups) == {group.key}:
            return self._compute()
        if names := out_of_reach(event, self.min_replicas):
            self._repeated.forget()
            return self._leave_out(names, event)
        if self._repeated.ends_with(event.replicas, event.hopeless):
            return self._give_up()
        if len(event.replicas) < self.min_replicas:
            reason = f"{len(event.replicas)} replicas are here, and {self.min_replicas} are needed"
            return self._fail(reason, _TOO_FEW_PAUSE_S)
        self._attempts = dict(zip(event.replicas, event.attempts, strict=False))
        self._forming = QuorumGroup(
            key="",
            rendezvous=f"{event.store}/ebbflow/{event.quorum_id}-{meeting_key(event.replicas)}",
            names=event.replicas,
            rank=event.rank,
        )
        self.objections.consider(event)
        if self.objections.looks:
            self.phase = MembershipPhase.CHECKING
            return [CheckHeartbeats(besides=event.replicas if self.objections.asks else ())]
        return self._send_handshake(event.now, objects=False)

    # From a quorum to a connected group -------------------------------------------------------------------------------

    def _on_heartbeats_received(self, event: HeartbeatsReceived) -> list[Instruction]:
        if event.ages:
            about_quorum = self.phase is MembershipPhase.CHECKING
            self.objections.watch.answered(event.now, about_quorum=about_quorum, ages=event.ages)
        else:
            self.objections.watch.lost()
        if self.phase is MembershipPhase.ASKING:
            if not event.connected:
                # Those who have the answer may compute already, and wait for this replica: without its connections
                # they ask again, too.
                self._reconnect = True
                peers = tuple(sorted(event.quorum - {self.name})) if self.name in event.quorum else ()
                told = [TellPeers(names=peers, attempt=self._attempt)] if peers else []
                return [*told, *self._fail("the lighthouse answers, but not over the connection on which it was asked")]
            if self._contact_lost and event.ages:  # it is back, perhaps as another one that knows of no request
                self._contact_lost = False
                return self._begin()
            self._contact_lost = not event.ages
            if not self._explains:
                return []
            dead = without_heartbeat(event.ages, event.ages, self.heartbeat_timeout_s)
            here = sorted(event.ages.keys() - dead)
            return [RecordEvent("waiting", _explain_wait(here, self.min_replicas))]
        assert self._forming is not None
        if self.phase is MembershipPhase.CHECKING:
            return self._send_handshake(event.now, objects=self.objections.objects(event))
        dead = without_heartbeat(self._forming.names, event.ages, self.heartbeat_timeout_s)
        return self._fail(f"no heartbeat of {', '.join(dead)}") if dead else []

    def _send_handshake(self, now: float, *, objects: bool) -> list[Instruction]:
        assert self._forming is not None
        self.phase = MembershipPhase.HANDSHAKE
        self._handshake_deadline = now + self.connect_timeout_s
        self._next_heartbeat_check = now + self.heartbeat_timeout_s
        own = Handshake(
            name=self.name,
            store=self.store,
            state=self.state,
            job=self.job,
            objects=objects,
            attempt=self._attempt,
            kept=self._own_kept,
        )
        return [
            self._publish(self._forming),  # before this replica can commit anything in it
            SendHandshake(
                rendezvous=self._forming.rendezvous,
                names=self._forming.names,
                rank=self._forming.rank,
                handshake=own,
            ),
        ]

    def _publish(self, group: QuorumGroup) -> Instruction:
        return PublishGroup(PublishedGroup(names=group.names, established=self.state.established, step=self.state.step))

    def _on_handshakes_received(self, event: HandshakesReceived) -> list[Instruction]:
        assert self._forming is not None
        self._met_others = self._met_others or len(event.handshakes) > 1
        self.objections.meet(event.handshakes)
        if any(handshake.objects for handshake in event.handshakes):
            self.objections.objected(event.now)
            reason = "a replica that the lighthouse has left out sends heartbeats and may still be training"
            explained = [RecordEvent("waiting", reason)] if self._explanation_due(event.now) else []
            # The same pause for all, so that they ask again at the same time.
            return [*explained, *self._begin(_OBJECTION_PAUSE_S)]
        self._agreement = agree(event.handshakes)
        if self._forming.rank in self._agreement.incompatible:
            self.name = self.store = ""
            self.phase = MembershipPhase.REFUSED
            return [Unregister(), Refuse(describe_difference(self.job, self._agreement.job))]
        if self._agreement.incompatible:
            refused = ", ".join(event.handshakes[rank].name for rank in sorted(self._agreement.incompatible))
            return self._fail(f"incompatible replicas were refused: {refused}")
        # A part of a step that follows another state than the one that counts is worth nothing.
        kept = [
            None if rank in self._agreement.transfers else handshake.kept
            for rank, handshake in enumerate(event.handshakes)
        ]
        self._kept = tuple(kept) if any(kept) else ()
        key = group_key(event.handshakes)
        address = self._forming.rendezvous.partition("/")[0]
        stores = tuple(handshake.store for handshake in event.handshakes)
        group = dataclasses.replace(self._forming, key=key, rendezvous=f"{address}/ebbflow/{key}", stores=stores)
        return self._connect(group, event.now)

    def _connect(self, group: QuorumGroup, now: float) -> list[Instruction]:
        self._forming = group
        self.phase = MembershipPhase.CONNECTING
        self._next_heartbeat_check = now + self.heartbeat_timeout_s
        return [*self._drop(), Connect(rendezvous=group.rendezvous, names=group.names, rank=group.rank)]

    def _on_group_connected(self, event: GroupConnected) -> list[Instruction]:
        assert self._forming is not None
        self.group = self._forming
        if not self._step_requested:  # the group goes on without those who left
            self._independent_since = event.now
            self.phase = MembershipPhase.IDLE
            return [RecordEvent("members", " ".join(self.group.names))]
        assert self._agreement is not None
        # Those who went on without this replica may have finished or left meanwhile, and so may those who had come
        # further, before their state was here: then they have left nothing but a checkpoint.
        went_on = self._others_went_on or not self._held_up_with <= {*self.group.names}
        they_are_gone = went_on and self.group.rank not in self._agreement.transfers
        if they_are_gone or self.objections.met_further or not self._agreement.established:
            self.phase = MembershipPhase.LOADING
            return [LoadCheckpoint()]
        return self._heal()

    # From a connected group to a step ---------------------------------------------------------------------------------

    def _on_checkpoint_loaded(self, event: CheckpointLoaded) -> list[Instruction]:
        self.state = dataclasses.replace(self.state, step=event.step, lineage=event.lineage)
        self._own_kept = None
        return self._fail("a checkpoint is further than all replicas")

    def _on_no_newer_checkpoint(self, event: NoNewerCheckpoint) -> list[Instruction]:
        return self._heal()

    def _heal(self) -> list[Instruction]:
        assert self.group is not None and self._agreement is not None
        self.phase = MembershipPhase.HEALING
        transfers = self._agreement.transfers
        self.listening = frozenset(transfers)
        if (source := transfers.get(self.group.rank)) is not None:
            # Where few have the state, they do not go on alone: their steps would be lost with them.
            return [ReceiveState(source, listen=2 * len(transfers) <= len(self.group.names))]
        if receivers := tuple(rank for rank, sender in transfers.items() if sender == self.group.rank):
            return [SendState(receivers)]
        return self._compute_with_new_group()

    def _on_state_received(self, event: StateReceived) -> list[Instruction]:
        assert self.group is not None and self._agreement is not None
        self.state = ReplicaState(step=event.step, lineage=event.lineage)
        self._own_kept = None
        sender = self.group.names[self._agreement.transfers[self.group.rank]]
        return [RecordEvent("received", f"{event.size} bytes from {sender}"), *self._compute_with_new_group()]

    def _on_state_sent(self, event: StateSent) -> list[Instruction]:
        return self._compute_with_new_group()

    def _compute_with_new_group(self) -> list[Instruction]:
        """Compute the first step of a group, of which some replicas may have a part and others not even the state."""
        assert self.group is not None and self._agreement is not None
        return [
            RecordEvent("members", " ".join(self.group.names)),
            *self._compute(kept=self._kept),
        ]

    def _compute(self, *, kept: tuple[KeptPart | None, ...] = ()) -> list[Instruction]:
        group = self.group
        assert group is not None
        self.phase = MembershipPhase.COMPUTING
        self._step_requested = False
        self._reported = ""
        step = ComputeStep(
            step=self.state.step, participants=group.names, rank=group.rank, kept=kept, receiving=self.listening
        )
        return [step]

    # After a step -----------------------------------------------------------------------------------------------------

    def _on_step_committed(self, event: StepCommitted) -> list[Instruction]:
        group = self.group
        assert group is not None
        self.phase = MembershipPhase.IDLE
        self.objections.committed(group.names)
        self._failures = 0
        self._others_went_on, self._held_up_with = False, frozenset()
        self._repeated.forget()
        self._suspects = self._unreachable = self._blocked = ()
        self.state = ReplicaState(
            step=self.state.step + 1,
            lineage=extend_lineage(self.state.lineage, event.assignment, group.key),
            established=True,
        )
        if event.lighthouse_wanted:
            self._independent_since = None
        self.listening -= event.arrived
        if not event.leaving:
            return [self._publish(group)]
        holders = [rank for rank in range(len(group.names)) if rank not in self.listening]
        stay = [rank for rank in holders if rank not in event.leaving]
        if group.rank in event.leaving:
            self.phase = MembershipPhase.LEFT
            return [LeaveFleet(save_state=not stay and group.rank == holders[0])]
        if group.rank not in stay:
            self._others_went_on = True
            return self._fail("a replica left the group while this one listened to its steps")
        return self._continue_without(group, stay, event)

    def _continue_without(self, group: QuorumGroup, stay: Sequence[int], event: StepCommitted) -> list[Instruction]:
        """Form the next group at once with those who stay and have the state. All participants know who leaves, so all
        do the same; those who listen come back through the lighthouse."""
        if len(stay) < self.min_replicas:
            return self._fail(f"{len(stay)} replicas are left, and {self.min_replicas} are needed")
        names = tuple(group.names[rank] for rank in stay)
        self.objections.participants = names
        stores = tuple(group.stores[rank] for rank in stay)
        following = QuorumGroup(
            key=f"{group.key}+",  # no group has two successors
            rendezvous=f"{stores[0]}/ebbflow/{group.key}+",
            names=names,
            rank=stay.index(group.rank),
            stores=stores,
        )
        return [self._publish(following), *self._connect(following, event.now)]

    def _on_weights_differ(self, event: WeightsDiffer) -> list[Instruction]:
        # It is no longer established, so that its state does not count; the training loop gives it another lineage, so
        # that it receives that of the others.
        self.state = dataclasses.replace(self.state, established=False)
        return []

    def _on_lighthouse_wanted(self, event: LighthouseWanted) -> list[Instruction]:
        self._independent_since = None
        return []

    # When something fails ---------------------------------------------------------------------------------------------

    def _on_handshake_failed(self, event: HandshakeFailed) -> list[Instruction]:
        if not event.foreign:
            return self._fail_with_peers(event.reason)
        # Whoever can reach the lighthouse can take a place in a quorum without knowing the secret. It must not end
        # those that do know it.
        self._foreign += not self._met_others
        if self._foreign < _MAX_FOREIGN:
            return self._fail(event.reason, _OBJECTION_PAUSE_S)
        self.name = self.store = ""
        self.phase = MembershipPhase.REFUSED
        difference = "its secret (EBBFLOW_SECRET, or the file secret in the folder of the job) is not that of the fleet"
        return [Unregister(), Refuse(difference)]

    def _on_peer_asks_again(self, event: PeerAsksAgain) -> list[Instruction]:
        if event.attempt < self._attempts.get(event.name, 0):
            return []  # it lacked the answer to an earlier one
        return self._fail(f"{event.name} does not have the answer of the lighthouse, and asks again")

    def _on_failure(self, event: ConnectionFailed | StepFailed) -> list[Instruction]:
        # Handshakes that fail are not counted: whoever knows no secret could let them fail, and must not end the fleet.
        group = self.group or self._forming
        explained: list[Instruction] = []
        if group is not None:
            if event.now - self._waiting_since > _HELD_UP_S:
                self._held_up_with = frozenset(group.names)
            self._repeated.add(group.names, event.reason, event.now, backend=event.backend)
            if self._repeated.explanation_due:
                reason = f"it fails again and again with the same replicas, which are all here: {event.reason}"
                explained = [RecordEvent("waiting", reason)]
        return [*explained, *self._fail_with_peers(event.reason)]

    def _give_up(self) -> list[Instruction]:
        dropped = self._drop()
        self.name = self.store = ""
        self.phase = MembershipPhase.REFUSED
        found = f"; {_explain_blocked(self._blocked)}" if self._blocked else ""
        return [*dropped, Unregister(), GiveUp(self._repeated.reason + found)]

    def _fail_with_peers(self, reason: str, pause_s: float = 0.0) -> list[Instruction]:
        """Give the group up because of its peers. When that happens again, one of them may be out of reach."""
        group = self.group or self._forming
        self._failures += 1
        if group is not None and self._failures >= _MAX_FAILURES:
            self._suspects = tuple(name for name in group.names if name != self.name)
        return self._fail(reason, pause_s)

    def _fail(self, reason: str, pause_s: float = 0.0) -> list[Instruction]:
        """Give the group up, and begin again if a step is requested."""
        recorded = self._record_loss(reason)
        self._independent_since = None
        self._wait_for_others_until = 0.0
        dropped = self._drop()
        if not self._step_requested:
            self.phase = MembershipPhase.IDLE
            return [*recorded, *dropped]
        return [*recorded, *dropped, *self._begin(pause_s)]

    def _record_loss(self, reason: str) -> list[Instruction]:
        # A lighthouse that is away for hours is one event in the record.
        recorded = [RecordEvent("lost", reason)] if reason != self._reported else []
        self._reported = reason
        return [*recorded]

    def _drop(self) -> list[Instruction]:
        self.listening = frozenset()
        if self.group is None:
            return []
        self.group = None
        return [DropConnections()]


_Handler = tuple[Callable[[Membership, Any], list[Instruction]], Collection[MembershipPhase]]
_HANDLERS: Mapping[type[MembershipEvent], _Handler] = {
    Started: (Membership._on_started, {MembershipPhase.IDLE}),
    StepRequested: (Membership._on_step_requested, {MembershipPhase.IDLE, MembershipPhase.COMPUTING}),
    Registered: (Membership._on_registered, {MembershipPhase.REGISTERING}),
    LighthouseUnreachable: (
        Membership._on_lighthouse_unreachable,
        {MembershipPhase.REGISTERING, MembershipPhase.ASKING},
    ),
    LinksChecked: (Membership._on_links_checked, {MembershipPhase.PROBING, MembershipPhase.LEFT_OUT}),
    QuorumFormed: (Membership._on_quorum_formed, {MembershipPhase.ASKING}),
    HeartbeatsReceived: (
        Membership._on_heartbeats_received,
        {MembershipPhase.ASKING, MembershipPhase.CHECKING, MembershipPhase.HANDSHAKE, MembershipPhase.CONNECTING},
    ),
    HandshakesReceived: (Membership._on_handshakes_received, {MembershipPhase.HANDSHAKE}),
    HandshakeFailed: (Membership._on_handshake_failed, {MembershipPhase.HANDSHAKE}),
    PeerAsksAgain: (Membership._on_peer_asks_again, {MembershipPhase.HANDSHAKE}),
    GroupConnected: (Membership._on_group_connected, {MembershipPhase.CONNECTING}),
    ConnectionFailed: (Membership._on_failure, {MembershipPhase.CONNECTING, MembershipPhase.HEALING}),
    CheckpointLoaded: (Membership._on_checkpoint_loaded, {MembershipPhase.LOADING}),
    NoNewerCheckpoint: (Membership._on_no_newer_checkpoint, {MembershipPhase.LOADING}),
    StateReceived: (Membership._on_state_received, {MembershipPhase.HEALING}),
    StateSent: (Membership._on_state_sent, {MembershipPhase.HEALING}),
    StepCommitted: (Membership._on_step_committed, {MembershipPhase.COMPUTING}),
    StepFailed: (Membership._on_failure, {MembershipPhase.COMPUTING}),
    WeightsDiffer: (Membership._on_weights_differ, {MembershipPhase.COMPUTING}),
    LighthouseWanted: (Membership._on_lighthouse_wanted, {MembershipPhase.IDLE, MembershipPhase.COMPUTING}),
    ToldToLeave: (Membership._on_told_to_leave, frozenset(MembershipPhase)),
    Tick: (Membership._on_time, frozenset(MembershipPhase)),
}
"""What handles each event, and the phases in which it can happen."""
