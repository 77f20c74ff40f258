"""A fleet in virtual time: the membership protocol of every replica, a lighthouse, and a network with faults.

Every replica runs the `Membership` of the live engine. What surrounds it is modelled here, as `connection.py`, gloo and
torchft's lighthouse (0.2.0) behave: requests and their answers, stores in which replicas meet, groups that connect and
break, sums that arrive at some replicas and not at others. Nothing waits: the clock is a number, and a seed reproduces
a history, with all its delays and faults, exactly.

    killed    a process ends, and its connections break; its heartbeat is missed after the timeout
    paused    a process stands still and its connections stay; later it goes on with what it was doing
    hanging   a process computes on and on, and sends heartbeats
    cut off   a replica does not reach the lighthouse; its peers it does
    cut link  two replicas do not reach each other; both reach the lighthouse
    stalled   the lighthouse stands still, and then takes everybody for dead
    restarted the lighthouse ends, is away for a while, and begins again with quorum 1
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from ebbflow.data.ledger import Assignment
from ebbflow.live import membership_events as m
from ebbflow.live.membership import Membership, MembershipPhase, initial_lineage, without_heartbeat
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S

HEARTBEAT_TIMEOUT_S = 0.8
CONNECT_TIMEOUT_S = 10.0
COLLECTIVE_TIMEOUT_S = 60.0
STORE_TIMEOUT_S = 2.0
NOTICE_CUT_S = 14.0
"""After which a replica that waits for its peers knows that it does not reach one: it looks twice, for 5 s and 2 s."""
KEEP_ALIVE_S = 80.0
"""After which torchft's client notices that a machine has vanished: it asks every 60 s and waits for 20 s."""
TICK_S = {m.AskLighthouse: 1.0, m.SendHandshake: 0.4, m.Connect: 0.4}
"""How often time is reported while these are waited for; more rarely than in reality, which saves events."""
SOON_S = 0.5
"""For which a replica waits for the state before it hears the steps of the others."""
ROOT = initial_lineage("the same weights for all")


@dataclass(frozen=True)
class Commit:
    """A step that a replica has committed."""

    time: float
    replica: str
    group: tuple[str, ...]
    parent: int
    lineage: int
    assignment: Assignment
    began: float
    """When the replica began the step, at the latest."""


@dataclass(eq=False)
class Replica:
    """One incarnation of a replica."""

    name: str
    membership: Membership
    position: int = 0
    """Committed samples; part of the state that peers send each other."""
    todo: deque[m.Instruction] = field(default_factory=deque)
    waits: int = 0
    """Number of the wait; what was begun before is not waited for any longer."""
    waiting_for: m.Instruction | None = None
    paused: bool = False
    dead: bool = False
    cut_off: bool = False
    silent_since: float | None = None
    """Since when the lighthouse hears nothing of it."""
    heard_from: float = 0.0
    """When its first heartbeat came to this lighthouse, or comes."""
    registered: bool = False
    """Whether it sends heartbeats, as far as it depends on itself."""
    unresponsive: float = -1.0
    """When it was last paused, cut off or without a lighthouse."""
    backlog: list[Callable[[], None]] = field(default_factory=list)
    group: SimulatedGroup | None = None
    published: m.PublishedGroup = m.PublishedGroup()
    leaving: bool = False
    hangs_until: float = 0.0
    step_began: float = 0.0
    silenced: bool = False
    """Whether it has stopped its heartbeats since it kept the others waiting."""
    committed: list[Commit] = field(default_factory=list)
    heard: deque[m.StepCommitted] = field(default_factory=deque)
    """Steps of the others that it has heard while the state was on its way."""

    @property
    def state(self) -> m.ReplicaState:
        return self.membership.state


@dataclass(eq=False)
class SimulatedGroup:
    """A connected group: who is in it, and how far the sum of the current step is."""

    names: tuple[str, ...]
    connecting: dict[str, int] = field(default_factory=dict)
    """Replicas that have begun to connect -> the number of their wait."""
    gone: set[str] = field(default_factory=set)
    """Those whose connections are closed."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Replicas that have begun the sum of a step -> the number of their wait."""
    sent: dict[int, tuple[m.ReplicaState, int, Replica]] = field(default_factory=dict)
    """Rank that needs it -> the state that is on its way, the samples that it has, and whose it is."""
    arrives: dict[str, float] = field(default_factory=dict)
    """Replicas that listen -> when the state has arrived, if nothing breaks before."""
    summing: set[str] = field(default_factory=set)
    """Replicas that have not completed the sum which all have begun."""
    confirmed: set[str] = field(default_factory=set)
    """Replicas that have the sum of the step."""
    all_confirmed: bool = False


@dataclass(eq=False)
class Meeting:
    """What replicas of a quorum have written into the store of one of them."""

    handshakes: dict[int, m.Handshake] = field(default_factory=dict)
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    waiting: dict[int, tuple[Replica, int]] = field(default_factory=dict)


class Violation(AssertionError):
    """A guarantee that does not hold."""


class SimulatedFleet:
    """A fleet whose history follows from the seed. `run_until` lets time pass."""

    def __init__(
        self,
        random: Random,
        *,
        min_replicas: int = 1,
        join_timeout_s: float = 10.0,
        step_s: tuple[float, float] = (0.1, 1.0),
        latency_s: float = 0.002,
        checkpoint_every: int = 0,
        transfer_s: tuple[float, float] = (0.01, 0.3),
    ) -> None:
        """`step_s`: shortest and longest time that a replica computes. `transfer_s`: that the state travels.
        `latency_s`: mean of most messages; one in fifty takes up to 0.3 s, so that they overtake each other."""
        self.random = random
        self.min_replicas = min_replicas
        self.join_timeout_s = join_timeout_s
        self.step_s = step_s
        self.latency_s = latency_s
        self.checkpoint_every = checkpoint_every
        self.transfer_s = transfer_s
        self.now = 0.0
        self.messages: dict[str, int] = defaultdict(int)
        self.replicas: dict[str, Replica] = {}
        self.cut_links: set[frozenset[str]] = set()
        self.commits: list[Commit] = []
        self.parents: dict[int, int] = {}
        self.checkpoint = (0, ROOT, 0)
        self.meetings: dict[str, Meeting] = defaultdict(Meeting)
        self.groups: dict[str, SimulatedGroup] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._names = count()
        # The lighthouse.
        self.away = False
        self.stalled_since: float | None = None
        self.quorum_id = 0
        self.previous: tuple[str, ...] = ()
        self.asked: dict[str, tuple[float, m.AskLighthouse, int]] = {}
        self._tick_at: float | None = None

    # Time -------------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._sequence), what))

    def run_until(self, time: float, *, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether `stop` said so before."""
        events = self._events
        while events and events[0][0] <= time:
            self.now, _, what = heapq.heappop(events)
            what()
            if stop is not None and stop():
                return True
        self.now = time
        return False

    def delay(self) -> float:
        if self.random.random() < 0.02:
            return self.random.uniform(0.0, 0.3)
        return self.latency_s * (0.5 + self.random.random())

    def to(self, replica: Replica, what: Callable[[], None], delay_s: float) -> None:
        """Let something happen in the process of a replica: when it goes on, if it is paused then; never if it died."""

        def happen() -> None:
            if replica.paused:
                replica.backlog.append(happen)
            elif not replica.dead:
                what()

        self.at(delay_s, happen)

    def answer(self, replica: Replica, event: Callable[[], m.MembershipEvent], delay_s: float, kind: str) -> None:
        """Complete what a replica waits for, unless it does not wait for it any longer by then."""
        wait = replica.waits

        def report() -> None:
            if replica.waits == wait:
                replica.waits += 1
                replica.waiting_for = None
                self.report(replica, event())

        self.messages[kind] += 1
        self.to(replica, report, delay_s)

    # Replicas ---------------------------------------------------------------------------------------------------------

    def start(self) -> Replica:
        """Start a replica with the newest checkpoint, as a launcher does."""
        number = next(self._names)
        # Names sort in any order, so that newcomers come before and after those that are there.
        name = f"{self.random.randrange(10**6):06}:{number}"
        membership = Membership(
            {"job": "j"}, min_replicas=self.min_replicas, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )  # fmt: skip
        step, lineage, position = self.checkpoint
        membership.state = m.ReplicaState(step=step, lineage=lineage)
        replica = self.replicas[name] = Replica(name, membership, position=position, silent_since=-100.0)
        self.report(replica, m.Started(now=self.now))
        return replica

    def kill(self, replica: Replica) -> None:
        replica.dead = True
        self._silence(replica)
        self._close(replica)
        for rendezvous, meeting in list(self.meetings.items()):  # its store ends with it
            if rendezvous.startswith(f"{replica.name}/"):
                for other, wait in list(meeting.waiting.values()):
                    if other.waits == wait:
                        self.answer(
                            other, lambda: m.HandshakeFailed(now=self.now, reason="no store"), self.delay(), "store"
                        )

    def pause(self, replica: Replica) -> None:
        replica.paused = True
        self._silence(replica)

    def resume(self, replica: Replica) -> None:
        if replica.dead or not replica.paused:
            return
        replica.paused = False
        replica.unresponsive = self.now
        self._hear(replica, self.random.uniform(0, HEARTBEAT_INTERVAL_S))
        backlog, replica.backlog = replica.backlog, []
        for what in backlog:
            what()

    def cut_off(self, replica: Replica) -> None:
        replica.cut_off = True
        self._silence(replica)

    def reconnect(self, replica: Replica) -> None:
        replica.cut_off = False
        replica.unresponsive = self.now
        self._hear(replica, self.random.uniform(0, 3 * HEARTBEAT_INTERVAL_S))

    def _silence(self, replica: Replica) -> None:
        if replica.silent_since is None:
            replica.silent_since = self.now
        replica.unresponsive = self.now

    def _hear(self, replica: Replica, after_s: float) -> None:
        """Its heartbeats come from then on, if it sends any."""
        replica.heard_from = self.now + after_s if replica.registered else math.inf

    def running(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.dead]

    def report(self, replica: Replica, event: m.MembershipEvent) -> None:
        """What `FleetConnection._run` does: hand over an event, and execute what follows."""
        self.follow(replica, replica.membership.handle(event))

    def follow(self, replica: Replica, instructions: list[m.Instruction]) -> None:
        replica.todo.extend(instructions)
        while replica.todo:
            outcome = self.execute(replica, replica.todo.popleft())
            if outcome is not None:
                replica.todo.extend(replica.membership.handle(outcome))
        if replica.membership.phase is MembershipPhase.IDLE and not replica.dead:
            replica.waits += 1  # nothing is waited for: the training loop goes on
            replica.waiting_for = None
            wait = replica.waits
            begins = 0.0 if replica.committed else self.random.uniform(0, 0.5)
            self.to(replica, lambda: None if replica.waits != wait else self.request_step(replica), begins)

    def request_step(self, replica: Replica) -> None:
        state = replica.state
        registered, replica.silenced = not replica.silenced, False
        self.report(
            replica, m.StepRequested(now=self.now, step=state.step, lineage=state.lineage, registered=registered)
        )

    def wait(self, replica: Replica, instruction: m.Instruction) -> None:
        """Begin to wait, in the place of what was waited for before; time is reported meanwhile."""
        replica.waits += 1
        replica.waiting_for = instruction
        tick_s = TICK_S.get(type(instruction))
        if tick_s is not None:
            self._tick(replica, replica.waits, tick_s)

    def _tick(self, replica: Replica, wait: int, every_s: float) -> None:
        def tick() -> None:
            if replica.waits != wait:
                return
            event = m.ToldToLeave if replica.leaving else m.Tick
            self.report(replica, event(now=self.now))
            if replica.waits == wait and not replica.dead:
                self._tick(replica, wait, every_s)

        self.to(replica, tick, every_s)

    def execute(self, replica: Replica, instruction: m.Instruction) -> m.MembershipEvent | None:
        match instruction:
            case m.RecordEvent():
                pass
            case m.Unregister():
                replica.registered = False
                self._silence(replica)
                self._hear(replica, 0.0)
            case m.CheckLinks():
                self.wait(replica, instruction)
                self._check_links(replica, instruction)
            case m.PublishGroup():
                replica.published = instruction.group
            case m.DropConnections():
                self._close(replica)
            case m.LeaveFleet():
                if instruction.save_state:
                    self._save(replica)
                self.kill(replica)
            case m.Register():
                self.wait(replica, instruction)
                self.to(replica, self._registering(replica, replica.waits), instruction.after_s + self.delay())
            case m.AskLighthouse():
                self.wait(replica, instruction)
                wait = replica.waits
                self.messages["request"] += 1
                self.at(instruction.after_s + self.delay(), lambda: self._asked(replica, instruction, wait))
            case m.CheckHeartbeats():
                return self._heartbeats(replica, instruction)
            case m.SendHandshake():
                self.wait(replica, instruction)
                self._meet(replica, instruction)
            case m.Connect():
                self.wait(replica, instruction)
                self._connect(replica, instruction)
            case m.LoadCheckpoint():
                step, lineage, position = self.checkpoint
                if step <= replica.state.step:
                    return m.NoNewerCheckpoint(now=self.now)
                self._replace(replica, lineage, position, replica)
                return m.CheckpointLoaded(now=self.now, step=step, lineage=lineage)
            case m.SendState():  # it travels while the sender computes
                assert replica.group is not None
                replica.group.sent |= dict.fromkeys(instruction.to, (replica.state, replica.position, replica))
                for rank in instruction.to:
                    receiver = self.replicas[replica.group.names[rank]]
                    if receiver.group is replica.group and isinstance(receiver.waiting_for, m.ReceiveState):
                        self._receive(receiver)
                return m.StateSent(now=self.now)
            case m.ReceiveState():
                self.wait(replica, instruction)
                replica.heard.clear()
                self._watch(replica, self.now)
                self._receive(replica)
            case m.ComputeStep() if replica.heard:
                self.wait(replica, instruction)
                self.to(replica, self._replay(replica, replica.waits), 0.02)
            case m.ComputeStep():
                self.wait(replica, instruction)
                replica.step_began = self.now
                seconds = self.random.uniform(*self.step_s)
                self.to(replica, self._computed(replica, replica.waits), max(seconds, replica.hangs_until - self.now))
                if replica.hangs_until > self.now:
                    self._silence_if_hanging(replica, replica.waits, COLLECTIVE_TIMEOUT_S + 2 * self.step_s[1])
            case _:
                raise NotImplementedError(instruction)
        return None

    def _silence_if_hanging(self, replica: Replica, wait: int, after_s: float) -> None:
        """A thread of the replica looks every five seconds whether peers have given up the step; twice."""
        group = replica.group

        def look() -> None:
            if replica.waits == wait and group is not None:
                if group.gone:
                    replica.registered, replica.silenced = False, True
                    self._silence(replica)
                    self._hear(replica, 0.0)
                else:
                    self._silence_if_hanging(replica, wait, 5.0)

        self.to(replica, look, after_s + 10.0)

    def _registering(self, replica: Replica, wait: int) -> Callable[[], None]:
        def register() -> None:
            if replica.waits != wait:
                return
            replica.waits += 1
            replica.waiting_for = None
            if self.away or replica.cut_off:
                reason = "nobody answers"
                self.report(replica, m.LighthouseUnreachable(now=self.now, reason=reason))
                return
            replica.registered = True
            self._hear(replica, self.random.uniform(0, HEARTBEAT_INTERVAL_S))
            self.report(replica, m.Registered(now=self.now, name=replica.name, store=replica.name))

        return register

    def _replace(self, replica: Replica, lineage: int, position: int, giver: Replica) -> None:
        """A replica takes over another state.

        It may lose a step that it committed only if it, or the replica whose state it gets, was taken for dead after
        that, or shortly before.
        """
        dropped = []
        for commit in reversed(replica.committed):
            if self.descends(lineage, commit.lineage):
                break
            dropped.append(commit)
        since = dropped[-1].began - 2.0 if dropped else 0.0
        if dropped and max(replica.unresponsive, giver.unresponsive) < since:
            raise Violation(f"{replica.name} gives up {len(dropped)} committed steps, the first of {dropped[-1].time}")
        del replica.committed[len(replica.committed) - len(dropped) :]
        replica.position = position

    def descends(self, lineage: int, ancestor: int) -> bool:
        """Whether a state contains another one."""
        return ancestor in self.ancestry(lineage)

    def ancestry(self, lineage: int) -> Iterator[int]:
        """A state and those that it followed from."""
        while True:
            yield lineage
            if lineage not in self.parents:
                return
            lineage = self.parents[lineage]

    # Stores and groups ------------------------------------------------------------------------------------------------

    def linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut_links

    def _meet(self, replica: Replica, instruction: m.SendHandshake) -> None:
        owner = self.replicas[instruction.rendezvous.partition("/")[0]]
        if owner.dead:
            self.answer(replica, lambda: m.HandshakeFailed(now=self.now, reason="no store"), self.delay(), "store")
            return
        if not self.linked(owner.name, replica.name):
            failed = m.HandshakeFailed(now=self.now + CONNECT_TIMEOUT_S, reason="the store cannot be reached")
            self.answer(replica, lambda: failed, CONNECT_TIMEOUT_S, "store")
            return
        meeting, wait = self.meetings[instruction.rendezvous], replica.waits

        def write() -> None:
            if replica.waits == wait and not owner.dead:
                meeting.handshakes[instruction.rank] = instruction.handshake
                meeting.waiting[instruction.rank] = (replica, wait)
                self._confirm(meeting, instruction.size)

        self.messages["store"] += 4  # two writes and two reads, each with an answer
        self.at(self.delay(), write)

    def _confirm(self, meeting: Meeting, size: int) -> None:
        """Each replica that waits says which handshakes it has read; who has read the same as all others goes on."""
        if len(meeting.handshakes) < size:
            return
        read = tuple(meeting.handshakes[rank] for rank in range(size))
        digest = hash(tuple((one.name, one.attempt) for one in read))
        for rank, (replica, wait) in meeting.waiting.items():
            if replica.waits == wait and not replica.paused and not replica.dead:
                meeting.confirmed.add((rank, digest))
        if all((rank, digest) in meeting.confirmed for rank in range(size)):
            for replica, wait in meeting.waiting.values():
                if replica.waits == wait:
                    self.answer(
                        replica, lambda: m.HandshakesReceived(now=self.now, handshakes=read), self.delay(), "store"
                    )
            meeting.waiting.clear()
        elif any(replica.paused for replica, _ in meeting.waiting.values()):
            self.at(0.1, lambda: self._confirm(meeting, size))

    def _connect(self, replica: Replica, instruction: m.Connect) -> None:
        group = self.groups.setdefault(instruction.rendezvous, SimulatedGroup(instruction.names))
        replica.group = group
        group.connecting[replica.name] = replica.waits
        names = instruction.names
        timed_out = m.ConnectionFailed(now=self.now + CONNECT_TIMEOUT_S, reason="it takes too long")
        self.messages["connect"] += len(names) - 1
        if group.connecting.keys() == set(names) and not group.gone and not self._cut(group):
            for name, wait in group.connecting.items():
                peer = self.replicas[name]
                if peer.waits == wait:
                    self.answer(peer, lambda: m.GroupConnected(now=self.now), self.delay(), "connect")
        else:
            self.answer(replica, lambda: timed_out, CONNECT_TIMEOUT_S, "timeout")

    def _close(self, replica: Replica) -> None:
        group, replica.group = replica.group, None
        if group is None:
            return
        group.gone.add(replica.name)
        for name in group.names:
            peer = self.replicas[name]
            if peer.group is group and isinstance(peer.waiting_for, m.ComputeStep | m.ReceiveState):
                # Who computes notices it when the sum begins. To a sum that is under way, this one may have contributed
                # everything.
                lacks = {name, replica.name} <= group.summing and not group.all_confirmed
                busy = isinstance(peer.waiting_for, m.ComputeStep) or name in group.summing
                if busy and name not in group.arrived and not lacks:
                    continue
                self._fail(peer, f"{replica.name} is gone", self.delay())

    def _fail(self, replica: Replica, reason: str, delay_s: float) -> None:
        kind = m.StepFailed if isinstance(replica.waiting_for, m.ComputeStep) else m.ConnectionFailed
        wait = replica.waits

        def fail() -> None:
            if replica.waits == wait:
                replica.waits += 1
                replica.waiting_for = None
                replica.heard.clear()
                self.report(replica, kind(now=self.now, reason=reason))

        self.to(replica, fail, delay_s)

    def _watch(self, replica: Replica, began: float) -> None:
        """While a replica waits for its peers, it asks every half second who has stopped."""
        wait, group = replica.waits, replica.group

        def look() -> None:
            if replica.waits != wait or group is None:
                return
            others = [name for name in group.names if name != replica.name]
            stopped = without_heartbeat(others, self.ages() if self._reaches(replica) else {}, HEARTBEAT_TIMEOUT_S)
            self.messages["page"] += 1
            cut = any(not self.linked(replica.name, name) for name in others) and self.now - began > NOTICE_CUT_S
            if stopped or cut or self.now - began > COLLECTIVE_TIMEOUT_S:
                self._fail(replica, f"no heartbeat of {stopped}", 0.0)
            else:
                self._watch(replica, began)

        self.to(replica, look, 0.5)

    def _receive(self, replica: Replica) -> None:
        """If the state is on its way to a replica, it arrives after a while."""
        group, membership = replica.group, replica.membership
        assert group is not None and membership.group is not None
        if group.gone:
            self._fail(replica, "a peer is gone", self.delay())
        elif (found := group.sent.get(membership.group.rank)) is not None:
            seconds = self.random.uniform(*self.transfer_s)
            if seconds <= SOON_S:
                self.answer(replica, self._received(replica, *found), seconds, "state")
            else:
                group.arrives[replica.name] = self.now + seconds
                self.to(replica, self._computed(replica, replica.waits), SOON_S)

    def _received(
        self, replica: Replica, state: m.ReplicaState, position: int, giver: Replica
    ) -> Callable[[], m.StateReceived]:
        def received() -> m.StateReceived:
            self._replace(replica, state.lineage, position, giver)
            return m.StateReceived(now=self.now, step=state.step, lineage=state.lineage, size=1)

        return received

    def _listen(self, replica: Replica, group: SimulatedGroup, event: m.StepCommitted) -> None:
        """A replica has heard a step; when the state is there it loads it, and else it hears the next one."""
        assert replica.membership.group is not None
        rank = replica.membership.group.rank
        if rank in event.leaving:
            self.kill(replica)
            return
        replica.heard.append(event)
        if self.now >= group.arrives[replica.name]:
            self.answer(replica, self._received(replica, *group.sent[rank]), 0.0, "state")
        elif event.leaving:
            self._fail(replica, "a replica left", 0.0)
        else:
            self._computed(replica, replica.waits)()

    def _replay(self, replica: Replica, wait: int) -> Callable[[], None]:
        def replay() -> None:
            if replica.waits == wait:
                replica.waits += 1
                replica.waiting_for = None
                self._commit(replica, replica.heard.popleft())

        return replay

    # Steps ------------------------------------------------------------------------------------------------------------

    def _computed(self, replica: Replica, wait: int) -> Callable[[], None]:
        """A replica has its part of the gradient and begins the sum."""

        def begin() -> None:
            group = replica.group
            if replica.waits != wait or group is None:
                return
            if group.gone:
                self._fail(replica, "a peer is gone", 0.0)
                return
            group.arrived[replica.name] = wait
            waits_already = isinstance(replica.waiting_for, m.ReceiveState)
            if not waits_already and (len(group.arrived) < len(group.names) or self._cut(group)):
                self._watch(replica, self.now)
            if len(group.arrived) == len(group.names):
                self._add_up(group)

        return begin

    def _cut(self, group: SimulatedGroup) -> bool:
        return any(link <= {*group.names} for link in self.cut_links)

    def _add_up(self, group: SimulatedGroup) -> None:
        if group.gone or len(group.arrived) < len(group.names):
            return
        if self._cut(group):  # what was sent is sent again, until it arrives or somebody gives up
            self.at(0.2, lambda: self._add_up(group))
            return
        peers = [self.replicas[name] for name in group.names]
        waits, group.arrived = group.arrived, {}
        group.summing.update(group.names)
        steps = {peer.name: peer.waiting_for for peer in peers if isinstance(peer.waiting_for, m.ComputeStep)}
        states = {(peer.state.step, peer.state.lineage, peer.position) for peer in peers if peer.name in steps}
        (listening,) = {step.receiving for step in steps.values()}
        arrived = frozenset(rank for rank in listening if group.names[rank] in steps)
        if len(states) != 1:
            raise Violation(f"{group.names} compute a step with different states: {states}")
        ((_, _, position),) = states
        step = Assignment(0, position, position + 8)
        leaving = frozenset(rank for rank, peer in enumerate(peers) if peer.leaving)
        wanted = any(peer.membership.wants_lighthouse(self.now) for peer in peers)
        event = m.StepCommitted(
            now=self.now, assignment=step, leaving=leaving, lighthouse_wanted=wanted, arrived=arrived
        )
        self.messages["sum"] += 2 * len(peers)
        for peer in peers:
            self.to(peer, self._sum_arrives(peer, group, waits, event), self.delay())

    def _sum_arrives(
        self, replica: Replica, group: SimulatedGroup, waits: dict[str, int], event: m.StepCommitted
    ) -> Callable[[], None]:
        """A replica has the sum; when all have said so, each learns it and commits the step."""

        def arrive() -> None:
            if replica.waits != waits[replica.name] or replica.group is not group:
                return
            if group.gone & group.summing:  # what it needs may never come
                self._fail(replica, "a peer is gone", 0.0)
                return
            group.confirmed.add(replica.name)
            if len(group.confirmed) == len(group.names):
                group.confirmed.clear()
                group.all_confirmed = True
                for name in group.names:
                    peer = self.replicas[name]
                    self.to(peer, lambda peer=peer: confirm(peer), self.delay())  # type: ignore[misc]

        def confirm(peer: Replica) -> None:
            if peer.waits != waits[peer.name] or peer.group is not group:
                return
            if group.gone & group.summing and self.random.random() < 0.5:  # the word of another was on its way, or not
                self._fail(peer, "a peer is gone", 0.0)
                return
            group.summing.discard(peer.name)
            group.all_confirmed = bool(group.summing)
            if isinstance(peer.waiting_for, m.ReceiveState):
                self._listen(peer, group, event)
                return
            peer.waits += 1
            peer.waiting_for = None
            self._commit(peer, event)

        return arrive

    def _commit(self, replica: Replica, event: m.StepCommitted) -> None:
        parent, membership = replica.state.lineage, replica.membership
        assert membership.group is not None
        names = membership.group.names
        instructions = membership.handle(dataclasses.replace(event, now=self.now))
        began = min(replica.step_began, event.now - self.step_s[1])
        commit = Commit(self.now, replica.name, names, parent, replica.state.lineage, event.assignment, began)
        replica.committed.append(commit)
        replica.position = event.assignment.stop
        self.commits.append(commit)
        self.parents[commit.lineage] = parent
        if names[0] == replica.name and self.checkpoint_every and replica.state.step % self.checkpoint_every == 0:
            self._save(replica)
        self.follow(replica, instructions)

    def _save(self, replica: Replica) -> None:
        if replica.state.step > self.checkpoint[0]:
            self.checkpoint = (replica.state.step, replica.state.lineage, replica.position)

    # The lighthouse ---------------------------------------------------------------------------------------------------

    def ages(self) -> dict[str, float]:
        """Seconds since the last heartbeat of every replica that this lighthouse has heard of."""
        now = self.now if self.stalled_since is None else self.stalled_since
        ages = {}
        for replica in self.replicas.values():
            if replica.heard_from <= now and not (replica.paused or replica.dead or replica.cut_off):
                replica.silent_since = None
            if replica.silent_since is None:
                ages[replica.name] = 0.0
            elif replica.silent_since >= 0.0:
                ages[replica.name] = self.now - replica.silent_since
        return ages

    def _reaches(self, replica: Replica) -> bool:
        return not (self.away or replica.cut_off or self.stalled_since is not None)

    def _heartbeats(self, replica: Replica, instruction: m.CheckHeartbeats) -> m.HeartbeatsReceived:
        self.messages["page"] += 1
        if not self._reaches(replica):
            return m.HeartbeatsReceived(now=self.now, ages={})
        ages = self.ages()
        dead = without_heartbeat(ages, ages, HEARTBEAT_TIMEOUT_S)
        groups: dict[str, m.PublishedGroup | None] = {}
        for name in ages.keys() - {*dead, *instruction.besides} if instruction.besides else ():
            self.messages["store"] += 1
            other = self.replicas[name]
            answers = not (other.paused or other.dead) and self.linked(name, replica.name)
            groups[name] = other.published if answers else None
        return m.HeartbeatsReceived(now=self.now, ages=ages, groups=groups)

    def _check_links(self, replica: Replica, instruction: m.CheckLinks) -> None:
        """A dead process refuses at once; a paused one and a cut link do not answer."""

        def checked() -> m.LinksChecked:
            ages = self.ages() if self._reaches(replica) else {}
            alive = [name for name in instruction.names if ages.get(name, math.inf) <= HEARTBEAT_TIMEOUT_S]
            silent = tuple(
                name
                for name in alive
                if self.replicas[name].dead or self.replicas[name].paused or not self.linked(name, replica.name)
            )
            return m.LinksChecked(now=self.now, unreachable=silent)

        self.messages["store"] += len(instruction.names)
        cut = any(not self.linked(name, replica.name) for name in instruction.names)
        self.answer(replica, checked, instruction.after_s + (STORE_TIMEOUT_S if cut else self.delay()), "store")

    def stall(self, seconds: float) -> None:
        if self.stalled_since is None and not self.away:
            self.stalled_since = self.now
            self.at(seconds, self._go_on)

    def _go_on(self) -> None:
        if self.stalled_since is None:
            return
        for replica in self.running():
            if replica.silent_since is None:
                replica.silent_since = self.stalled_since
            self._hear(replica, self.random.uniform(0, HEARTBEAT_INTERVAL_S))
        self.stalled_since = None
        self._form_quorum()

    def restart_lighthouse(self, seconds: float) -> None:
        """End it, and start it again later; requests fail at once, and heartbeats begin anew."""
        if self.away:
            return
        self.away, self.stalled_since = True, None
        asked, self.asked = self.asked, {}
        for name, (_, _, wait) in asked.items():
            replica = self.replicas[name]
            if replica.waits == wait:  # one that is cut off learns it from the keep-alive of its connection
                self._refuse(replica, after_s=KEEP_ALIVE_S if replica.cut_off else 0.0)
        for replica in self.replicas.values():
            replica.silent_since = -100.0
        self.at(seconds, self._is_back)

    def _is_back(self) -> None:
        self.away, self.quorum_id, self.previous = False, 0, ()
        for replica in self.running():
            if replica.membership.name:
                self._hear(replica, self.random.uniform(0, 0.6))

    def _refuse(self, replica: Replica, after_s: float = 0.0) -> None:
        refused = "refused"
        self.answer(
            replica, lambda: m.LighthouseUnreachable(now=self.now, reason=refused), after_s + self.delay(), "answer"
        )

    def _asked(self, replica: Replica, request: m.AskLighthouse, wait: int) -> None:
        if replica.dead or replica.waits != wait:
            return
        if self.away:
            self._refuse(replica)
        elif replica.cut_off or self.stalled_since is not None:  # it is repeated by TCP
            self.at(0.2, lambda: self._asked(replica, request, wait))
        else:
            if not replica.paused:
                self._hear(replica, 0.0)  # a request is a heartbeat
            self.asked[replica.name] = (self.now, request, wait)
            self._form_quorum()

    def _form_quorum(self) -> None:
        """As torchft's lighthouse: at every request, and every 50 ms."""
        if self.away or self.stalled_since is not None or not self.asked:
            return
        healthy = {name for name, age in self.ages().items() if age < HEARTBEAT_TIMEOUT_S}
        here = sorted(name for name in self.asked if name in healthy)
        fast = bool(self.previous) and set(self.previous) <= set(here)
        late = (
            len(here) < len(healthy)
            and self.now - min((self.asked[n][0] for n in here), default=0.0) < self.join_timeout_s
        )
        if not fast and (len(here) < self.min_replicas or not here or len(here) <= len(healthy) // 2 or late):
            if self._tick_at is None or self._tick_at <= self.now:
                self._tick_at = self.now + 0.05
                self.at(0.05, self._form_quorum)
            return
        replicas = tuple(here)
        self.quorum_id += replicas != self.previous
        self.previous = replicas
        asked = [self.asked.pop(name) for name in replicas]
        if self.asked:
            self.at(0.05, self._form_quorum)
        groups = tuple(one.group for _, one, _ in asked)
        steps, unreachable = tuple(one.step for _, one, _ in asked), tuple(one.unreachable for _, one, _ in asked)
        established = tuple(one.established for _, one, _ in asked)
        for rank, (name, (_, _, wait)) in enumerate(zip(replicas, asked, strict=True)):
            replica = self.replicas[name]
            if replica.waits != wait:
                continue
            formed = partial(
                m.QuorumFormed, quorum_id=self.quorum_id, replicas=replicas, rank=rank, store=replicas[0],
                groups=groups, established=established, steps=steps, unreachable=unreachable,
            )  # fmt: skip
            self.answer(replica, lambda formed=formed: formed(now=self.now), self.delay(), "answer")  # type: ignore[misc]


# Histories ------------------------------------------------------------------------------------------------------------

FAULTS = (
    "start", "kill", "kill two", "pause", "leave", "cut off", "stall", "restart lighthouse", "cut link", "hang",
)  # fmt: skip


def random_history(seed: int, *, majority: bool = False, faults: tuple[str, ...] = FAULTS) -> SimulatedFleet:
    """Let a small fleet live through faults that follow from the seed, then let it recover; raises `Violation`.

    `majority`: fewer than a majority of all replicas that ever run at a time do not train.
    """
    random = Random(seed)
    size = random.randint(2, 4)
    most = size + 1
    fleet = SimulatedFleet(
        random,
        min_replicas=most // 2 + 1 if majority else 1,
        join_timeout_s=random.choice((1.0, 10.0)),
        step_s=random.choice(((0.1, 0.3), (0.2, 1.0), (0.2, 3.0))),
        checkpoint_every=random.choice((0, 3)),
        transfer_s=random.choice(((0.01, 0.3), (0.1, 6.0))),
    )
    for _ in range(size):
        fleet.at(random.uniform(0, 0.5), fleet.start)
    time = random.uniform(0.5, 4.0)
    for _ in range(random.randint(1, 6)):
        fleet.run_until(time)
        _cause(fleet, random.choice(faults), random, most)
        time += random.choice((random.uniform(0.0, 0.8), random.uniform(0.0, 4.0)))
    fleet.run_until(time)
    check_lineages(fleet)
    recover(fleet)
    return fleet


def _cause(fleet: SimulatedFleet, fault: str, random: Random, most: int) -> None:
    running = fleet.running()
    if fault == "restart lighthouse":
        fleet.restart_lighthouse(random.uniform(0.0, 2.0))
    elif fault == "stall":
        fleet.stall(random.uniform(0.1, 2.0))
    elif fault == "start" or not running:
        if len(running) < most:
            fleet.start()
    elif fault in ("kill", "kill two"):
        for victim in random.sample(running, min(len(running), 1 + (fault == "kill two"))):
            fleet.at(random.uniform(0.0, 0.75), lambda victim=victim: None if victim.dead else fleet.kill(victim))  # type: ignore[misc]
            if random.random() < 0.7:  # a launcher starts it again
                fleet.at(random.uniform(0.8, 2.0), fleet.start)
    elif fault == "pause":
        victim = random.choice(running)
        fleet.pause(victim)
        fleet.at(random.choice((0.3, 1.5, 4.0)), lambda: fleet.resume(victim))
    elif fault == "hang":
        random.choice(running).hangs_until = fleet.now + random.uniform(1.0, 90.0)
    elif fault == "leave":
        random.choice(running).leaving = True
    elif fault == "cut off":
        victim = random.choice(running)
        fleet.cut_off(victim)
        fleet.at(random.uniform(0.2, 5.0), lambda: fleet.reconnect(victim))
    elif fault == "cut link" and len(running) > 1:
        link = frozenset(one.name for one in random.sample(running, 2))
        fleet.cut_links.add(link)
        fleet.at(random.uniform(0.5, 6.0), lambda: fleet.cut_links.discard(link))


def check_lineages(fleet: SimulatedFleet) -> None:
    """Every sample exactly once on every lineage; with a majority, no two lineages that commit at the same time."""
    for lineage in {commit.lineage for commit in fleet.commits}:
        assert lineage in fleet.parents
    starts = {commit.lineage: (commit.assignment.start, commit.assignment.stop) for commit in fleet.commits}
    for lineage, parent in fleet.parents.items():
        if starts[lineage][0] != (starts[parent][1] if parent in starts else 0) and parent in starts:
            raise Violation(f"samples {starts[lineage]} follow {starts[parent]}")
    if fleet.min_replicas > 1:
        ends: dict[int, float] = {}
        for commit in fleet.commits:
            ends[commit.lineage] = commit.time
        branches: dict[int, list[Commit]] = defaultdict(list)
        for commit in fleet.commits:
            branches[commit.parent].append(commit)
        last: dict[int, float] = {}
        for commit in reversed(fleet.commits):  # the time of the last commit of every branch
            for lineage in fleet.ancestry(commit.lineage):
                if last.get(lineage, -1.0) >= commit.time:
                    break
                last[lineage] = max(last.get(lineage, 0.0), commit.time)
        for siblings in branches.values():
            firsts = {}
            for commit in siblings:
                firsts.setdefault(commit.lineage, commit.time)
            for one in firsts:
                for other in firsts:
                    if one != other and firsts[one] < firsts[other] <= last[one]:
                        raise Violation(f"two lineages commit at the same time, at {firsts[other]}")


def recover(fleet: SimulatedFleet, within_s: float = 100.0) -> None:
    """No more faults: the replicas that are left, or enough new ones, commit a step together within bounded time."""
    fleet.run_until(fleet.now + 6.0)  # all that was cut, paused or away comes back
    for replica in fleet.running():
        replica.leaving = False  # those that do not know it yet
    deadline, seen = fleet.now + within_s, len(fleet.commits)

    def together() -> bool:
        nonlocal seen
        if len(fleet.commits) == seen:
            return False
        seen = len(fleet.commits)
        running = fleet.running()
        if any(replica.membership.listening for replica in running):
            return False
        return set(fleet.commits[-1].group) == {replica.name for replica in running}

    recovered = False
    while fleet.now < deadline and not recovered:
        while len(fleet.running()) < fleet.min_replicas:
            fleet.start()
        recovered = fleet.run_until(min(deadline, fleet.now + 10.0), stop=together)
    if not recovered:
        phases = {r.name: (r.membership.phase.name, r.waiting_for, r.state) for r in fleet.running()}
        raise Violation(f"no step of all {len(phases)} replicas within {within_s:g} s: {phases}")
    lineages = {r.state.lineage for r in fleet.running()}
    longest = max(({*fleet.ancestry(lineage)} for lineage in lineages), key=len)
    if not lineages <= longest:
        raise Violation("replicas that train together have different lineages")
