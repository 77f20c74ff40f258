"""A fleet in virtual time: the membership protocol of every replica, a lighthouse, and a network with faults.

Every replica runs the `Membership` of the live engine. What surrounds it is modelled here, as `connection.py`, gloo and
torchft's lighthouse (0.2.0) behave: requests and their answers, stores in which replicas meet, groups that connect and
break, sums that arrive at some replicas and not at others. Nothing waits: the clock is a number, and a seed reproduces
a history, with all its delays and faults, exactly.

    killed    a process ends, and its connections break; its heartbeat is missed after the timeout
    paused    a process stands still and its connections stay; later it goes on with what it was doing
    hanging   a process computes on and on, and sends heartbeats; its store may not answer
    cut off   a replica does not reach the lighthouse; its peers it does
    cut link  two replicas do not reach each other; both reach the lighthouse
    blocked   two replicas reach each other's stores and no other port, as with a firewall between them
    one way   the same for new connections of one of the two with the other only; what is connected stays
    losing    single requests of a replica to the lighthouse or to a store are lost, or the answers to them
    stalled   the lighthouse stands still, and then takes everybody for dead
    restarted the lighthouse ends, is away for a while, and begins again with quorum 1
    differing something has changed the weights of a replica, which the next sum with others shows
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from ebbflow.data.ledger import Assignment
from ebbflow.live import membership as protocol
from ebbflow.live import membership_events as m
from ebbflow.live.agreement import fork_lineage, gone_on_without, initial_lineage, without_heartbeat
from ebbflow.live.membership import Membership, MembershipPhase, answer_holds
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S
from live.simulated_lighthouse import HEARTBEAT_TIMEOUT_S, Heartbeats, SimulatedLighthouse

CONNECT_TIMEOUT_S = 10.0
COLLECTIVE_TIMEOUT_S = 60.0
PATIENCE_S = 2 * CONNECT_TIMEOUT_S
"""For which a replica is waited for at least that sends heartbeats and does not answer."""
STORE_TIMEOUT_S = 2.0
NOTICE_CUT_S = 14.0
"""After which a replica that waits for its peers knows that it does not reach one, or that one is not in its group any
longer: it looks twice, for 5 s and 2 s."""
TICK_S = {m.AskLighthouse: 1.0, m.SendHandshake: 0.4, m.Connect: 0.4}
"""How often time is reported while these are waited for; more rarely than in reality, which saves events."""
SOON_S = 0.5
"""For which a replica waits for the state before it hears the steps of the others."""
SILENTLY = 0.4
"""How many of the messages that are lost between a replica and the lighthouse are so because of a dead connection."""
JUST_BEFORE_S = 2.0
"""For how long before a step a replica may have been taken for dead, so that it was left out of it."""
ROOT = initial_lineage("the same weights for all")


class Commit(NamedTuple):
    """A step that a replica has committed."""

    time: float
    decided: float
    """When all participants had confirmed that they have its sum: from then on nobody can prevent it."""
    asked: float
    """When one of its participants last asked the lighthouse who takes part."""
    replica: str
    group: tuple[str, ...]
    group_number: int
    """No two quorum groups have the same."""
    parent: int
    state: int
    """Numbers of the states before and after it. The simulator gives them: what the protocol takes for equal states, by
    their lineages, is compared with what is equal."""
    assignment: Assignment


class Model(NamedTuple):
    """What stands for weights and position in the data."""

    number: int
    """Of the step that led to it; no two committed steps have the same."""
    position: int
    """Committed samples."""


@dataclass(eq=False, slots=True)
class SummedStep:
    """A step of which all participants have contributed to the sum."""

    event: m.StepCommitted
    after: Model
    asked: float
    decided: float = math.inf


@dataclass(eq=False, slots=True)
class AskedAhead:
    """A question to the lighthouse that a replica which trains alone asks as soon as a step is committed."""

    request: m.AskLighthouse
    number: int
    """Below 0, in the place of the number of a wait."""
    asked: float
    answer: m.MembershipEvent | None = None
    wait: int | None = None
    """Of the next step, which waits for the answer."""


@dataclass(eq=False, slots=True)
class Replica:
    """One process of a replica."""

    name: str
    """As the lighthouse knows it; another one when it registers again."""
    machine: str
    """Its first name, by which links are cut."""
    membership: Membership
    heartbeats: Heartbeats = field(init=False)
    model: Model
    """What it trains: given to peers as a whole, and saved in checkpoints."""
    todo: deque[m.Instruction] = field(default_factory=deque)
    waits: int = 0
    """Number of the wait; what was begun before is not waited for any longer."""
    waiting_for: m.Instruction | None = None
    failing: int = -1
    """Number of the last wait that fails, now or in a moment."""
    paused: bool = False
    dead: bool = False
    cut_off: bool = False
    registered: bool = False
    """Whether it sends heartbeats, as far as it depends on itself."""
    registrations: int = 0
    unresponsive: float = -1.0
    """When it was last paused or cut off, or had stopped its heartbeats itself."""
    asked: float = 0.0
    """When the lighthouse last named the replicas of its group."""
    backlog: list[tuple[int, Callable[..., Any], bool]] = field(default_factory=list)
    """What happened while it was paused."""
    group: SimulatedGroup | None = None
    in_group: SimulatedGroup | None = None
    """In which it is, as its store says: from when it connects until it asks for a quorum without one."""
    published: m.PublishedGroup = m.PublishedGroup()
    leaving: bool = False
    hangs_until: float = 0.0
    """Until when it computes, if it begins a step before that."""
    holds_lock: bool = False
    """Whether none of its threads runs while it hangs; torchft's do, which send heartbeats."""
    silenced: bool = False
    """Whether it has stopped its heartbeats since it kept the others waiting."""
    to_lose: int = 0
    """How many of its next requests, or of the answers to them, are lost."""
    disconnected: bool = False
    """Whether nothing comes any more over its connection to the lighthouse, although nobody has told it so."""
    differs: bool = False
    """Whether its weights are not those of its lineage."""
    disbelieved: float = -1.0
    """When the others last found out that they are not, so that its state no longer counted."""
    told: dict[str, int] = field(default_factory=dict)
    """Replicas that lack an answer of the lighthouse, as they have said -> to which request."""
    committed: list[Commit] = field(default_factory=list)
    heard: deque[SummedStep] = field(default_factory=deque)
    """Steps of the others that it has heard while the state was on its way."""
    ahead: AskedAhead | None = None
    habits: Random = field(init=False)
    """How long it takes between two steps, if it asks ahead."""

    def __post_init__(self) -> None:
        self.habits = Random(self.machine)

    def wants(self, wait: int) -> bool:
        """Whether it wants the answer of the lighthouse to the request with the number of this wait."""
        return wait == (self.waits if wait >= 0 else self.ahead.number if self.ahead is not None else None)

    @property
    def state(self) -> m.ReplicaState:
        return self.membership.state


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """A connected group: who is in it, and how far the sum of the current step is."""

    number: int
    names: tuple[str, ...]
    members: frozenset[str]
    machines: frozenset[str]
    connected: dict[str, Replica] = field(default_factory=dict)
    """Replicas that have begun to connect and have not closed their connections."""
    connecting: dict[str, int] = field(default_factory=dict)
    """Replicas that have begun to connect -> the number of their wait."""
    gone: set[str] = field(default_factory=set)
    """Those whose connections are closed."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Replicas that have begun the sum of a step -> the number of their wait."""
    sent: dict[int, tuple[m.ReplicaState, Model, Replica]] = field(default_factory=dict)
    """Rank that needs it -> the state that is on its way, and whose it is."""
    arrives: dict[str, float] = field(default_factory=dict)
    """Replicas that listen -> when the state has arrived, if nothing breaks before."""
    summing: set[str] = field(default_factory=set)
    """Replicas that have not completed the sum which all have begun."""
    confirmed: set[str] = field(default_factory=set)
    """Replicas that have the sum of the step."""
    all_confirmed: bool = False


@dataclass(eq=False, slots=True)
class Meeting:
    """What replicas of a quorum have written into the store of one of them."""

    handshakes: dict[int, m.Handshake] = field(default_factory=dict)
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    waiting: dict[int, tuple[Replica, int]] = field(default_factory=dict)


class Violation(AssertionError):
    """A guarantee that does not hold."""


_Scheduled = tuple[float, int, "Replica | None", int, Callable[..., Any], bool]
"""When, a number that orders what happens at the same time, to which replica and in which of its waits, what happens,
and whether that makes an event that the replica waits for."""


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
        between_steps_s: float = 0.0,
    ) -> None:
        """`step_s`: shortest and longest time that a replica computes. `transfer_s`: that the state travels.
        `between_steps_s`: longest time that a replica which trains alone does something else after a step.
        `latency_s`: mean of most messages; one in fifty takes up to 0.3 s, so that they overtake each other."""
        self.random = random
        self.min_replicas = min_replicas
        self.step_s = step_s
        self.latency_s = latency_s
        self.checkpoint_every = checkpoint_every
        self.transfer_s = transfer_s
        self.between_steps_s = between_steps_s
        self.now = 0.0
        self.messages: dict[str, int] = defaultdict(int)
        self.replicas: dict[str, Replica] = {}
        """By every name that they ever had."""
        self._started: list[Replica] = []
        self.cut_links: set[frozenset[str]] = set()
        self.blocked: set[frozenset[str]] = set()
        """Two machines each, between which nothing passes but what is sent to stores."""
        self.one_way: set[tuple[str, str]] = set()
        """Two machines each, of which the first cannot connect with the second except to its store."""
        self.refuses = False
        """Whether a firewall says so at once; else whoever connects waits in vain."""
        self.given_up: dict[str, float] = {}
        """Replicas that ended because it fails again and again with the same ones -> when."""
        self.said: dict[str, str] = {}
        """What each machine last said that it waits for."""
        self.commits: list[Commit] = []
        self.parents: dict[int, int] = {}
        self.checkpoint = (0, ROOT, Model(0, 0))
        self.lineages = {0: ROOT}
        """The lineage that the protocol gave to each state."""
        self._models = count(1)
        self.meetings: dict[str, Meeting] = defaultdict(Meeting)
        self.groups: dict[str, SimulatedGroup] = {}
        self.lighthouse = SimulatedLighthouse(self, min_replicas=min_replicas, join_timeout_s=join_timeout_s)
        self._events: list[_Scheduled] = []
        self._sequence = count()
        self._names = count()
        self._questions = count()

    # Time -------------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        """Let something happen outside of the replicas."""
        heappush(self._events, (self.now + delay_s, next(self._sequence), None, 0, what, False))

    def to(self, replica: Replica, what: Callable[[], None], delay_s: float, wait: int | None = None) -> None:
        """Let something happen in the process of a replica: when it goes on, if it is paused then; never if it died.

        Nor does it happen if the replica has ended the wait of this number by then; that is its present one if not
        given.
        """
        wait = replica.waits if wait is None else wait
        heappush(self._events, (self.now + delay_s, next(self._sequence), replica, wait, what, False))

    def answer(self, replica: Replica, event: Callable[..., m.MembershipEvent], delay_s: float, kind: str) -> None:
        """Complete what a replica waits for with an event, which is made of the time, unless it waits no longer."""
        self.messages[kind] += 1
        heappush(self._events, (self.now + delay_s, next(self._sequence), replica, replica.waits, event, True))

    def answer_request(
        self, replica: Replica, event: Callable[..., m.MembershipEvent], delay_s: float, wait: int
    ) -> None:
        """Answer a request to the lighthouse, for which the replica waits, or will."""
        if wait >= 0:
            self.answer(replica, event, delay_s, "answer")
            return
        self.messages["answer"] += 1
        self.at(delay_s, partial(self._answered_ahead, replica, event, wait))

    def _answered_ahead(self, replica: Replica, event: Callable[..., m.MembershipEvent], number: int) -> None:
        ahead = replica.ahead
        if replica.dead or ahead is None or ahead.number != number:
            return
        if replica.paused:  # so is the thread that waits for the answer
            self.at(0.05, partial(self._answered_ahead, replica, event, number))
            return
        ahead.answer = event(now=self.now)
        self._use_ahead(replica, ahead)

    def _use_ahead(self, replica: Replica, ahead: AskedAhead) -> None:
        """Hand over the answer to a question that was asked ahead, if it is there and waited for."""
        if ahead.answer is None or ahead.wait != replica.waits:
            return
        answer, replica.ahead = ahead.answer, None
        self.to(replica, partial(self._report_answer, replica, answer), 0.0)

    def _report_answer(self, replica: Replica, answer: m.MembershipEvent) -> None:
        replica.waits += 1
        replica.waiting_for = None
        self.report(replica, answer)

    def run_until(self, time: float, *, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether `stop` said so before."""
        events = self._events
        while events and events[0][0] <= time:
            self.now, _, replica, wait, what, reports = heappop(events)
            if replica is None:
                what()
            elif replica.waits == wait:
                self._happen(replica, wait, what, reports)
            if stop is not None and stop():
                return True
        self.now = time
        return False

    def _happen(self, replica: Replica, wait: int, what: Callable[..., Any], reports: bool) -> None:
        if replica.paused:
            replica.backlog.append((wait, what, reports))
        elif replica.dead or replica.waits != wait:
            return
        elif reports:
            replica.waits += 1
            replica.waiting_for = None
            self.report(replica, what(now=self.now))
        else:
            what()

    def delay(self) -> float:
        random = self.random.random
        if random() < 0.02:
            return self.random.uniform(0.0, 0.3)
        return self.latency_s * (0.5 + random())

    def loses(self, replica: Replica) -> bool:
        """Whether a message of a replica, or the answer to it, is lost."""
        lost = replica.to_lose > 0 and self.random.random() < 0.5
        replica.to_lose -= lost
        return lost

    def loses_silently(self) -> bool:
        return self.random.random() < SILENTLY

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
        step, lineage, model = self.checkpoint
        membership.state = m.ReplicaState(step=step, lineage=lineage)
        replica = self.replicas[name] = Replica(name, name, membership, model)
        self._started.append(replica)
        self.lighthouse.add(replica)
        self.report(replica, m.Started(now=self.now))
        return replica

    def kill(self, replica: Replica) -> None:
        replica.dead = True
        self.lighthouse.silence(replica)
        self._close(replica)
        self._close_store(replica)

    def _close_store(self, replica: Replica) -> None:
        for rendezvous, meeting in list(self.meetings.items()):
            if rendezvous.startswith(f"{replica.name}/"):
                for other, wait in list(meeting.waiting.values()):
                    if other.waits == wait:
                        self.answer(other, _NO_STORE, self.delay(), "store")

    def pause(self, replica: Replica) -> None:
        replica.paused = True
        self.lighthouse.silence(replica)

    def resume(self, replica: Replica) -> None:
        if replica.dead or not replica.paused:
            return
        replica.paused = False
        replica.unresponsive = self.now
        self.lighthouse.hear(replica, self.random.uniform(0, HEARTBEAT_INTERVAL_S))
        backlog, replica.backlog = replica.backlog, []
        for what in backlog:
            self._happen(replica, *what)

    def cut_off(self, replica: Replica) -> None:
        replica.cut_off = True
        self.lighthouse.silence(replica)

    def reconnect(self, replica: Replica) -> None:
        replica.cut_off = False
        replica.unresponsive = self.now
        self.lighthouse.hear(replica, self.random.uniform(0, 3 * HEARTBEAT_INTERVAL_S))

    def running(self) -> list[Replica]:
        return [replica for replica in self._started if not replica.dead]

    def report(self, replica: Replica, event: m.MembershipEvent) -> None:
        """What `FleetConnection._run` does: hand over an event, and execute what follows."""
        if type(event) is m.QuorumFormed:
            replica.asked = event.now
        self.follow(replica, replica.membership.handle(event))

    def follow(self, replica: Replica, instructions: list[m.Instruction]) -> None:
        todo, membership = replica.todo, replica.membership
        todo.extend(instructions)
        while todo:
            instruction = todo.popleft()
            outcome = _EXECUTE[type(instruction)](self, replica, instruction)
            if outcome is not None:
                todo.extend(membership.handle(outcome))
        if membership.phase is MembershipPhase.IDLE and not replica.dead:
            replica.waits += 1  # nothing is waited for: the training loop goes on
            replica.waiting_for = None
            begins = 0.0 if replica.committed else self.random.uniform(0, 0.5)
            if (question := membership.next_question) is not None and replica.habits.random() < 0.9:
                self._ask_ahead(replica, question)
                begins = replica.habits.uniform(0.0, replica.habits.choice((0.0, 0.1, 1.0)) * self.between_steps_s)
            self.to(replica, partial(self.request_step, replica), begins)

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
            self.to(replica, partial(self._tick, replica, replica.waits, tick_s), tick_s)

    def _tick(self, replica: Replica, wait: int, every_s: float) -> None:
        event = m.ToldToLeave if replica.leaving else m.Tick
        self.report(replica, event(now=self.now))
        if replica.waits == wait and not replica.dead:
            self.to(replica, partial(self._tick, replica, wait, every_s), every_s)

    # Instructions -----------------------------------------------------------------------------------------------------

    def _record(self, replica: Replica, instruction: m.RecordEvent) -> None:
        if instruction.what == "waiting":
            self.said[replica.machine] = instruction.text

    def _publish(self, replica: Replica, instruction: m.PublishGroup) -> None:
        replica.published = instruction.group

    def _unregister(self, replica: Replica, instruction: m.Unregister) -> None:
        replica.registered = False
        replica.ahead = None
        self.lighthouse.silence(replica)
        self.lighthouse.hear(replica, 0.0)
        self._close_store(replica)

    def _drop(self, replica: Replica, instruction: m.DropConnections) -> None:
        self._close(replica)

    def _leave(self, replica: Replica, instruction: m.LeaveFleet) -> None:
        if instruction.save_state:
            self._save(replica)
        self.kill(replica)

    def _give_up(self, replica: Replica, instruction: m.GiveUp) -> None:
        self.given_up[replica.machine] = self.now
        self.kill(replica)

    def _register(self, replica: Replica, instruction: m.Register) -> None:
        self.wait(replica, instruction)
        self.to(replica, partial(self._registered, replica), instruction.after_s + self.delay())

    def _ask(self, replica: Replica, instruction: m.AskLighthouse) -> None:
        self.wait(replica, instruction)
        ahead = replica.ahead
        if (
            ahead is not None
            and ahead.request == instruction
            and answer_holds(ahead.answer, asked=ahead.asked, now=self.now)
        ):
            ahead.wait = replica.waits
            self._use_ahead(replica, ahead)
            return
        replica.ahead = None
        self._request(replica, instruction, replica.waits)

    def _ask_ahead(self, replica: Replica, question: m.AskLighthouse) -> None:
        replica.ahead = AskedAhead(question, -1 - next(self._questions), self.now)
        self._request(replica, question, replica.ahead.number)

    def _request(self, replica: Replica, instruction: m.AskLighthouse, wait: int) -> None:
        self.messages["request"] += 1
        replica.in_group = replica.in_group if instruction.group else None
        replica.disconnected = replica.disconnected and not instruction.reconnect
        if replica.disconnected:
            self.lighthouse.answer_is_lost(replica, wait, instruction.after_s)
            return
        if self.loses(replica):
            replica.disconnected = self.loses_silently()
            self.lighthouse.answer_is_lost(replica, wait, instruction.after_s)
            return
        request = partial(self.lighthouse.request, replica, instruction, wait)
        self.at(instruction.after_s + self.delay(), request)

    def _load(self, replica: Replica, instruction: m.LoadCheckpoint) -> m.MembershipEvent:
        step, lineage, model = self.checkpoint
        if step <= replica.state.step:
            return m.NoNewerCheckpoint(now=self.now)
        self._replace(replica, model)
        return m.CheckpointLoaded(now=self.now, step=step, lineage=lineage)

    def _send(self, replica: Replica, instruction: m.SendState) -> m.MembershipEvent:
        """The state travels while the sender computes."""
        assert replica.group is not None
        replica.group.sent |= dict.fromkeys(instruction.to, (replica.state, replica.model, replica))
        for rank in instruction.to:
            receiver = self.replicas[replica.group.names[rank]]
            if receiver.group is replica.group and isinstance(receiver.waiting_for, m.ReceiveState):
                self._receive(receiver)
        return m.StateSent(now=self.now)

    def _await_state(self, replica: Replica, instruction: m.ReceiveState) -> None:
        self.wait(replica, instruction)
        self._watch(replica, self.now)
        self._receive(replica)

    def _compute(self, replica: Replica, instruction: m.ComputeStep) -> None:
        self.wait(replica, instruction)
        if replica.heard:
            self.to(replica, partial(self._replay, replica), 0.02)
            return
        seconds = max(self.random.uniform(*self.step_s), replica.hangs_until - self.now)
        self.to(replica, partial(self._computed, replica, replica.waits), seconds)
        if replica.hangs_until > self.now and not replica.holds_lock:
            self._silence_if_hanging(replica, COLLECTIVE_TIMEOUT_S + 2 * self.step_s[1])

    def _silence_if_hanging(self, replica: Replica, after_s: float) -> None:
        """A thread of the replica looks every five seconds whether peers have given up the step; twice."""
        group = replica.group

        def look() -> None:
            if group is None:
                return
            if group.gone:
                replica.registered, replica.silenced = False, True
                self.lighthouse.silence(replica)
                self.lighthouse.hear(replica, 0.0)
            else:
                self._silence_if_hanging(replica, 5.0)

        self.to(replica, look, after_s + 10.0)

    def _registered(self, replica: Replica) -> None:
        replica.waits += 1
        replica.waiting_for = None
        if self.lighthouse.away or replica.cut_off or self.loses(replica):
            self.report(replica, m.LighthouseUnreachable(now=self.now, reason="nobody answers"))
            return
        replica.registered, replica.disconnected = True, False
        replica.unresponsive = self.now
        replica.registrations += 1
        if replica.registrations > 1:
            replica.name = f"{replica.machine}.{replica.registrations}"
            self.replicas[replica.name] = replica
            self.lighthouse.add(replica)
        self.lighthouse.hear(replica, self.random.uniform(0, HEARTBEAT_INTERVAL_S))
        self.report(replica, m.Registered(now=self.now, name=replica.name, store=replica.name))

    def _heartbeats(self, replica: Replica, instruction: m.CheckHeartbeats) -> m.HeartbeatsReceived:
        self.messages["page"] += 1
        if not self.lighthouse.reaches(replica) or self.loses(replica):
            return m.HeartbeatsReceived(now=self.now, ages={})
        ages = self.lighthouse.ages()
        groups: dict[str, m.PublishedGroup | None] = {}
        if instruction.besides:
            dead = without_heartbeat(ages, ages, HEARTBEAT_TIMEOUT_S)
            for name in ages.keys() - {*dead, *instruction.besides}:
                self.messages["store"] += 1
                answers = self._answers(name, replica) and not self.loses(replica)
                groups[name] = self.replicas[name].published if answers else None
        connected = not (instruction.connection and replica.disconnected)
        quorum = frozenset(self.lighthouse.previous) if instruction.connection else frozenset[str]()
        return m.HeartbeatsReceived(now=self.now, ages=ages, groups=groups, quorum=quorum, connected=connected)

    def _check_links(self, replica: Replica, instruction: m.CheckLinks) -> None:
        """A dead process refuses at once; a paused one and a cut link do not answer."""
        until = self.now + instruction.after_s

        def alive(names: tuple[str, ...]) -> tuple[str, ...]:
            ages = self.lighthouse.ages() if self.lighthouse.reaches(replica) else {}
            return tuple(name for name in names if ages.get(name, math.inf) <= HEARTBEAT_TIMEOUT_S)

        def look() -> None:
            names = alive(instruction.names)
            if names and self.now < until:
                self.to(replica, look, 0.5)
                return
            self.messages["store"] += len(names)
            cut = any(not self.linked(self.replicas[name], replica) for name in names)
            self.to(replica, partial(ask, names), STORE_TIMEOUT_S if cut else self.delay())

        def ask(names: tuple[str, ...]) -> None:
            silent = tuple(name for name in names if not self._answers(name, replica) or self.loses(replica))
            answering = tuple(name for name in names if name not in silent)
            self.messages["probe"] += 2 * len(answering)
            tried = partial(probe, silent, answering)
            dropped = not self.refuses and any(self._ports_blocked(name, replica) for name in answering)
            self.to(replica, tried, STORE_TIMEOUT_S if dropped else self.delay())

        def probe(silent: tuple[str, ...], names: tuple[str, ...]) -> None:
            blocked = tuple(name for name in names if self._ports_blocked(name, replica) or self.loses(replica))
            checked = partial(self._links_checked, alive, silent, blocked)
            later = HEARTBEAT_TIMEOUT_S + 2 * HEARTBEAT_INTERVAL_S if silent or blocked else 0.0
            self.answer(replica, checked, later, "store")

        self.wait(replica, instruction)
        look()

    def _links_checked(
        self,
        alive: Callable[[tuple[str, ...]], tuple[str, ...]],
        silent: tuple[str, ...],
        blocked: tuple[str, ...],
        now: float,
    ) -> m.LinksChecked:
        return m.LinksChecked(now=now, unreachable=alive(silent), blocked=alive(blocked))

    def _replace(self, replica: Replica, model: Model) -> None:
        """A replica takes over another state.

        It may lose steps that it committed only if it was paused, cut off or without heartbeats after the participants
        of the first of them last asked the lighthouse, or shortly before, or if that is true of all that already had
        the other branch then and are not dead. If nobody had it yet, it must be true of one that began it.

        Or its own weights turned out to be wrong, and that is true of all others that have the step and are not dead.
        Or it computed the step alone, and hung in it without letting its threads run until nobody waited any longer.
        """
        kept = [*self.ancestry(model.number)]
        dropped = []
        for commit in reversed(replica.committed):
            if commit.state in kept:
                break
            dropped.append(commit)
        if dropped and not self._excused(replica, dropped[-1], kept):
            raise Violation(f"{replica.name} gives up {len(dropped)} committed steps, the first of {dropped[-1].time}")
        del replica.committed[len(replica.committed) - len(dropped) :]
        replica.model, replica.differs = model, False

    def _excused(self, replica: Replica, lost: Commit, kept: list[int]) -> bool:
        """Whether a replica may lose a step and those that follow; `kept`: the other states, the last one first."""
        branch = kept[: kept.index(lost.parent)] if lost.parent in kept else kept
        before = {
            id(one): (one, commit.state)
            for commit in self.commits
            if commit.time <= lost.asked and (one := self.replicas[commit.replica]) is not replica
        }
        had = [one for one, state in before.values() if state in branch]
        began = [self.replicas[commit.replica] for commit in self.commits if branch and commit.state == branch[-1]]

        def taken_for_dead(one: Replica) -> bool:
            still = one.paused or one.cut_off or not one.registered
            return still or one.unresponsive >= lost.asked - JUST_BEFORE_S

        if taken_for_dead(replica):
            return True
        if replica.disbelieved >= lost.time:
            others = (one for one in self.replicas.values() if one is not replica and not one.dead)
            if all(taken_for_dead(one) for one in others if lost.state in self.ancestry(one.model.number)):
                return True
        hung_alone = replica.holds_lock and lost.group == (replica.name,) and lost.decided >= replica.hangs_until
        if hung_alone and replica.hangs_until - lost.asked > PATIENCE_S:
            return True
        if had:
            return all(one.dead or taken_for_dead(one) for one in had)
        return any(taken_for_dead(one) for one in began)

    def ancestry(self, state: int) -> Iterator[int]:
        """The numbers of a state and of those that it followed from."""
        while True:
            yield state
            if state not in self.parents:
                return
            state = self.parents[state]

    # Stores and groups ------------------------------------------------------------------------------------------------

    def linked(self, one: Replica, other: Replica) -> bool:
        return not self.cut_links or frozenset((one.machine, other.machine)) not in self.cut_links

    def _ports_blocked(self, name: str, asker: Replica) -> bool:
        """Whether a replica and another one do not reach each other's ports beside those of the stores, both ways."""
        one, other = self.replicas[name].machine, asker.machine
        dead = not self._has_store(name)
        return dead or frozenset((one, other)) in self.blocked or bool({(one, other), (other, one)} & self.one_way)

    def _tell(self, replica: Replica, instruction: m.TellPeers) -> None:
        for name in instruction.names:
            if self._answers(name, replica) and not self.loses(replica):
                self.messages["store"] += 2
                self.at(self.delay(), partial(self._is_told, self.replicas[name], replica.name, instruction.attempt))

    def _is_told(self, replica: Replica, by: str, attempt: int) -> None:
        replica.told[by] = attempt
        waits_for = replica.waiting_for
        if isinstance(waits_for, m.SendHandshake) and by in waits_for.names:
            self.to(replica, partial(self._reports_asking, replica, by), 0.02)

    def _reports_asking(self, replica: Replica, name: str) -> None:
        self.report(replica, m.PeerAsksAgain(now=self.now, name=name, attempt=replica.told[name]))

    def _has_store(self, name: str) -> bool:
        """Whether the store that was registered under a name is there."""
        owner = self.replicas[name]
        return not owner.dead and owner.name == name and owner.registered

    def _answers(self, name: str, asker: Replica) -> bool:
        """Whether the store of a replica answers another one."""
        owner = self.replicas[name]
        stuck = owner.holds_lock and owner.hangs_until > self.now and type(owner.waiting_for) is m.ComputeStep
        return self._has_store(name) and not owner.paused and not stuck and self.linked(owner, asker)

    def _meet(self, replica: Replica, instruction: m.SendHandshake) -> None:
        self.wait(replica, instruction)
        for name in replica.told.keys() & instruction.names:
            self.to(replica, partial(self._reports_asking, replica, name), 0.02)
        address = instruction.rendezvous.partition("/")[0]
        owner = self.replicas[address]
        if not self._has_store(address):
            self.answer(replica, _NO_STORE, self.delay(), "store")
            return
        if not self.linked(owner, replica):
            self.answer(replica, _STORE_OUT_OF_REACH, CONNECT_TIMEOUT_S, "store")
            return
        if self.loses(replica):
            self.answer(replica, _STORE_OUT_OF_REACH, self.delay(), "store")
            return
        meeting, wait = self.meetings[instruction.rendezvous], replica.waits

        def write() -> None:
            if replica.waits == wait and self._has_store(address):
                meeting.handshakes[instruction.rank] = instruction.handshake
                if self.loses(replica):  # the others read its handshake, but it confirms none
                    self.answer(replica, _STORE_OUT_OF_REACH, self.delay(), "store")
                    return
                meeting.waiting[instruction.rank] = (replica, wait)
                self._confirm(meeting, len(instruction.names))

        self.messages["store"] += 4  # two writes and two reads, each with an answer
        self.at(self.delay(), write)

    def _confirm(self, meeting: Meeting, size: int) -> None:
        """Each replica that waits says which handshakes it has read; who has read the same as all others goes on."""
        if len(meeting.waiting) < size:
            return
        read = tuple(meeting.handshakes[rank] for rank in range(size))
        digest = hash(tuple((one.name, one.attempt) for one in read))
        for rank, (replica, wait) in meeting.waiting.items():
            if replica.waits == wait and not replica.paused and not replica.dead:
                meeting.confirmed.add((rank, digest))
        if all((rank, digest) in meeting.confirmed for rank in range(size)):
            received = partial(m.HandshakesReceived, handshakes=read)
            for replica, wait in meeting.waiting.values():
                if replica.waits == wait:
                    event = _STORE_OUT_OF_REACH if self.loses(replica) else received
                    self.answer(replica, event, self.delay(), "store")
            meeting.waiting.clear()
        elif any(replica.paused for replica, _ in meeting.waiting.values()):
            self.at(0.1, lambda: self._confirm(meeting, size))

    def _connect(self, replica: Replica, instruction: m.Connect) -> None:
        self.wait(replica, instruction)
        names = instruction.names
        group = self.groups.get(instruction.rendezvous)
        if group is None:
            group = self.groups[instruction.rendezvous] = SimulatedGroup(
                len(self.groups), names, frozenset(names), frozenset(self.replicas[name].machine for name in names)
            )
        if replica.group is not None:
            replica.group.connected.pop(replica.name, None)
        replica.group = replica.in_group = group
        group.connected[replica.name] = replica
        group.connecting[replica.name] = replica.waits
        self.messages["connect"] += len(names) - 1
        if len(group.connecting) == len(names) and not group.gone and self._can_connect(group):
            for name, wait in group.connecting.items():
                peer = self.replicas[name]
                if peer.waits == wait:
                    self.answer(peer, m.GroupConnected, self.delay(), "connect")
        else:
            refused = self.refuses and not any(link <= group.machines for link in self.cut_links)
            refused = refused and not self._can_connect(group)
            self.answer(replica, _TIMED_OUT, self.delay() if refused else CONNECT_TIMEOUT_S, "timeout")

    def _close(self, replica: Replica) -> None:
        group, replica.group = replica.group, None
        if group is None:
            return
        replica.heard.clear()
        group.gone.add(replica.name)
        group.connected.pop(replica.name, None)
        engaged = [peer for peer in group.connected.values() if type(peer.waiting_for) in _WITH_PEERS]
        for peer in sorted(engaged, key=_name):
            # Who computes notices it when the sum begins. To a sum that is under way, this one may have contributed
            # everything.
            busy = type(peer.waiting_for) is m.ComputeStep or peer.name in group.summing
            computes = busy and peer.name not in group.arrived
            lacks = {peer.name, replica.name} <= group.summing and not group.all_confirmed
            if lacks or not computes:
                self._fail(peer, f"{replica.name} is gone", self.delay())

    def _fail(self, replica: Replica, reason: str, delay_s: float) -> None:
        if replica.failing == replica.waits:  # as when a whole zone vanishes: the first word is enough
            return
        replica.failing = replica.waits
        kind = m.StepFailed if isinstance(replica.waiting_for, m.ComputeStep) else m.ConnectionFailed
        event = partial(kind, reason=reason)
        heappush(self._events, (self.now + delay_s, next(self._sequence), replica, replica.waits, event, True))

    def _watch(self, replica: Replica, began: float) -> None:
        """While a replica waits for its peers, it asks every half second who has stopped."""
        if replica.group is not None:
            self.to(replica, partial(self._look, replica, replica.group, began), 0.5)

    def _look(self, replica: Replica, group: SimulatedGroup, began: float) -> None:
        others = group.members - {replica.name} if self.lighthouse.silent else group.members
        stopped = self.lighthouse.stopped(others) if self.lighthouse.reaches(replica) else []
        if self.lighthouse.reaches(replica):
            stopped += gone_on_without(replica.name, sorted(group.members - {replica.name}), self.lighthouse.previous)
        self.messages["page"] += 1
        waited = self.now - began
        if stopped or (waited > NOTICE_CUT_S and self._in_vain(replica, group)) or waited > COLLECTIVE_TIMEOUT_S:
            self._fail(replica, f"no heartbeat of {sorted(stopped)}", 0.0)
        else:
            self.to(replica, partial(self._look, replica, group, began), 0.5)

    def _in_vain(self, replica: Replica, group: SimulatedGroup) -> bool:
        """Whether a replica waits for a peer that it does not reach, or whose store says that it is in no group, or in
        another one: as when it has connected, and the peer has not."""
        cut = any(replica.machine in link and link <= group.machines for link in self.cut_links)
        return cut or any(self.replicas[name].in_group is not group for name in group.names)

    def _receive(self, replica: Replica) -> None:
        """If the state is on its way to a replica, it arrives after a while."""
        group, membership = replica.group, replica.membership
        assert group is not None and membership.group is not None
        if group.gone:
            self._fail(replica, "a peer is gone", self.delay())
        elif (found := group.sent.get(membership.group.rank)) is not None:
            seconds = self.random.uniform(*self.transfer_s)
            instruction = replica.waiting_for
            if seconds <= SOON_S or not (isinstance(instruction, m.ReceiveState) and instruction.listen):
                self.answer(replica, partial(self._received, replica, *found), seconds, "state")
            else:
                group.arrives[replica.name] = self.now + seconds
                self.to(replica, partial(self._computed, replica, replica.waits), SOON_S)

    def _received(
        self, replica: Replica, state: m.ReplicaState, model: Model, giver: Replica, now: float
    ) -> m.StateReceived:
        self._replace(replica, model)
        return m.StateReceived(now=now, step=state.step, lineage=state.lineage, size=1)

    def _listen(self, replica: Replica, group: SimulatedGroup, step: SummedStep) -> None:
        """A replica has heard a step; when the state is there it loads it, and else it hears the next one."""
        assert replica.membership.group is not None
        rank = replica.membership.group.rank
        if rank in step.event.leaving:
            self.kill(replica)
            return
        replica.heard.append(step)
        if self.now >= group.arrives[replica.name]:
            self.answer(replica, partial(self._received, replica, *group.sent[rank]), 0.0, "state")
        elif step.event.leaving:
            self._fail(replica, "a replica left", 0.0)
        else:
            self._computed(replica, replica.waits)

    def _replay(self, replica: Replica) -> None:
        """Apply a step that was heard."""
        assert replica.group is not None
        replica.waits += 1
        replica.waiting_for = None
        self._commit(replica, replica.group, replica.heard.popleft())

    # Steps ------------------------------------------------------------------------------------------------------------

    def _computed(self, replica: Replica, wait: int) -> None:
        """A replica has its part of the gradient and begins the sum."""
        group = replica.group
        if group is None:
            return
        if group.gone:
            self._fail(replica, "a peer is gone", 0.0)
            return
        group.arrived[replica.name] = wait
        waits_already = type(replica.waiting_for) is m.ReceiveState
        if not waits_already and (len(group.arrived) < len(group.names) or self._cut(group)):
            self._watch(replica, self.now)
        if len(group.arrived) == len(group.names):
            self._add_up(group)

    def _cut(self, group: SimulatedGroup) -> bool:
        return any(link <= group.machines for link in self.cut_links | self.blocked)

    def _can_connect(self, group: SimulatedGroup) -> bool:
        """Of two members of a group, gloo lets the same one begin every time; here it is the last one by name."""
        return not self._cut(group) and not any(
            first > second and {first, second} <= group.machines for first, second in self.one_way
        )

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
        states = {(peer.state.step, peer.state.lineage, peer.model) for peer in peers if peer.name in steps}
        (listening,) = {step.receiving for step in steps.values()}
        arrived = frozenset(rank for rank in listening if group.names[rank] in steps)
        if len(states) != 1:
            raise Violation(f"{group.names} compute a step with different states: {states}")
        if self._finds_different([self.replicas[name] for name in group.names if name in steps]):
            for peer in peers:
                self._fail(peer, "weights differ", self.delay())
            return
        ((_, _, model),) = states
        samples = Assignment(0, model.position, model.position + 8)
        after = Model(next(self._models), samples.stop)
        leaving = frozenset(rank for rank, peer in enumerate(peers) if peer.leaving)
        wanted = any(peer.membership.wants_lighthouse(self.now) for peer in peers)
        event = m.StepCommitted(
            now=self.now, assignment=samples, leaving=leaving, lighthouse_wanted=wanted, arrived=arrived
        )
        step = SummedStep(event, after, asked=max(peer.asked for peer in peers))
        self.messages["sum"] += 2 * len(peers)
        for peer in peers:
            self.to(peer, partial(self._sum_arrives, peer, group, waits, step), self.delay(), waits[peer.name])

    def _finds_different(self, computing: list[Replica]) -> bool:
        """Whether the weights of some differ from those of most, or, of two, of the first; they give their state up."""
        differ = [one for one in computing if one.differs]
        for one in differ:
            one.differs = False  # if it is alone, its weights are those of the fleet
        if not differ or len(computing) == 1:
            return False
        for one in differ if 2 * len(differ) < len(computing) else computing[1:]:
            one.disbelieved = self.now
            one.membership.handle(m.WeightsDiffer(now=self.now))
            forked = fork_lineage(one.state.lineage, computing.index(one))
            one.membership.state = dataclasses.replace(one.state, lineage=forked)
        return True

    def _sum_arrives(self, replica: Replica, group: SimulatedGroup, waits: dict[str, int], step: SummedStep) -> None:
        """A replica has the sum; when all have said so, each learns it and commits the step."""
        if replica.group is not group:
            return
        if group.gone and group.gone & group.summing:  # what it needs may never come
            self._fail(replica, "a peer is gone", 0.0)
            return
        group.confirmed.add(replica.name)
        if len(group.confirmed) == len(group.names):
            group.confirmed.clear()
            group.all_confirmed = True
            step.decided = self.now
            for name in group.names:
                peer = self.replicas[name]
                self.to(peer, partial(self._all_confirmed, peer, group, step), self.delay(), waits[name])

    def _all_confirmed(self, peer: Replica, group: SimulatedGroup, step: SummedStep) -> None:
        if peer.group is not group:
            return
        if group.gone and group.gone & group.summing and self.random.random() < 0.5:
            self._fail(peer, "a peer is gone", 0.0)  # the word of another was on its way, or not
            return
        group.summing.discard(peer.name)
        group.all_confirmed = bool(group.summing)
        if type(peer.waiting_for) is m.ReceiveState:
            self._listen(peer, group, step)
            return
        peer.waits += 1
        peer.waiting_for = None
        self._commit(peer, group, step)

    def _commit(self, replica: Replica, group: SimulatedGroup, step: SummedStep) -> None:
        event, after = step.event, step.after
        parent, names = replica.model.number, group.names
        instructions = replica.membership.handle(dataclasses.replace(event, now=self.now))
        if self.lineages.setdefault(after.number, replica.state.lineage) != replica.state.lineage:
            raise Violation(f"{names} have the same state, and {replica.name} gives it another lineage")
        commit = Commit(
            time=self.now,
            decided=step.decided,
            asked=step.asked,
            replica=replica.name,
            group=names,
            group_number=group.number,
            parent=parent,
            state=after.number,
            assignment=event.assignment,
        )
        replica.committed.append(commit)
        replica.model = after
        self.commits.append(commit)
        self.parents[after.number] = parent
        if names[0] == replica.name and self.checkpoint_every and replica.state.step % self.checkpoint_every == 0:
            self._save(replica)
        self.follow(replica, instructions)

    def _save(self, replica: Replica) -> None:
        if replica.state.step > self.checkpoint[0]:
            self.checkpoint = (replica.state.step, replica.state.lineage, replica.model)


@contextmanager
def answers_computed_once() -> Iterator[None]:
    """Compute only once what all replicas of a group compute from the same values, which are the same objects here.

    For fleets of thousands: what takes each of them milliseconds would take all of them, in this one process, minutes.
    """

    def shared(function: Callable[..., Any], values: Callable[[Any], tuple[object, ...]]) -> Callable[..., Any]:
        last: tuple[object, ...] = ()
        answer = None

        def ask(argument: Any, *settings: Any) -> Any:  # which are the same for all of a fleet
            nonlocal last, answer
            given = values(argument)
            if len(given) != len(last) or any(one is not other for one, other in zip(given, last, strict=True)):
                last, answer = given, function(argument, *settings)
            return answer

        return ask

    def of_quorum(quorum: m.QuorumFormed) -> tuple[object, ...]:
        return quorum.replicas, quorum.established, quorum.steps, quorum.unreachable, quorum.blocked

    shared_functions = {
        "agree": shared(protocol.agree, lambda handshakes: (handshakes,)),
        "group_key": shared(protocol.group_key, lambda handshakes: (handshakes,)),
        "out_of_reach": shared(protocol.out_of_reach, of_quorum),
    }
    with mock.patch.multiple(protocol, **shared_functions):
        yield


_NO_STORE = partial(m.HandshakeFailed, reason="no store")
_STORE_OUT_OF_REACH = partial(m.HandshakeFailed, reason="the store cannot be reached")
_TIMED_OUT = partial(m.ConnectionFailed, reason="it takes too long")
_WITH_PEERS = (m.ComputeStep, m.ReceiveState)
"""What a replica does with its peers, so that it notices if one of them is gone."""
_name = attrgetter("name")
_EXECUTE: dict[type[m.Instruction], Callable[[SimulatedFleet, Replica, Any], m.MembershipEvent | None]] = {
    m.RecordEvent: SimulatedFleet._record,
    m.PublishGroup: SimulatedFleet._publish,
    m.Unregister: SimulatedFleet._unregister,
    m.DropConnections: SimulatedFleet._drop,
    m.LeaveFleet: SimulatedFleet._leave,
    m.GiveUp: SimulatedFleet._give_up,
    m.Register: SimulatedFleet._register,
    m.AskLighthouse: SimulatedFleet._ask,
    m.CheckHeartbeats: SimulatedFleet._heartbeats,
    m.CheckLinks: SimulatedFleet._check_links,
    m.TellPeers: SimulatedFleet._tell,
    m.SendHandshake: SimulatedFleet._meet,
    m.Connect: SimulatedFleet._connect,
    m.LoadCheckpoint: SimulatedFleet._load,
    m.SendState: SimulatedFleet._send,
    m.ReceiveState: SimulatedFleet._await_state,
    m.ComputeStep: SimulatedFleet._compute,
}
"""What executes each instruction. Replicas that are all alike are never refused."""
