"""The connection of one replica with its fleet: executes what the membership protocol asks for, and reports events.

No decision is made here. `Membership` (membership.py) says what is to be done; this module does it with torchft's
manager server and client, torch's store and a process group, in the thread of the training loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import socket
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

import torch

from ebbflow.core.key_store import KeyStore, NotAuthenticated, StoreLost
from ebbflow.data.ledger import Assignment
from ebbflow.engines.process_group import BackendFailed, Fault, PeerLost, ProcessGroup, no_fault, open_store
from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.errors import ConfigError
from ebbflow.live import torchft_api
from ebbflow.live.agreement import gone_on_without, keeps_others_waiting, without_heartbeat
from ebbflow.live.background import BackgroundThreads
from ebbflow.live.listening import SOON_S, Hear, IncomingState, Listener
from ebbflow.live.membership import Membership, MembershipPhase
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
    Tick,
    ToldToLeave,
    Unregister,
    WeightsDiffer,
)
from ebbflow.live.protocol import (
    HEARTBEAT_INTERVAL_S,
    ReplicaConfig,
    fetch_heartbeat_ages,
    fetch_quorum_and_ages,
    format_address,
    parse_address,
)
from ebbflow.live.state_transfer import OutgoingState

__all__ = ["FleetConnection", "LeftFleet", "TrainingFinished", "TransferableState", "TransportUnusable"]

_CONNECT_TIMEOUT_S = 10.0  # for the handshake, and for connecting
_TRANSFER_S = 24 * 3600.0  # for the collectives of a step in which a replica does not have the state
_COLLECTIVE_TIMEOUT_S = 60.0  # for a collective while all participants send heartbeats
_QUORUM_TIMEOUT = timedelta(minutes=5)  # then the lighthouse is asked again: an answer may have been lost
_LEAVE_POLL_S = 0.1
_LISTEN_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0  # for finding out whether anybody listens at the address of the lighthouse
_HANDSHAKE_POLL_S = 0.02
_WAIT_FOR_LINK_S = 0.5  # while a replica is left out: do those that it does not reach still send heartbeats?
_READ_AGAIN_S = 0.1  # before handshakes that not all replicas confirm are read again
_CONNECT_POLL_S = 0.05
_STORE_TIMEOUT_S = 2.0  # for reading from the store of another replica
_AFTER_REFUSAL_S = 0.5  # for handshakes to come after all, when this replica's store has refused a connection
_BY_ALL_RANKS = (Connect, DropConnections, LoadCheckpoint, SendState, ReceiveState)
"""What every rank of a replica does, when rank 0 says so."""
_REFUSED = b"refused"
"""What stands in the place of a handshake that will not come."""
_GROUP_KEY = "ebbflow/group"
"""Key of a replica's quorum group in its store."""
_CONNECTED_KEY = "ebbflow/connected"
"""Key, in the store of a replica, of the name of the group in which it is connected, or connects; empty if in none."""
_LOOK_EVERY_S = 5.0  # while a replica waits for its peers: do they answer, and are they still in the group?


class LeftFleet(Exception):
    """This replica was told to leave while it waited for others."""


class TrainingFinished(Exception):
    """There is no next step: the state that this replica has, or just received, is that of a finished job."""


class TransportUnusable(ConfigError):
    """The backend that carries the gradients fails again and again, although no replica was lost."""


class TransferableState(Protocol):
    """The complete state of a replica, which can be sent to a peer and loaded from a checkpoint."""

    def pack(self) -> Any:
        """The state after the last committed step, in plain containers. Nothing in it changes before the next step is
        committed."""

    def unpack(self, state: Any) -> tuple[int, int]:
        """Load what `pack` returned; return its number of committed steps and its lineage."""

    def refresh(self) -> tuple[int, int] | None:
        """Load the newest checkpoint if it is further than this state; return its steps and lineage, or None."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""


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
        self._heartbeat_timeout_s = config.heartbeat_timeout_ms / 1000
        self.membership = Membership(
            job,
            min_replicas=config.min_replicas,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        self.name = self._new_name()
        self._secret = secret
        self._device = device
        self._leaving = leaving
        self._on_event = on_event
        self._fault = fault
        # While something is waited for: reports it, or that time has passed.
        self._pending: Callable[[], MembershipEvent] | None = None
        self._background = BackgroundThreads("ebbflow-membership")
        self._abandoned = threading.Event()  # set if what the last thread does is not waited for any longer
        self._told_to_leave = False  # whether that was reported
        self._group: ProcessGroup | None = None
        self._key = ""  # name of the group
        self._names: tuple[str, ...] = ()  # of the replicas of the group, by rank
        self._asked_at = self._looks_at = 0.0  # when it was last asked who has stopped; when the peers are looked at
        self._away: frozenset[str] = frozenset()  # peers that did not answer then, or were not in the group
        self.begin_to_hear: Callable[[], Hear] | None = None
        """Makes what takes part in the steps of the others while this replica receives the state; without it they
        wait."""
        self.listener: Listener | None = None
        """Hears the steps of the others, which are to be applied to the state that this replica receives."""
        self._outgoing: OutgoingState | None = None
        self._transfers: list[threading.Thread] = []  # of the state to replicas that need it
        self._failed_transfers: list[str] = []  # names of replicas that could not receive it
        self._training_thread = threading.get_ident()
        self._computing_since: float | None = None  # a step, which may have its sum, but is not committed yet
        self._step_s = 0.0  # how long the last step took
        self._silenced = False  # whether this replica has stopped its heartbeats, since it kept the others waiting
        self._closed = threading.Event()
        self._server: Any = None
        self._client: Any = None
        self._store: KeyStore | None = None

    def _new_name(self) -> str:
        return f"{self.config.replica}:{uuid.uuid4().hex[:12]}"

    # What the training loop calls -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make this replica known to the lighthouse, if that can be reached; else the first step tries again."""
        self._training_thread = threading.get_ident()
        if self.ranks.leads:
            threading.Thread(target=self._watch, daemon=True, name="ebbflow-watch").start()
        self._run(Started(now=monotonic()))

    def next_step(self, step: int, lineage: int, kept: KeptPart | None = None) -> ComputeStep:
        """Form a quorum group for the next step, and make sure that this replica has the state that counts.

        `kept`: what this replica has computed of the step, in an attempt that failed.
        Waits while the lighthouse forms no quorum. Raises `LeftFleet` if this replica is told to leave meanwhile,
        `TrainingFinished` if the state turns out to be that of a finished job, and a ConfigError if this replica is
        incompatible with the fleet.
        """
        registered, self._silenced = not self._silenced, False
        instruction = self._run(
            StepRequested(now=monotonic(), step=step, lineage=lineage, kept=kept, registered=registered)
        )
        if isinstance(instruction, Refuse):
            raise ConfigError(
                f"the fleet at {self.config.lighthouse} refuses this replica, which is of another job: "
                f"{instruction.difference}. Start it with the same script, settings and version, or give the job a "
                f"lighthouse of its own"
            )
        if not isinstance(instruction, ComputeStep):
            raise LeftFleet
        if self.state.finished:
            raise TrainingFinished
        if self._group is not None:
            # Who receives the state may have to wait for it; whether it still receives anything, the transfer shows.
            self._group.patience = timedelta(seconds=_TRANSFER_S if instruction.receiving else _COLLECTIVE_TIMEOUT_S)
        self._computing_since = monotonic()
        return instruction

    def all_reduce(self, tensor: torch.Tensor, *, of_rank: int = 0) -> None:
        """Replace a tensor by its sum over the participants of the step.

        If this replica has several ranks, the first `of_rank` numbers are of this rank alone, and are added up with the
        same rank of the other replicas. The rest is added up over the ranks first, then by rank 0 over the replicas.
        All ranks get the sum, or all raise `PeerLost`.
        """
        assert self._group is not None
        if self.ranks.size == 1:
            self._group.all_reduce(tensor)
            return
        of_replica = tensor[of_rank:]
        self.ranks.add_up(of_replica)
        lost = ""
        try:
            if self.ranks.leads or of_rank:
                self._group.all_reduce(tensor if self.ranks.leads else tensor[:of_rank])
        except PeerLost as error:
            lost = str(error)
        # One message says whether any rank has lost its peer, and what rank 0 has received.
        answer = torch.cat([of_replica if self.ranks.leads else torch.zeros_like(of_replica), tensor.new_zeros(1)])
        if lost:
            answer.zero_()
            answer[-1] = 1.0
        self.ranks.add_up(answer)
        if answer[-1] > 0:
            raise PeerLost(lost or "another rank of this replica lost its peer")
        of_replica.copy_(answer[:-1])

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by its sum over the participants of the step; the result waits for the sum."""
        assert self._group is not None
        return self._group.begin_all_reduce(tensor)

    def confirm(self, listening: frozenset[int] = frozenset(), *, has_state: bool = True) -> frozenset[int]:
        """Wait until all participants of the step have its sum; of those that listened, the ranks that have the state.

        Whoever committed a step before could be the only one that has it: it would have to be repeated if that replica
        then died, or were taken for dead.
        """
        assert self._group is not None
        if self.ranks.size > 1:
            self.all_reduce(torch.zeros(1))
            return listening
        if not listening:
            self._group.barrier()
            return frozenset()
        said = torch.zeros(self._group.size)
        said[self._group.rank] = float(has_state)
        self._group.all_reduce(said)
        return frozenset(rank for rank in listening if said[rank])

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
    ) -> LeaveFleet | None:
        """Report that the step counts on this replica; the answer says whether it was the last one.

        The state may change from now on: what of it is still to be sent is copied.
        """
        if self._outgoing is not None:
            if any(transfer.is_alive() for transfer in self._transfers):
                self._outgoing.keep()
                self._fault("copy")
            else:
                self._outgoing = None
        if self._computing_since is not None:
            self._step_s, self._computing_since = monotonic() - self._computing_since, None
        instruction = self._run(
            StepCommitted(
                now=monotonic(),
                assignment=assignment,
                leaving=leaving,
                lighthouse_wanted=lighthouse_wanted,
                arrived=arrived,
            )
        )
        return instruction if isinstance(instruction, LeaveFleet) else None

    def failed(self, reason: str) -> None:
        """Report that the step does not count on this replica. Raises `TransportUnusable` if it never will."""
        self._computing_since = None
        backend = self._group is not None and self._group.backend_failed
        self._run(StepFailed(now=monotonic(), reason=reason, backend=backend))

    def weights_differ(self) -> None:
        """Report that the weights of this replica are not those of most participants."""
        self._run(WeightsDiffer(now=monotonic()))

    def return_to_lighthouse(self) -> None:
        """Ask the lighthouse before the next step, even if the group goes on by itself."""
        self._run(LighthouseWanted(now=monotonic()))

    def publish(self, key: str, text: str) -> None:
        """Put a text into the store of this replica, where others can read it over the network."""
        if self._store is not None:
            self._store.set(key, text.encode())

    def finish_transfers(self) -> None:
        """Wait until the replicas that receive the state from this one have it, or are lost."""
        for transfer in self._transfers:
            transfer.join()

    def sends_heartbeats(self, name: str) -> bool:
        """Whether the lighthouse has heard of a replica, by its name in the group, within the heartbeat timeout."""
        return self._heartbeat_ages().get(name, math.inf) <= self._heartbeat_timeout_s

    def close(self) -> None:
        """Close everything; the lighthouse forgets this replica when its heartbeat times out."""
        self._closed.set()
        self._unregister()
        self._drop()
        self._background.close()

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
        advice = "give each replica a GPU of its own (--gpus 1), or let gloo carry the gradients (--transport gloo)"
        raise TransportUnusable(
            f"the gradients cannot be added up, although no replica was lost: {instruction.reason}"
            f"{'. If replicas share a GPU, ' + advice if self._device.type == 'cuda' else ''}"
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
        return next((outcome for outcome in outcomes if isinstance(outcome, ConnectionFailed)), outcomes[0])

    def _execute_here(self, instruction: Instruction) -> MembershipEvent | None:
        match instruction:
            case Register():
                if instruction.after_s:  # even a sleep of nothing gives the core away
                    sleep(instruction.after_s)
                return self._register()
            case AskLighthouse():
                if instruction.after_s:  # even a sleep of nothing gives the core away
                    sleep(instruction.after_s)
                self._ask(instruction)
            case CheckLinks():
                self._check_links(instruction)
            case CheckHeartbeats():
                return self._check_heartbeats(instruction.besides)
            case PublishGroup():
                self.publish(_GROUP_KEY, instruction.group.encode())
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
                self._unregister()
            case DropConnections():
                self._drop()
            case _:
                raise NotImplementedError(f"{instruction}")
        return None

    def _register(self) -> MembershipEvent:
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        if problem := self._nobody_listens(monotonic() + _CONNECT_TIMEOUT_S):
            return self._unreachable(f"nobody answers at {self.config.lighthouse} ({problem})")
        self._close_store()
        self._store = KeyStore(self.config.bind, self._secret)
        address = format_address(self.config.bind, self._store.port)
        name = f"{self.name}@{address}"  # others find the store of a replica by its heartbeat
        try:
            self._client = torchft_api.lighthouse_client(self.config.lighthouse, connect_timeout=timeout)
            self._server = torchft_api.manager_server(
                name,
                lighthouse=self.config.lighthouse,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_INTERVAL_S),
                connect_timeout=timeout,
            )
        except (RuntimeError, TimeoutError) as error:
            return self._unreachable(f"no lighthouse at {self.config.lighthouse}: {error}")
        return Registered(now=monotonic(), name=name, store=address)

    def _nobody_listens(self, deadline: float) -> str:
        """Wait until somebody listens at the address of the lighthouse; why not, if nobody does by the deadline.

        torchft would wait, too, but a replica that is told to leave meanwhile could not interrupt it.
        """
        while True:
            try:
                socket.create_connection(parse_address(self.config.lighthouse), timeout=_PROBE_TIMEOUT_S).close()
                return ""
            except OSError as error:
                if monotonic() > deadline or self._leaving():
                    return error.strerror or str(error)
            sleep(_LEAVE_POLL_S)

    def _unreachable(self, reason: str) -> MembershipEvent:
        if self._leaving():
            return ToldToLeave(now=monotonic())
        return LighthouseUnreachable(now=monotonic(), reason=reason)

    def _unregister(self) -> None:
        if self._server is not None:
            with contextlib.suppress(RuntimeError):
                self._server.shutdown()
        self._server = self._client = None
        self._close_store()
        self.name = self._new_name()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _drop(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def _ask(self, request: AskLighthouse) -> None:
        self._abandoned.set()
        self.publish(_CONNECTED_KEY, request.group)
        client, name = self._client, self.membership.name

        def ask() -> MembershipEvent:
            try:
                quorum = torchft_api.request_quorum(
                    client,
                    name=name,
                    store=self.membership.store,
                    step=request.step,
                    data={
                        "group": request.group,
                        "established": str(request.established),
                        "step": str(request.step),
                        "unreachable": " ".join(request.unreachable),
                    },
                    timeout=_QUORUM_TIMEOUT,
                )
            except (RuntimeError, TimeoutError) as error:
                reason = f"the lighthouse at {self.config.lighthouse} does not answer: {error}"
                return LighthouseUnreachable(now=monotonic(), reason=reason)
            said = [member.data or {} for member in quorum.participants]
            names = tuple(member.replica_id for member in quorum.participants)
            return QuorumFormed(
                now=monotonic(),
                quorum_id=quorum.quorum_id,
                replicas=names,
                rank=names.index(name),
                store=quorum.participants[0].store_address,
                groups=tuple(str(one.get("group")) for one in said),
                established=tuple(one.get("established") == str(True) for one in said),
                steps=tuple(int(step) if (step := str(one.get("step"))).isdecimal() else 0 for one in said),
                unreachable=tuple(tuple(str(one.get("unreachable", "")).split()) for one in said),
            )

        self._in_background(ask, _LEAVE_POLL_S)

    def _in_background(self, work: Callable[[], MembershipEvent], poll_s: float) -> None:
        """Begin something that cannot be interrupted in another thread; meanwhile report that time passes."""
        outcome = self._background.begin(work)

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

    def _check_heartbeats(self, besides: Sequence[str]) -> MembershipEvent:
        ages = self._heartbeat_ages()
        dead = without_heartbeat(ages, ages, self._heartbeat_timeout_s)
        asked = sorted(ages.keys() - {*dead, *besides}) if besides else []
        groups = {name: _published(text) for name, text in self._ask_stores(asked, _GROUP_KEY).items()}
        return HeartbeatsReceived(now=monotonic(), ages=ages, groups=groups)

    def _check_links(self, instruction: CheckLinks) -> None:
        def alive(names: Sequence[str]) -> list[str]:
            return [name for name in names if self.sends_heartbeats(name)]

        def check() -> MembershipEvent:
            until, names = monotonic() + instruction.after_s, alive(instruction.names)
            while names and monotonic() < until:
                sleep(min(instruction.after_s, _WAIT_FOR_LINK_S))
                names = alive(instruction.names)
            said = self._ask_stores(names, _GROUP_KEY)
            silent = [name for name in names if said[name] is None]
            if silent:  # one that has just died is no longer there when its heartbeat has timed out
                sleep(self._heartbeat_timeout_s + 2 * HEARTBEAT_INTERVAL_S)
            return LinksChecked(now=monotonic(), unreachable=tuple(alive(silent)))

        self._in_background(check, _LEAVE_POLL_S)

    def _exchange_handshakes(self, instruction: SendHandshake) -> None:
        """Exchange handshakes, and make sure that all replicas have read the same ones.

        The store may hold handshakes of an earlier quorum with the same number, which a lighthouse that was restarted
        has given twice. So each replica also sets a key with a digest of all handshakes that it has read: nobody can
        know the digest of a handshake that has just been written without having read it.
        """
        own, ranks = instruction.rank, range(instruction.size)
        self._abandoned.set()
        abandoned = self._abandoned = threading.Event()

        def exchange() -> MembershipEvent:
            deadline = monotonic() + _CONNECT_TIMEOUT_S
            try:
                with open_store(instruction.rendezvous, self._secret, timeout_s=_CONNECT_TIMEOUT_S) as store:
                    store.set({f"handshake/{own}": instruction.handshake.encode().encode()})
                    while monotonic() < deadline and not abandoned.is_set():
                        texts = store.get([f"handshake/{rank}" for rank in ranks], timeout_s=_READ_AGAIN_S)
                        if texts is None:
                            continue
                        if _REFUSED in texts:
                            raise StoreLost("a replica of the quorum does not know the secret of the others")
                        handshakes = tuple(Handshake.decode(text) for text in texts)
                        digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
                        store.set({f"confirmed/{own}/{digest}": b""})
                        if store.get([f"confirmed/{rank}/{digest}" for rank in ranks], timeout_s=_READ_AGAIN_S) is None:
                            continue
                        return HandshakesReceived(now=monotonic(), handshakes=handshakes)
                raise StoreLost("not all replicas answered")
            except (StoreLost, ValueError) as error:  # the store ended with the replica that had it
                foreign = isinstance(error, NotAuthenticated)
                return HandshakeFailed(now=monotonic(), reason=f"the handshake failed: {error}", foreign=foreign)

        refused_before = 0
        if self._store is not None:
            refused_before = self._store.refused
            self._store.forget(_REFUSED)  # a quorum may have the number of an earlier one
        refused_at: float | None = None
        self._in_background(exchange, _HANDSHAKE_POLL_S)
        waiting = self._pending

        def poll() -> MembershipEvent:
            nonlocal refused_at
            assert waiting is not None
            event = waiting()
            if not isinstance(event, Tick):
                return event
            if refused_at is None and self._store is not None and self._store.refused > refused_before:
                refused_at = event.now
            if refused_at is None or event.now - refused_at < _AFTER_REFUSAL_S:
                return event
            if self._store is not None:  # the others need not wait for what will not come
                prefix = instruction.rendezvous.partition("/")[2]
                self._store.complete([f"{prefix}/handshake/{rank}" for rank in ranks], _REFUSED)
            self._pending = None
            reason = "a replica that came to this one's store does not know the secret of this one"
            return HandshakeFailed(now=event.now, reason=f"the handshake failed: {reason}", foreign=True)

        self._pending = poll

    def _connect(self, instruction: Connect) -> MembershipEvent | None:
        own, key = instruction.names[instruction.rank], instruction.rendezvous.rpartition("/")[2]
        others = [name for name in instruction.names if name != own]
        self.publish(_CONNECTED_KEY, key)
        self._key, self._names, self._transfers, self._failed_transfers = key, instruction.names, [], []
        self._outgoing = None
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
            stopped=lambda: self._stopped(own, others, key),
            fault=self._fault,
        )

        def connect() -> MembershipEvent:
            try:
                with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                    group.connect()
            except PeerLost as error:
                return _connection_failed(error)
            return GroupConnected(now=monotonic())

        if self.ranks.size > 1:  # they report together
            return connect()
        self._in_background(connect, _CONNECT_POLL_S)
        return None

    def _stopped(self, own: str, others: Sequence[str], key: str) -> list[str]:
        """The peers that will not answer any more. This is asked every half second while they are waited for."""
        quorum, ages = fetch_quorum_and_ages(self.config.lighthouse, timeout_s=self._heartbeat_timeout_s)
        dead = without_heartbeat(others, ages, self._heartbeat_timeout_s)
        stopped = [*dead, *gone_on_without(own, others, quorum), *self._failed_transfers]
        now, asked_at = monotonic(), self._asked_at
        if now - asked_at > _LOOK_EVERY_S:  # another wait has begun
            self._looks_at, self._away = now + _LOOK_EVERY_S, frozenset()
        elif not stopped and now > self._looks_at:
            said = self._ask_stores(others, _CONNECTED_KEY)
            away = frozenset(name for name, group in said.items() if group != key.encode())
            stopped = sorted(away & self._away)  # twice in a row: a peer may just have gone on, after the same step
            self._looks_at, self._away = monotonic() + _LOOK_EVERY_S, away
        self._asked_at = monotonic()
        return stopped

    def _watch(self) -> None:
        """Stop the heartbeats of this replica if it keeps the others waiting: the lighthouse would wait for it, too.

        The training thread may hang in a data loader or in a kernel. When it goes on, this replica registers again.
        """
        away: frozenset[str] = frozenset()
        while not self._closed.wait(_LOOK_EVERY_S):
            since, key, before = self._computing_since, self._key, away
            away = frozenset()
            waits = since is not None and keeps_others_waiting(monotonic() - since, self._step_s, _COLLECTIVE_TIMEOUT_S)
            if not waits or self._silenced or self._server is None:
                continue
            said = self._ask_stores(self._names, _CONNECTED_KEY)
            away = frozenset(name for name, group in said.items() if group not in (None, key.encode()))
            if not away & before or self._computing_since != since:
                continue
            self._silenced = True
            with contextlib.suppress(RuntimeError):
                self._server.shutdown()
            self._on_event(
                "waiting",
                f"the others go on without this replica, which hangs: it has computed one step for "
                f"{monotonic() - (since or 0.0):.0f} s, {_where(self._training_thread)}",
            )

    def _ask_stores(self, names: Sequence[str], key: str) -> dict[str, bytes | None]:
        """Read a key from the stores of replicas, all at once: None if one does not answer, nothing if it has none."""
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(lambda name: self._ask_store(name, key), names), strict=True))

    def _ask_store(self, name: str, key: str) -> bytes | None:
        try:
            with open_store(name.rpartition("@")[2], self._secret, timeout_s=_STORE_TIMEOUT_S) as store:
                found = store.get([key], timeout_s=0.0)
            return found[0] if found is not None else b""
        except NotAuthenticated:  # it is of another fleet
            return b""
        except StoreLost:
            return None

    def _heartbeat_ages(self) -> dict[str, float]:
        return fetch_heartbeat_ages(self.config.lighthouse, timeout_s=self._heartbeat_timeout_s)

    def _load_checkpoint(self) -> MembershipEvent:
        loaded = self.state.refresh()
        if loaded is None:
            return NoNewerCheckpoint(now=monotonic())
        step, lineage = loaded
        return CheckpointLoaded(now=monotonic(), step=step, lineage=lineage)

    def _send_state(self, receivers: Sequence[int]) -> MembershipEvent:
        """Begin to send the state, to all receivers at once, while this replica computes steps."""
        group, names = self._group, self._names
        assert group is not None
        self._outgoing = outgoing = OutgoingState(self.state.pack(), len(receivers))

        def send(rank: int) -> None:
            try:
                group.send(outgoing.description, rank)
                group.send_tensors(outgoing.messages(), rank)
            except PeerLost:
                self._failed_transfers.append(names[rank])  # then the step fails, too

        self._transfers = [
            threading.Thread(target=send, args=(rank,), daemon=True, name="ebbflow-state") for rank in receivers
        ]
        for transfer in self._transfers:
            transfer.start()
        return StateSent(now=monotonic())

    def _receive_state(self, instruction: ReceiveState) -> MembershipEvent:
        """Receive the state, while this replica hears the steps that the others compute meanwhile, and load it."""
        group = self._group
        assert group is not None
        incoming = IncomingState(group, instruction.source)
        try:
            if self.begin_to_hear is not None and instruction.listen and not incoming.wait(SOON_S):
                group.patience = timedelta(seconds=_TRANSFER_S)
                self.listener = Listener(self.begin_to_hear(), self.membership.listening, incoming, rank=group.rank)
                self._wait_for_state(incoming, self.listener)
            state = incoming.take()
        except PeerLost as error:
            return _connection_failed(error)
        step, lineage = self.state.unpack(state)
        return StateReceived(now=monotonic(), step=step, lineage=lineage, size=incoming.size)

    def _wait_for_state(self, incoming: IncomingState, listener: Listener) -> None:
        """Raises `PeerLost` if the group breaks meanwhile, and `LeftFleet` when this replica has told the others so."""
        while not incoming.wait(_LISTEN_POLL_S):
            if (failure := listener.failure) is not None:
                raise LeftFleet if listener.leaves else failure


def _where(thread: int) -> str:
    """Where a thread is, in the code that called it last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "at a place that is not known"
    place = traceback.extract_stack(frame)[-1]
    return f"in {place.name} ({place.filename}, line {place.lineno})"


def _published(text: bytes | None) -> PublishedGroup | None:
    """The quorum group that a replica has published; None if it is not known."""
    try:
        return PublishedGroup.decode(text) if text else PublishedGroup() if text is not None else None
    except ValueError:
        return None


def _connection_failed(error: PeerLost) -> ConnectionFailed:
    return ConnectionFailed(now=monotonic(), reason=str(error), backend=isinstance(error, BackendFailed))
