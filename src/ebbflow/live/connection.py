"""The connection of one replica with its fleet: executes what the membership protocol asks for, and reports events.

No decision is made here. `Membership` (membership.py) says what is to be done; this module does it in the thread of the
training loop, with these parts:

    registration      heartbeats to the lighthouse, by torchft's manager server, and the store that others read
    link_probe        a port at which replicas try whether they reach each other
    fleet_questions   questions to the lighthouse and to the stores of others; background: threads that wait for answers
    rendezvous        handshakes, and connecting the process group
    peer_watch        whether this replica waits for its peers in vain, or they for it
    state_transfer    the state to replicas that need it; listening: the state from one that has it
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from ebbflow.data.ledger import Assignment
from ebbflow.engines.process_group import BackendFailed, Fault, PeerLost, ProcessGroup, no_fault
from ebbflow.engines.replica_ranks import ReplicaRanks, ReplicaSums
from ebbflow.errors import ConfigError, StorageUnreachable, UnreadableCheckpoints
from ebbflow.live import torchft_api
from ebbflow.live.background import BackgroundThreads
from ebbflow.live.fleet_questions import CONNECTED_KEY, GROUP_KEY, FleetQuestions
from ebbflow.live.listening import SOON_S, Hear, IncomingState, Listener
from ebbflow.live.membership import Membership, MembershipPhase, answer_holds
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
    Instruction,
    KeptPart,
    LeaveFleet,
    LighthouseWanted,
    LoadCheckpoint,
    MembershipEvent,
    NoNewerCheckpoint,
    PeerAsksAgain,
    PublishGroup,
    ReceiveState,
    RecordEvent,
    Refuse,
    Register,
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
from ebbflow.live.peer_watch import HangWatch, PeerWatch
from ebbflow.live.protocol import ReplicaConfig
from ebbflow.live.registration import Registration, asked_again_key
from ebbflow.live.rendezvous import RefusedConnections, connect_group, connection_failed, exchange_handshakes
from ebbflow.live.state_transfer import StateTransfers, TransferableState

__all__ = ["FleetConnection", "LeftFleet", "TrainingFinished", "TransportUnusable"]

_CONNECT_TIMEOUT_S = 10.0  # for the handshake, and for connecting
_TRANSFER_S = 24 * 3600.0  # for the collectives of a step in which a replica does not have the state
_COLLECTIVE_TIMEOUT_S = 60.0  # for a collective while all participants send heartbeats
_ANSWER_SLACK_S = 0.5  # for an answer of the lighthouse to arrive
_LEAVE_POLL_S = 0.1
_LISTEN_POLL_S = 0.05
_HANDSHAKE_POLL_S = 0.02
_CONNECT_POLL_S = 0.05
_BY_ALL_RANKS = (Connect, DropConnections, LoadCheckpoint, SendState, ReceiveState)
"""What every rank of a replica does, when rank 0 says so."""


class _AskedAhead(NamedTuple):
    """A question to the lighthouse that was asked before the step began."""

    request: AskLighthouse
    asked_at: float
    answer: queue.SimpleQueue[Any]

    def holds(self, now: float) -> bool:
        """Whether the answer may still be used; for the thread that waits for it."""
        found = None
        with contextlib.suppress(queue.Empty):
            found = self.answer.get_nowait()
            self.answer.put(found)
        return answer_holds(found, asked=self.asked_at, now=now)


class LeftFleet(Exception):
    """This replica was told to leave while it waited for others."""


class TrainingFinished(Exception):
    """There is no next step: the state that this replica has, or just received, is that of a finished job."""


class TransportUnusable(ConfigError):
    """What carries the gradients fails again and again, although no replica was lost."""


class FleetConnection:
    """The connection of this replica with the others. The training loop calls it, and waits in it."""

    def __init__(
        self,
        config: ReplicaConfig,
        job: Mapping[str, str],
        state: TransferableState,
        *,
        secret: bytes,
        device: torch.device,
        ranks: ReplicaRanks | None = None,
        leaving: Callable[[], bool] = lambda: False,
        on_event: Callable[[str, str], None] = lambda what, text: None,
        fault: Fault = no_fault,
    ) -> None:
        """`job`: what must be the same for all replicas. `secret`: of the job; other replicas prove that they have the
        same, and whatever they send is authenticated by it. `ranks`: those of this replica. `leaving`: whether this
        replica was told to leave. `on_event(what, text)`: writes an event into the record."""
        self.config = config
        self.ranks = ranks or ReplicaRanks()
        self.state = state
        heartbeat_timeout_s = config.heartbeat_timeout_ms / 1000
        self.membership = Membership(
            job,
            min_replicas=config.min_replicas,
            heartbeat_timeout_s=heartbeat_timeout_s,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        self._secret = secret
        self._device = device
        self._leaving = leaving
        self._on_event = on_event
        self._fault = fault
        self._registration = Registration(config, secret, leaving)
        self._questions = FleetQuestions(config.lighthouse, secret, heartbeat_timeout_s=heartbeat_timeout_s)
        self._peer_watch = PeerWatch(self._questions)
        self._hang_watch = HangWatch(self._registration, self._questions, on_event)
        # While something is waited for: reports it, or that time has passed.
        self._pending: Callable[[], MembershipEvent] | None = None
        self._background = BackgroundThreads("ebbflow-membership")
        self._ahead: _AskedAhead | None = None
        self._refused_before = 0  # connections to the store, when the lighthouse was last asked
        self._abandoned = threading.Event()  # set if what the last thread does is not waited for any longer
        self._told_to_leave = False  # whether that was reported
        self._group: ProcessGroup | None = None
        self._sums: ReplicaSums | None = None  # over the group
        self._names: tuple[str, ...] = ()  # of the replicas of the group, by rank
        self._transfers = StateTransfers()  # to replicas of the group
        self.begin_to_hear: Callable[[ReplicaSums], Hear] | None = None
        """Makes what takes part in the steps of the others, by these sums, while this replica receives the state;
        without it they wait."""
        self.listener: Listener | None = None
        """Hears the steps of the others, which are to be applied to the state that this replica receives."""
        self._heard_before: tuple[ReplicaRanks, threading.Event] | None = None
        """The connections inside of the replica of the last thread that heard, and whether it has ended."""

    # What the training loop calls -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make this replica known to the lighthouse, if that can be reached; else the first step tries again."""
        if self.ranks.leads:
            self._hang_watch.start(patience_s=_COLLECTIVE_TIMEOUT_S)
        self._run(Started(now=monotonic()))

    def next_step(self, step: int, lineage: int, kept: KeptPart | None = None) -> ComputeStep:
        """Form a quorum group for the next step, and make sure that this replica has the state that counts.

        `kept`: what this replica has computed of the step, in an attempt that failed.
        Waits while the lighthouse forms no quorum. Raises `LeftFleet` if this replica is told to leave meanwhile,
        `TrainingFinished` if the state turns out to be that of a finished job, a ConfigError if this replica is
        incompatible with the fleet, and `TransportUnusable` if it fails again and again with the same replicas.
        """
        registered, self._hang_watch.silenced = not self._hang_watch.silenced, False
        instruction = self._run(
            StepRequested(now=monotonic(), step=step, lineage=lineage, kept=kept, registered=registered)
        )
        if isinstance(instruction, Refuse):
            raise ConfigError(
                f"the fleet at {self.config.lighthouse} refuses this replica: {instruction.difference}. Start it with "
                f"the same script, settings, version and secret as the others, or give its job a lighthouse of its own"
            )
        if not isinstance(instruction, ComputeStep):
            raise LeftFleet
        if self.state.finished:
            raise TrainingFinished
        if self._group is not None:
            # Who receives the state may have to wait for it; whether it still receives anything, the transfer shows.
            self._group.patience = timedelta(seconds=_TRANSFER_S if instruction.receiving else _COLLECTIVE_TIMEOUT_S)
        self._hang_watch.step_begins()
        return instruction

    @property
    def sums(self) -> ReplicaSums:
        """Adds up over the participants of the step; for the thread of the training loop."""
        assert self._sums is not None
        return self._sums

    @property
    def name(self) -> str:
        """Name of this replica, without the address of its store; another one after it was unregistered."""
        return self._registration.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas of the group, by rank."""
        return self._names

    @property
    def rank(self) -> int:
        """Rank of this replica in the group."""
        assert self._group is not None
        return self._group.rank

    @property
    def wants_lighthouse(self) -> bool:
        """What this replica tells the other participants in a step (`Membership.wants_lighthouse`)."""
        return self.membership.wants_lighthouse(monotonic())

    def committed(
        self,
        assignment: Assignment,
        *,
        leaving: frozenset[int],
        lighthouse_wanted: bool,
        arrived: frozenset[int] = frozenset(),
        goes_on: bool = False,
    ) -> LeaveFleet | None:
        """Report that the step counts on this replica; the answer says whether it was the last one.

        The state may change from now on: what of it is still to be sent is copied. `goes_on`: whether the next step
        follows soon, so that the lighthouse can be asked while the optimizer applies this one.
        """
        if self._transfers.keep_unsent():
            self._fault("copy")
        self._hang_watch.step_committed()
        instruction = self._run(
            StepCommitted(
                now=monotonic(),
                assignment=assignment,
                leaving=leaving,
                lighthouse_wanted=lighthouse_wanted,
                arrived=arrived,
            )
        )
        if goes_on and self.ranks.leads and (question := self.membership.next_question) is not None:
            self._ahead = _AskedAhead(question, monotonic(), self._begin_to_ask(question))
        return instruction if isinstance(instruction, LeaveFleet) else None

    def failed(self, reason: PeerLost) -> None:
        """Report that the step does not count on this replica."""
        self._hang_watch.step_failed()
        self._run(StepFailed(now=monotonic(), reason=str(reason), backend=isinstance(reason, BackendFailed)))

    def weights_differ(self) -> None:
        """Report that the weights of this replica are not those of most participants."""
        self._run(WeightsDiffer(now=monotonic()))

    def return_to_lighthouse(self) -> None:
        """Ask the lighthouse before the next step, even if the group goes on by itself."""
        self._run(LighthouseWanted(now=monotonic()))

    def publish(self, key: str, text: str) -> None:
        """Put a text into the store of this replica, where others can read it over the network."""
        self._registration.publish(key, text)

    def finish_transfers(self) -> None:
        """Wait until the replicas that receive the state from this one have it, or are lost."""
        self._transfers.finish()

    def sends_heartbeats(self, name: str) -> bool:
        """Whether the lighthouse has heard of a replica, by its name in the group, within the heartbeat timeout."""
        return self._questions.sends_heartbeats(name)

    def close(self) -> None:
        """Close everything; the lighthouse forgets this replica when its heartbeat times out."""
        self._hang_watch.close()
        self._registration.close()
        self._drop()
        # As long as it remembers the heartbeats, the lighthouse may still answer a question that is not waited for any
        # longer.
        self._background.close(patience_s=self._questions.heartbeat_timeout_s + _ANSWER_SLACK_S)

    # How instructions are executed ------------------------------------------------------------------------------------

    def _run(self, event: MembershipEvent) -> Instruction | None:
        """Hand an event to the protocol and execute all instructions that follow from it.

        Ends at an instruction for the training loop, which is returned, or when there is nothing left to do. In a
        replica of several ranks, rank 0 runs the protocol and the others follow it.
        """
        if not self.ranks.leads:
            return self._follow()
        todo = deque(self.membership.handle(event))
        last: Instruction | None = None
        while todo or self._pending is not None:
            if todo:
                instruction = todo.popleft()
                if isinstance(instruction, ComputeStep | GiveUp | LeaveFleet | Refuse):
                    self._pending, last = None, instruction
                    self._abandoned.set()
                    break
                outcome = self._execute(instruction)
            else:
                assert self._pending is not None
                outcome = self._pending()
            if outcome is not None:
                todo.extend(self.membership.handle(outcome))
            if self.membership.phase is MembershipPhase.IDLE:
                self._pending = None  # as when a peer dies while the others connect after a step
        self.ranks.share((None, last, self.membership.state))
        return self._unless_given_up(last)

    def _unless_given_up(self, instruction: Instruction | None) -> Instruction | None:
        if not isinstance(instruction, GiveUp):
            return instruction
        advice = _advice(instruction.reason, on_gpu=self._device.type == "cuda")
        raise TransportUnusable(
            f"the gradients cannot be added up, although no replica was lost: {instruction.reason}. {advice}"
        )

    def _follow(self) -> Instruction | None:
        """Do what rank 0 of this replica says, until it has an instruction for the training loop."""
        said: tuple[Instruction | None, Instruction | None, ReplicaState] = (None, None, self.membership.state)
        while True:
            instruction, last, state = self.ranks.share(said)
            if instruction is None:
                self.membership.state = state
                return self._unless_given_up(last)
            self.ranks.gather(self._execute_here(instruction))

    def _execute(self, instruction: Instruction) -> MembershipEvent | None:
        """Execute an instruction, on all ranks if need be; the event that it led to, if that is known at once."""
        if self.ranks.size == 1 or not isinstance(instruction, _BY_ALL_RANKS):
            return self._execute_here(instruction)
        self.ranks.share((instruction, None, self.membership.state))
        outcomes = self.ranks.gather(self._execute_here(instruction))
        failed = [outcome for outcome in outcomes if isinstance(outcome, ConnectionFailed)]
        return max(failed, key=lambda outcome: outcome.backend) if failed else outcomes[0]

    def _execute_here(self, instruction: Instruction) -> MembershipEvent | None:
        match instruction:
            case Register():
                if instruction.after_s:  # even a sleep of nothing gives the core away
                    sleep(instruction.after_s)
                return self._registration.register(_CONNECT_TIMEOUT_S)
            case AskLighthouse():
                if instruction.after_s:  # even a sleep of nothing gives the core away
                    sleep(instruction.after_s)
                self._ask(instruction)
            case CheckLinks():
                self._in_background(
                    partial(self._questions.check_links, instruction, back=self._registration.probe), _LEAVE_POLL_S
                )
            case CheckHeartbeats():
                if not instruction.connection:
                    return self._questions.check_heartbeats(instruction.besides)
                connected = partial(self._registration.is_connected, self.membership.name)
                return self._questions.check_heartbeats(instruction.besides, connected=connected)
            case TellPeers():
                tell = partial(self._questions.tell, instruction.names, asked_again_key(self.membership.name))
                self._background.begin(partial(tell, str(instruction.attempt)))
            case PublishGroup():
                self.publish(GROUP_KEY, instruction.group.encode())
            case SendHandshake():
                self._exchange_handshakes(instruction)
            case Connect():
                return self._connect(instruction)
            case LoadCheckpoint():
                return self._load_checkpoint()
            case SendState():
                return self._send_state(instruction.to)
            case ReceiveState():
                return self._receive_state(instruction)
            case RecordEvent():
                self._on_event(instruction.what, instruction.text)
            case Unregister():
                self._registration.unregister()
                self._ahead = None
            case DropConnections():
                self._drop()
            case _:
                raise NotImplementedError(f"{instruction}")
        return None

    def _drop(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self._group is not None:
            self._group.close()
            self._group = self._sums = None

    def _ask(self, request: AskLighthouse) -> None:
        self._abandoned.set()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.request == request and ahead.holds(monotonic()):
            self._wait_for(ahead.answer, _LEAVE_POLL_S)
        else:
            self._wait_for(self._begin_to_ask(request), _LEAVE_POLL_S)

    def _begin_to_ask(self, request: AskLighthouse) -> queue.SimpleQueue[Any]:
        self.publish(CONNECTED_KEY, request.group)
        self._refused_before = self._registration.refused
        ask = partial(
            self._questions.ask_for_quorum,
            request,
            client=partial(self._registration.connection, again=request.reconnect, timeout_s=_CONNECT_TIMEOUT_S),
            name=self.membership.name,
            store=self.membership.store,
        )
        return self._background.begin(ask)

    def _in_background(self, work: Callable[[], MembershipEvent], poll_s: float) -> None:
        """Begin something that cannot be interrupted in another thread; meanwhile report that time passes."""
        self._wait_for(self._background.begin(work), poll_s)

    def _wait_for(self, outcome: queue.SimpleQueue[Any], poll_s: float) -> None:
        """Wait for what another thread has begun; meanwhile report that time passes."""

        def poll() -> MembershipEvent:
            if self._leaving() and not self._told_to_leave:
                self._told_to_leave = True
                return ToldToLeave(now=monotonic())
            try:
                event: MembershipEvent | Exception = outcome.get(timeout=poll_s)
            except queue.Empty:
                return Tick(now=monotonic())
            self._pending = None
            if isinstance(event, Exception):
                raise event
            return event

        self._pending = poll

    def _exchange_handshakes(self, instruction: SendHandshake) -> None:
        self._abandoned.set()
        abandoned = self._abandoned = threading.Event()
        refused = RefusedConnections(instruction, self._registration, self._refused_before)
        exchange = partial(
            exchange_handshakes, instruction, self._secret, timeout_s=_CONNECT_TIMEOUT_S, abandoned=abandoned
        )
        self._in_background(exchange, _HANDSHAKE_POLL_S)
        waiting = self._pending
        told: dict[str, int] = {}

        def poll() -> MembershipEvent:
            assert waiting is not None
            event = waiting()
            if not isinstance(event, Tick):
                return event
            for name, attempt in self._registration.asked_again(instruction.names).items():
                if told.get(name) != attempt:
                    told[name] = attempt
                    return PeerAsksAgain(now=event.now, name=name, attempt=attempt)
            failure = refused.failure(event.now)
            if failure is None:
                return event
            self._pending = None
            return failure

        self._pending = poll

    def _connect(self, instruction: Connect) -> MembershipEvent | None:
        own, key = instruction.names[instruction.rank], instruction.rendezvous.rpartition("/")[2]
        others = [name for name in instruction.names if name != own]
        self.publish(CONNECTED_KEY, key)
        transfers = self._transfers = StateTransfers()
        self._names = instruction.names
        self._hang_watch.group_connects(key, instruction.names)
        self._group = group = ProcessGroup(
            instruction.rendezvous + (f"/{self.ranks.rank}" if self.ranks.size > 1 else ""),
            instruction.rank,
            len(instruction.names),
            host=self.config.bind,
            secret=self._secret,
            connect_s=_CONNECT_TIMEOUT_S,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
            device=self._device,
            by_nccl=self.config.transport != "gloo",
            nccl=torchft_api.nccl_group,
            stopped=lambda: self._peer_watch.stopped(own, others, key, lost=transfers.failed),
            fault=self._fault,
        )
        self._sums = ReplicaSums(self.ranks, group)
        if self.ranks.size > 1:  # they report together
            return connect_group(group, self._device)
        self._in_background(partial(connect_group, group, self._device), _CONNECT_POLL_S)
        return None

    def _load_checkpoint(self) -> MembershipEvent:
        try:
            loaded = self.state.refresh()
        except (StorageUnreachable, UnreadableCheckpoints) as error:
            # One that has trained has a state to go on with. Ranks of a replica must all have the same.
            if not self.membership.state.established or self.ranks.size > 1:
                raise
            self._on_event("no checkpoint", f"{error}; this replica goes on with its own state")
            loaded = None
        if loaded is None:
            return NoNewerCheckpoint(now=monotonic())
        step, lineage = loaded
        return CheckpointLoaded(now=monotonic(), step=step, lineage=lineage)

    def _send_state(self, receivers: Sequence[int]) -> MembershipEvent:
        """Begin to send the state, to all receivers at once, while this replica computes steps."""
        assert self._group is not None
        self._transfers.begin(self.state.pack(), self._group, self._names, receivers)
        return StateSent(now=monotonic())

    def _receive_state(self, instruction: ReceiveState) -> MembershipEvent:
        """Receive the state, while this replica hears the steps that the others compute meanwhile, and load it."""
        group = self._group
        assert group is not None
        incoming = IncomingState(group, instruction.source)
        failure: LeftFleet | PeerLost | None = None
        try:
            if (
                self.begin_to_hear is not None
                and instruction.listen
                and not self.ranks.all_agree(incoming.wait(SOON_S))
            ):
                group.patience = timedelta(seconds=_TRANSFER_S)
                self.listener = self._listen(self.begin_to_hear, group, incoming)
                self._wait_for_state(incoming, self.listener)
            state = incoming.take()
        except (LeftFleet, PeerLost) as error:
            failure = error.with_traceback(None)  # which would keep the connections open
        # All ranks load the state, or none does.
        failures = self.ranks.gather(failure)
        if any(isinstance(found, LeftFleet) for found in failures):
            raise LeftFleet
        if lost := [found for found in failures if isinstance(found, PeerLost)]:
            return connection_failed(max(lost, key=lambda found: isinstance(found, BackendFailed)))
        step, lineage = self.state.unpack(state)
        return StateReceived(now=monotonic(), step=step, lineage=lineage, size=incoming.size)

    def _listen(
        self, begin_to_hear: Callable[[ReplicaSums], Hear], group: ProcessGroup, incoming: IncomingState
    ) -> Listener:
        """Begin to hear the steps of the others, on all ranks of this replica."""
        before, ended = self._heard_before or (None, threading.Event())
        ranks = self.ranks.in_thread(before, ended=ended.is_set())
        listener = Listener(
            begin_to_hear(ReplicaSums(ranks, group)),
            self.ranks.share(self.membership.listening),  # which rank 0 knows
            incoming,
            rank=group.rank,
            all_agree=ranks.all_agree,
        )
        self._heard_before = (ranks, listener.ended)
        return listener

    def _wait_for_state(self, incoming: IncomingState, listener: Listener) -> None:
        """Raises `PeerLost` if the group breaks meanwhile, and `LeftFleet` when this replica has told the others so."""
        while not incoming.wait(_LISTEN_POLL_S):
            if (failure := listener.failure) is not None:
                raise LeftFleet if listener.leaves else failure


def _advice(reason: str, *, on_gpu: bool) -> str:
    """What to do about a backend that fails, for this reason, although no replica is lost."""
    if "Duplicate GPU" in reason:  # by NCCL, and certain: nothing else needs to be looked at
        return (
            "Replicas share a GPU, which NCCL does not do: give each a GPU of its own (--gpus 1), or let gloo carry "
            "the gradients (--transport gloo, EBBFLOW_TRANSPORT)"
        )
    interface = "--bind, EBBFLOW_BIND; with NCCL NCCL_SOCKET_IFNAME" if on_gpu else "--bind, EBBFLOW_BIND"
    return (
        "All replicas send heartbeats, and their stores answer. The backend uses other ports, any that are free: look "
        "whether a firewall between the replicas lets these through, and whether each replica listens on the "
        f"interface at which the others reach it ({interface})"
    )
