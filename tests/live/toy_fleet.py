"""Several membership state machines in one process, with a toy lighthouse, random delays and random faults.

Nothing here waits: a replica whose instruction cannot be completed yet is looked at again later, and the clock is a
number.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from random import Random

from ebbflow.data.ledger import Assignment
from ebbflow.live import membership_events as m
from ebbflow.live.membership import Membership, initial_lineage

HEARTBEAT_TIMEOUT_S = 0.8
ASSIGNMENT = Assignment(0, 0, 8)


@dataclass(eq=False)
class ToyReplica:
    name: str
    membership: Membership
    todo: deque[m.Instruction] = field(default_factory=deque)
    waiting: m.Instruction | None = None
    """The instruction that is not completed yet."""
    rendezvous: str | None = None
    """The quorum group that this replica is in, or is about to form."""
    died: float | None = None
    received_in: str | None = None
    """The quorum group in which it received a state last."""
    leaving: bool = False
    published: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        return self.died is None


class ToyFleet:
    def __init__(self, random: Random, replicas: int) -> None:
        self.random = random
        self.now = 0.0
        self.replicas: dict[str, ToyReplica] = {}
        self.handshakes: dict[str, dict[int, m.Handshake]] = {}
        self.asked: dict[str, m.AskLighthouse] = {}
        self.quorum = 0
        self.committed = 0
        for _ in range(replicas):
            self.start()

    # Faults and delays ------------------------------------------------------------------------------------------------

    def do_something(self) -> None:
        """Let a replica go on; now and then start, kill or dismiss one, or let the lighthouse be hasty."""
        self.now += self.random.choice((0.0, 0.01, 0.01, 0.1))
        living = [replica for replica in self.replicas.values() if replica.alive]
        what = self.random.randrange(100)
        if not living or (what == 0 and len(living) < 5):
            self.start()
        elif what == 1:
            self.kill(self.random.choice(living))
        elif what == 2:
            self.random.choice(living).leaving = True
        elif what == 3 and self.asked:  # as after it stood still for a moment: it takes all others for dead
            self.form_quorum([self.random.choice(sorted(self.asked))])
        else:
            self.go_on(self.random.choice(living))

    def let_everything_finish(self) -> None:
        """No more faults: the replicas that are left, or a new one, commit a step."""
        before = self.committed
        if not any(replica.alive for replica in self.replicas.values()):
            self.start()
        for _ in range(300):
            self.now += 0.3
            for replica in list(self.replicas.values()):
                if replica.alive:
                    self.go_on(replica)
            if not any(replica.alive for replica in self.replicas.values()):
                self.start()  # all of them were told to leave
            if self.committed > before:
                return
        raise AssertionError({name: (r.membership.phase, r.waiting) for name, r in self.replicas.items() if r.alive})

    def start(self) -> None:
        name = f"r{len(self.replicas)}"
        replica = ToyReplica(name, Membership({}, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S))
        replica.membership.state = m.ReplicaState(step=0, lineage=initial_lineage(name))
        self.replicas[name] = replica
        self.report(replica, m.Started(now=self.now))

    def kill(self, replica: ToyReplica) -> None:
        replica.died, replica.waiting, replica.rendezvous = self.now, None, None
        self.asked.pop(replica.name, None)

    # A replica --------------------------------------------------------------------------------------------------------

    def report(self, replica: ToyReplica, event: m.MembershipEvent) -> None:
        replica.todo.extend(replica.membership.handle(event))

    def go_on(self, replica: ToyReplica) -> None:
        """Complete the instruction that a replica waits for, or begin the next one, or request the next step."""
        if replica.waiting is None and replica.todo:
            replica.waiting = self.begin(replica, replica.todo.popleft())
        elif replica.waiting is not None:
            event = self.complete(replica, replica.waiting)
            if isinstance(event, m.Tick | m.ToldToLeave):  # the instruction is still not completed
                self.report(replica, event)
                if replica.todo and isinstance(check := replica.todo[0], m.CheckHeartbeats):
                    replica.todo.popleft()
                    self.report(replica, self.heartbeats(check))
                while replica.todo and isinstance(replica.todo[0], m.RecordEvent):
                    replica.todo.popleft()
                if replica.todo:  # it is given up
                    self.asked.pop(replica.name, None)
                    replica.waiting = None
            elif event is not None:
                replica.waiting = None
                self.report(replica, event)
        else:
            state = replica.membership.state
            self.report(replica, m.StepRequested(now=self.now, step=state.step, lineage=state.lineage))

    def begin(self, replica: ToyReplica, instruction: m.Instruction) -> m.Instruction | None:
        match instruction:
            case m.RecordEvent():
                return None
            case m.PublishGroup():
                replica.published = instruction.names
                return None
            case m.DropConnections() | m.Unregister():
                replica.rendezvous = None
                return None
            case m.LeaveFleet():
                self.kill(replica)
                return None
            case m.AskLighthouse():
                replica.rendezvous = None if replica.membership.group is None else replica.rendezvous
                self.asked[replica.name] = instruction
            case m.SendHandshake():
                replica.rendezvous = instruction.rendezvous
                self.handshakes.setdefault(instruction.rendezvous, {})[instruction.rank] = instruction.handshake
            case m.Connect():
                replica.rendezvous = instruction.rendezvous
        return instruction

    def complete(self, replica: ToyReplica, instruction: m.Instruction) -> m.MembershipEvent | None:
        """What came of an instruction; None while it is not completed."""
        now = self.now
        match instruction:
            case m.Register():
                return m.Registered(now=now, name=replica.name, store=replica.name)
            case m.CheckHeartbeats():
                return self.heartbeats(instruction)
            case m.LoadCheckpoint():
                return m.NoNewerCheckpoint(now=now)
            case m.AskLighthouse():
                healthy = [name for name, age in self.ages().items() if age <= HEARTBEAT_TIMEOUT_S]
                if set(healthy) <= set(self.asked):
                    self.form_quorum(healthy)
                    return None
                return m.ToldToLeave(now=now) if replica.leaving else m.Tick(now=now)
            case m.SendHandshake():
                said = self.handshakes[instruction.rendezvous]
                if not self.replicas[instruction.rendezvous.partition("/")[0]].alive:
                    return m.HandshakeFailed(now=now, reason="the store is gone")
                if len(said) < instruction.size:
                    return m.Tick(now=now)
                return m.HandshakesReceived(now=now, handshakes=tuple(said[rank] for rank in range(instruction.size)))
            case m.Connect():
                return self.connect(replica, instruction)
            case m.SendState():
                peers = [self.peers(replica)[rank] for rank in instruction.to]
                if all(peer.received_in == replica.rendezvous for peer in peers):
                    return m.StateSent(now=now)
                return self.broken(replica, peers)
            case m.ReceiveState():
                sender = self.peers(replica)[instruction.source]
                if isinstance(sender.waiting, m.SendState) and sender.rendezvous == replica.rendezvous:
                    replica.received_in = replica.rendezvous
                    state = sender.membership.state
                    return m.StateReceived(now=now, step=state.step, lineage=state.lineage, size=1)
                return self.broken(replica, [sender])
            case m.ComputeStep():
                return self.compute(replica)
        raise NotImplementedError(instruction)

    def peers(self, replica: ToyReplica) -> list[ToyReplica]:
        """The replicas of the connected group, by rank."""
        assert replica.membership.group is not None
        return [self.replicas[name] for name in replica.membership.group.names]

    def broken(self, replica: ToyReplica, peers: list[ToyReplica]) -> m.MembershipEvent | None:
        """A failure if a peer is dead or has given the group up."""
        if all(peer.alive and peer.rendezvous == replica.rendezvous for peer in peers):
            return None
        if isinstance(replica.waiting, m.ComputeStep):
            return m.StepFailed(now=self.now, reason="a peer is gone")
        return m.ConnectionFailed(now=self.now, reason="a peer is gone")

    def connect(self, replica: ToyReplica, instruction: m.Connect) -> m.MembershipEvent | None:
        peers = [self.replicas[name] for name in instruction.names]
        together = [
            isinstance(peer.waiting, m.Connect) and peer.waiting.rendezvous == instruction.rendezvous for peer in peers
        ]
        if not all(together):
            return self.broken(replica, peers)
        for peer in peers:
            if peer is not replica:
                peer.waiting = None
                self.report(peer, m.GroupConnected(now=self.now))
        return m.GroupConnected(now=self.now)

    def compute(self, replica: ToyReplica) -> m.MembershipEvent | None:
        """A step, once all participants are there: committed by all, or after a kill by some of them."""
        peers = self.peers(replica)
        if not all(isinstance(peer.waiting, m.ComputeStep) and peer.rendezvous == replica.rendezvous for peer in peers):
            return self.broken(replica, peers)
        states = {dataclasses.replace(peer.membership.state, established=True) for peer in peers}
        assert len(states) == 1, f"{[peer.name for peer in peers]} compute a step with different states {states}"
        assert len({peer.membership.group.names for peer in peers if peer.membership.group}) == 1
        self.committed += 1
        leaving = frozenset(rank for rank, peer in enumerate(peers) if peer.leaving)
        wanted = any(peer.membership.wants_lighthouse(self.now) for peer in peers)
        step = m.StepCommitted(now=self.now, assignment=ASSIGNMENT, leaving=leaving, lighthouse_wanted=wanted)
        interrupted = self.random.randrange(8) == 0
        outcome: dict[str, m.MembershipEvent] = {}
        for peer in peers:
            missed = interrupted and self.random.random() < 0.5
            outcome[peer.name] = m.StepFailed(now=self.now, reason="the sum did not arrive") if missed else step
        for peer in peers:
            if peer is not replica:
                peer.waiting = None
                self.report(peer, outcome[peer.name])
        return outcome[replica.name]

    # The lighthouse ---------------------------------------------------------------------------------------------------

    def ages(self) -> dict[str, float]:
        """Seconds since the last heartbeat of each registered replica."""
        registered = [replica for replica in self.replicas.values() if replica.membership.name]
        return {replica.name: 0.0 if replica.died is None else self.now - replica.died for replica in registered}

    def heartbeats(self, instruction: m.CheckHeartbeats) -> m.HeartbeatsReceived:
        """The answer of the lighthouse, and of the living replicas that are asked."""
        ages = self.ages()
        asked = [name for name in ages if instruction.besides and name not in instruction.besides]
        groups = {name: self.replicas[name].published for name in asked if ages[name] <= HEARTBEAT_TIMEOUT_S}
        return m.HeartbeatsReceived(now=self.now, ages=ages, groups=groups)

    def form_quorum(self, names: list[str]) -> None:
        """Answer the requests of these replicas."""
        replicas = tuple(sorted(names))
        self.quorum += 1
        asked = [self.asked.pop(name) for name in replicas]
        for rank, name in enumerate(replicas):
            self.replicas[name].waiting = None
            event = m.QuorumFormed(
                now=self.now,
                quorum_id=self.quorum,
                replicas=replicas,
                rank=rank,
                store=replicas[0],
                groups=tuple(one.group for one in asked),
                established=tuple(one.established for one in asked),
            )
            self.report(self.replicas[name], event)
