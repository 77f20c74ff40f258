"""The membership protocol: one plain test per decision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Assignment
from ebbflow.live.agreement import agree, extend_lineage, group_key, initial_lineage, out_of_reach
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

JOBS = ({"seed": "1"}, {"seed": "2"})
STEP = Assignment(0, 0, 8)


# Whose state counts ---------------------------------------------------------------------------------------------------


def handshake(
    step: int, lineage: int, *, established: bool = True, job: dict[str, str] | None = None, objects: bool = False
) -> Handshake:
    state = ReplicaState(step=step, lineage=lineage, established=established)
    own = JOBS[0] if job is None else job
    return Handshake(name=f"{step}/{lineage}", store="10.0.0.9:9", state=state, job=own, objects=objects)


some_handshakes = st.lists(
    st.builds(handshake, st.integers(0, 5), st.integers(0, 3), established=st.booleans(), job=st.sampled_from(JOBS)),
    min_size=1,
    max_size=6,
)


def test_equal_replicas_need_no_transfer() -> None:
    agreement = agree([handshake(4, 7), handshake(4, 7), handshake(4, 7)])
    assert agreement.transfers == {} and agreement.incompatible == frozenset()


def test_a_replica_that_missed_a_step_receives_the_state_of_one_that_has_it() -> None:
    assert agree([handshake(4, 6), handshake(5, 7), handshake(4, 6)]).transfers == {0: 1, 2: 1}


def test_several_that_need_the_state_are_divided_among_those_that_have_it() -> None:
    fresh = [handshake(0, 1, established=False) for _ in range(4)]
    assert agree([handshake(5, 7), handshake(5, 7), *fresh]).transfers == {2: 0, 3: 1, 4: 0, 5: 1}


def test_the_same_step_of_two_lineages_is_not_the_same_state() -> None:
    assert agree([handshake(5, 7), handshake(5, 8)]).transfers == {1: 0}


def test_a_checkpoint_gives_way_to_a_replica_that_trains_even_if_it_is_further() -> None:
    assert agree([handshake(9, 8, established=False), handshake(5, 7)]).transfers == {0: 1}


def test_after_the_loss_of_all_replicas_the_furthest_checkpoint_counts() -> None:
    assert agree([handshake(3, 6, established=False), handshake(9, 8, established=False)]).transfers == {0: 1}


def test_incompatible_replicas_are_refused_by_a_fleet_that_trains_even_by_a_single_replica() -> None:
    others = [handshake(50, 1, established=False, job=JOBS[1]) for _ in range(3)]
    agreement = agree([*others, handshake(5, 7)])
    assert agreement.incompatible == {0, 1, 2} and agreement.transfers == {} and agreement.job == JOBS[0]


def test_before_anybody_trains_the_job_of_most_replicas_is_that_of_the_fleet() -> None:
    new = [handshake(0, 1, established=False, job=JOBS[i]) for i in (1, 0, 0)]
    assert agree(new).incompatible == {0}


@given(some_handshakes)
def test_all_who_stay_end_with_one_state(handshakes: list[Handshake]) -> None:
    agreement = agree(handshakes)
    stay = [rank for rank in range(len(handshakes)) if rank not in agreement.incompatible]
    assert stay, "at least one replica always goes on"
    assert {tuple(handshakes[rank].job.items()) for rank in stay} == {tuple(agreement.job.items())}
    if agreement.incompatible:
        assert not agreement.transfers
        return
    after = {handshakes[agreement.transfers.get(rank, rank)].state.lineage for rank in stay}
    assert len(after) == 1
    assert all(sender not in agreement.transfers for sender in agreement.transfers.values()), "senders need nothing"
    established = [handshakes[rank].state for rank in stay if handshakes[rank].state.established]
    if established:
        kept = [state for state in established if state.lineage in after]
        assert max(state.step for state in kept) == max(state.step for state in established)


@given(some_handshakes)
def test_a_handshake_survives_its_text(handshakes: list[Handshake]) -> None:
    assert [Handshake.decode(one.encode()) for one in handshakes] == handshakes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a"}', '{"name": "a", "store": "", "state": 3, "job": 1}'])
def test_any_other_text_is_no_handshake(text: str) -> None:
    with pytest.raises(ValueError):
        Handshake.decode(text)


def test_a_lineage_distinguishes_whatever_could_differ() -> None:
    here = initial_lineage("weights")
    different = {
        here,
        initial_lineage("other weights"),
        extend_lineage(here, STEP, "1/a/b"),
        extend_lineage(here, STEP, "2/a/b"),
        extend_lineage(here, Assignment(0, 0, 4), "1/a/b"),
        extend_lineage(here, Assignment(1, 0, 8), "1/a/b"),
        extend_lineage(extend_lineage(here, STEP, "1/a/b"), STEP, "1/a/b"),
    }
    assert len(different) == 7
    assert all(0 <= number < 2**48 and int(float(number)) == number for number in different)


# The state machine ----------------------------------------------------------------------------------------------------


def react(membership: Membership, *events: MembershipEvent) -> list[Instruction]:
    """Hand over some events; the instructions that follow from the last one."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = membership.handle(event)
    return instructions


def quorum(
    *replicas: str, group: str = "", established: tuple[bool, ...] = (), number: int = 1, now: float = 0.0
) -> QuorumFormed:
    """A quorum as "a", the replica of these tests, gets it; all say that they are connected in this group."""
    return QuorumFormed(
        now=now,
        quorum_id=number,
        replicas=replicas,
        rank=replicas.index("a"),
        store="10.0.0.1:1",
        groups=(group,) * len(replicas),
        established=established or (True,) * len(replicas),
        steps=(0,) * len(replicas),
    )


def alive(*names: str, now: float = 0.0, groups: dict[str, PublishedGroup | None] | None = None) -> HeartbeatsReceived:
    """What the lighthouse says of replicas that send heartbeats, and what those say that the quorum lacks."""
    return HeartbeatsReceived(now=now, ages=dict.fromkeys(names, 0.0), groups=groups or {})


def requested(step: int = 0, lineage: int = 5, now: float = 0.0) -> StepRequested:
    return StepRequested(now=now, step=step, lineage=lineage)


def group(*names: str, established: bool = False, step: int = 0) -> PublishedGroup:
    """What a replica says that the quorum lacks."""
    return PublishedGroup(names=names, established=established, step=step)


def accepted(*replicas: str, number: int = 1, now: float = 0.0) -> tuple[MembershipEvent, ...]:
    """A quorum to which nobody objects: no other replica is alive. The first of a quorum asks for that."""
    formed = quorum(*replicas, number=number, now=now)
    return (formed, alive(*replicas, now=now)) if replicas[0] == "a" else (formed,)


def handshakes(*states: tuple[int, int, bool], now: float = 0.0) -> HandshakesReceived:
    said = tuple(
        Handshake(
            name=name,
            store=f"store-{name}",
            job=JOBS[0],
            state=ReplicaState(step=step, lineage=lineage, established=established),
        )
        for name, (step, lineage, established) in zip("abc", states, strict=False)
    )
    return HandshakesReceived(now=now, handshakes=said)


def idle(**settings: float) -> Membership:
    """A registered replica, to which the lighthouse has answered for a second."""
    membership = Membership(JOBS[0], **settings)  # type: ignore[arg-type]
    react(membership, Started(now=-100), Registered(now=-100, name="a", store="store-a"))
    for now in (-1.0, -0.5, 0.0):
        membership.objections.watch.answered(now, about_quorum=False, ages={})
    return membership


def asking() -> Membership:
    membership = idle()
    react(membership, requested())
    return membership


def in_handshake(*replicas: str, now: float = 0.0) -> Membership:
    membership = asking()
    react(membership, *accepted(*replicas, now=now))
    return membership


def computing(*replicas: str, **settings: float) -> Membership:
    """A replica in the first step of a quorum group of equal replicas."""
    membership = idle(**settings)
    equal = [(0, 5, True)] * len(replicas)
    react(membership, requested(), *accepted(*replicas), handshakes(*equal), GroupConnected(now=0))
    assert membership.phase is MembershipPhase.COMPUTING
    return membership


def asks(membership: Membership, *events: MembershipEvent, step: int) -> bool:
    """Whether the lighthouse is asked for this step after these events."""
    (asked,) = react(membership, *events)
    return isinstance(asked, AskLighthouse) and asked.step == step


def committed(leaving: frozenset[int] = frozenset(), *, now: float = 0.0, **more: Any) -> StepCommitted:
    return StepCommitted(now=now, assignment=STEP, leaving=leaving, **more)


def test_a_replica_registers_when_it_starts_and_asks_for_a_quorum_when_it_needs_a_step() -> None:
    membership = Membership(JOBS[0])
    assert react(membership, Started(now=0)) == [Register()]
    assert react(membership, Registered(now=0, name="a", store="store-a")) == []
    assert react(membership, requested(step=3)) == [AskLighthouse(step=3)]


def test_a_replica_that_found_no_lighthouse_at_its_start_registers_for_its_first_step() -> None:
    membership = Membership(JOBS[0])
    assert react(membership, Started(now=0), LighthouseUnreachable(now=1, reason="refused")) == []
    assert react(membership, requested()) == [Register()]
    assert react(membership, Registered(now=1, name="a", store="s")) == [AskLighthouse(step=0)]


def test_an_unreachable_lighthouse_is_tried_again_after_a_pause_and_recorded_once() -> None:
    membership = asking()
    away = LighthouseUnreachable(now=1, reason="refused")
    assert react(membership, away) == [
        RecordEvent("lost", "refused"),
        AskLighthouse(step=0, after_s=0.2),
    ]
    assert react(membership, away) == [AskLighthouse(step=0, after_s=0.2)]
    unregistered = Membership(JOBS[0])
    assert react(unregistered, requested(), away) == [RecordEvent("lost", "refused"), Register(after_s=0.2)]


def test_a_wait_of_ten_seconds_is_explained_once() -> None:
    membership = Membership({}, min_replicas=2)
    membership.handle(Started(now=0.0))
    membership.handle(Registered(now=0.0, name="r0:a", store="s"))
    membership.handle(StepRequested(now=1.0, step=0, lineage=0))
    assert membership.handle(Tick(now=9.5)) == []
    assert membership.handle(Tick(now=11.0)) == [CheckHeartbeats(connection=True)]
    (told,) = membership.handle(HeartbeatsReceived(now=11.0, ages={"r0:a": 0.1, "r1:b": 9.0}))
    assert told == RecordEvent("waiting", "1 of at least 2 replicas (--min-replicas) are here: r0")
    membership.handle(Tick(now=99.0))
    assert membership.handle(HeartbeatsReceived(now=99.0, ages={"r0:a": 0.1})) == []


def test_a_lighthouse_that_nobody_reaches_is_named_after_ten_seconds_and_a_notice_ends_the_wait() -> None:
    membership = Membership({})
    membership.handle(StepRequested(now=1.0, step=0, lineage=0))
    early = membership.handle(LighthouseUnreachable(now=2.0, reason="nobody answers at 10.0.0.7:29510"))
    assert "waiting" not in [one.what for one in early if isinstance(one, RecordEvent)]
    late = membership.handle(LighthouseUnreachable(now=11.0, reason="nobody answers at 10.0.0.7:29510"))
    assert late[0] == RecordEvent("waiting", "nobody answers at 10.0.0.7:29510")
    assert membership.handle(ToldToLeave(now=12.0)) == [LeaveFleet(save_state=False)]


def test_a_quorum_leads_to_a_handshake_with_the_own_job_and_state() -> None:
    membership = idle()
    own = Handshake(name="a", store="store-a", state=ReplicaState(step=3, lineage=7), job=JOBS[0], attempt=1)
    published, sent = react(membership, requested(step=3, lineage=7), *accepted("a", "b", number=4))
    assert published == PublishGroup(group("a", "b", step=3))
    assert isinstance(sent, SendHandshake) and (sent.rank, sent.names, sent.handshake) == (0, ("a", "b"), own)
    assert sent.rendezvous.startswith("10.0.0.1:1/ebbflow/4-")


KEY = group_key([Handshake(name=name, store="", state=ReplicaState(step=0, lineage=0)) for name in "ab"])
"""Of the group of a and b in the tests, whose handshakes do not count attempts."""


def test_replicas_that_are_all_still_connected_go_on_as_they_are() -> None:
    membership = computing("a", "b")
    asked = react(membership, committed(), requested(step=1, lineage=6))
    assert asked == [AskLighthouse(step=1, group=KEY, established=True)]
    assert react(membership, quorum("a", "b", group=KEY)) == [ComputeStep(step=1, participants=("a", "b"), rank=0)]


@pytest.mark.parametrize(
    ("named", "answered", "now", "holds"),
    [
        (("r0",), 5.0, 5.9, True),  # alone: a second from the answer on
        (("r0",), 5.0, 6.1, False),
        (("r0", "r1"), 5.0, 13.9, True),  # r1 waits for the handshake for ten seconds, from the question on
        (("r0", "r1"), 5.0, 14.1, False),
        ((), 0.0, 13.9, True),  # not answered yet
        ((), 0.0, 14.1, False),
    ],
)
def test_an_answer_that_was_asked_for_before_the_step_holds_for_a_while(
    named: tuple[str, ...], answered: float, now: float, holds: bool
) -> None:
    answer = None
    if named:
        answer = QuorumFormed(
            now=answered, quorum_id=1, replicas=named, rank=0, store="s", groups=("",) * len(named),
            established=(True,) * len(named),
        )  # fmt: skip
    assert answer_holds(answer, asked=4.0, now=now) is holds


def test_only_a_replica_that_trains_alone_knows_its_next_question_before_the_step() -> None:
    """Replicas that train together must all use one answer, and the time until the next step differs between them."""
    alone, two, leaving = computing("a"), computing("a", "b"), computing("a")
    assert alone.next_question is None, "a step is being computed"
    for membership in (alone, two, leaving):
        react(membership, committed())
    assert two.next_question is None
    known = alone.next_question
    assert known is not None and [known] == react(alone, requested(step=1, lineage=6))
    react(leaving, requested(step=1, lineage=6), ToldToLeave(now=0.0), quorum("a", group=known.group), committed())
    assert leaving.next_question is None, "it leaves in the next step"


@pytest.mark.parametrize("following", [quorum("a", "b", "c", group=KEY), quorum("a", "b"), quorum("a", group=KEY)])
def test_another_quorum_drops_the_connections_and_so_does_a_replica_that_has_lost_them(following: QuorumFormed) -> None:
    membership = computing("a", "b")
    instructions = react(membership, committed(), requested(step=1, lineage=6), following)
    assert instructions == [CheckHeartbeats(besides=following.replicas)]
    *_, sent = react(membership, alive(*following.replicas, "b"))
    assert isinstance(sent, SendHandshake)
    if sent.handshake.objects:  # b is alive, and the group perhaps intact
        (asked,) = react(membership, HandshakesReceived(now=0, handshakes=(sent.handshake,)))
        assert isinstance(asked, AskLighthouse) and asked.group == KEY
    else:
        states = [(1, 6, True)] * len(following.replicas)
        assert react(membership, handshakes(*states))[0] == DropConnections()


def test_no_two_groups_have_the_same_key_or_meet_in_the_same_place() -> None:
    """Not even if a restarted lighthouse gives the same replicas the same number again."""
    membership, keys = asking(), set()
    for _ in range(3):
        *_, sent = react(membership, *accepted("a", "b", number=1))
        assert isinstance(sent, SendHandshake)
        peer = dataclasses.replace(sent.handshake, name="b", store="store-b")
        (connect,) = react(membership, HandshakesReceived(now=0, handshakes=(sent.handshake, peer)))
        assert isinstance(connect, Connect)
        keys.add(connect.rendezvous)
        if isinstance(react(membership, ConnectionFailed(now=0, reason="refused"))[-1], CheckLinks):
            react(membership, LinksChecked(now=0, unreachable=()))
    assert len(keys) == 3


def test_a_restarted_lighthouse_costs_no_connection() -> None:
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1, lineage=6), quorum("a", "b", group=KEY, number=7), committed())
    away = LighthouseUnreachable(now=1, reason="refused")
    assert react(membership, requested(step=2), away)[1:] == [
        AskLighthouse(step=2, group=KEY, established=True, after_s=0.2)
    ]
    assert react(membership, quorum("a", "b", group=KEY, number=1)) == [
        ComputeStep(step=2, participants=("a", "b"), rank=0)
    ]


def left_out(ages: dict[str, float]) -> list[Instruction]:
    """What follows when the lighthouse leaves b out of the quorum after a step of a, b and c."""
    membership = computing("a", "b", "c")
    following = react(membership, committed(), requested(step=1), quorum("a", "c", number=2))
    assert following == [CheckHeartbeats(besides=("a", "c"))]
    return react(membership, HeartbeatsReceived(now=0, ages=ages))


HERE = {"a": 0.0, "c": 0.0}


@pytest.mark.parametrize(
    ("ages", "objects"),
    [({**HERE, "b": 0.1}, True), ({**HERE, "b": 0.9}, False), ({}, True)],  # the last: the lighthouse does not answer
)
def test_a_quorum_that_lacks_a_replica_with_heartbeats_is_objected_to(ages: dict[str, float], objects: bool) -> None:
    _, instruction = left_out(ages)
    assert isinstance(instruction, SendHandshake) and instruction.handshake.objects == objects


def objects(membership: Membership, *, lacks: dict[str, PublishedGroup | None], now: float = 0.0) -> bool:
    """Whether replica a objects to a quorum of newcomers, with what the replicas say that it lacks."""
    newcomers = quorum("a", "b", established=(False, False), now=now)
    *_, sent = react(membership, newcomers, alive("a", "b", *lacks, now=now, groups=lacks))
    assert isinstance(sent, SendHandshake)
    react(membership, HandshakesReceived(now=now, handshakes=(sent.handshake,) * 2))
    return sent.handshake.objects


def test_newcomers_begin_nothing_while_others_train_however_long_that_takes() -> None:
    membership = asking()
    assert all(objects(membership, lacks={"t": group("t")}) for _ in range(20))
    assert all(objects(membership, lacks={"t": group("s", "t")}) for _ in range(20))
    assert all(objects(membership, lacks={"t": None}) for _ in range(20)), "it may train, and does not answer"


def test_newcomers_do_not_wait_for_one_that_has_not_begun_or_whose_group_is_broken() -> None:
    assert not objects(asking(), lacks={"slow": group()})
    assert not objects(asking(), lacks={"hangs": group("b", "hangs")}), "b is here, so that this group commits nothing"


def test_newcomers_do_not_begin_anew_while_a_replica_with_a_state_is_alive() -> None:
    """It was found by a simulated history: a replica that has trained waits for one whose link to it is cut."""
    membership = asking()
    assert all(objects(membership, lacks={"t": group("b", "t", established=True)}) for _ in range(20))


def test_newcomers_do_not_believe_at_once_that_all_others_have_just_died() -> None:
    """It was found by a simulated history: a lighthouse that stood still takes all for dead, until heartbeats come."""
    membership = asking()
    newcomers = quorum("a", "b", established=(False, False))
    for age, believes in [(1.0, False), (2.7, False), (2.9, True)]:
        *_, sent = react(membership, newcomers, HeartbeatsReceived(now=0, ages={"a": 0.0, "b": 0.0, "t": age}))
        assert isinstance(sent, SendHandshake) and sent.handshake.objects != believes
        react(membership, HandshakesReceived(now=0, handshakes=(sent.handshake,) * 2))


def test_one_that_was_away_does_not_believe_at_once_that_those_who_went_on_without_it_have_died() -> None:
    """It was found by a simulated history: the checkpoint of newcomer b is further than a, which stood still."""
    for steps, age, believes in [((4, 12), 1.0, False), ((4, 12), 2.9, True), ((12, 4), 1.0, True)]:
        formed = dataclasses.replace(quorum("a", "b", established=(True, False)), steps=steps)
        *_, sent = react(asking(), formed, HeartbeatsReceived(now=0, ages={"a": 0.0, "b": 0.0, "t": age}))
        assert isinstance(sent, SendHandshake) and sent.handshake.objects != believes


def test_a_replica_says_after_every_step_how_far_it_has_come() -> None:
    membership = idle()
    new = [(0, 5, False)] * 2
    react(
        membership, requested(), *accepted("a", "b"), handshakes(*new), GroupConnected(now=0), NoNewerCheckpoint(now=0)
    )
    assert react(membership, committed()) == [PublishGroup(group("a", "b", established=True, step=1))]
    react(membership, requested(step=1), quorum("a", "b", group=KEY))
    assert react(membership, committed()) == [PublishGroup(group("a", "b", established=True, step=2))]


def test_a_lighthouse_that_did_not_answer_for_a_while_is_asked_again() -> None:
    """The request may have been lost with the lighthouse; its connection may break only minutes later."""
    membership = asking()
    assert react(membership, Tick(now=1.0)) == []
    assert react(membership, Tick(now=2.9)) == []
    assert react(membership, Tick(now=3.0)) == [CheckHeartbeats(connection=True)]
    assert react(membership, HeartbeatsReceived(now=3.0, ages={})) == []
    assert react(membership, Tick(now=7.9)) == []
    assert react(membership, Tick(now=8.0))[-1] == CheckHeartbeats(connection=True)
    assert react(membership, alive("a", now=8.0)) == [AskLighthouse(step=0)]


def test_a_replica_whose_connection_to_the_lighthouse_is_dead_leaves_its_group_and_asks_over_another_one() -> None:
    """The others may have the answer that it lacks, and wait in a sum for its part."""
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1, now=0.0), Tick(now=0.1))
    assert react(membership, Tick(now=2.2)) == [CheckHeartbeats(connection=True)]
    answer = dataclasses.replace(alive("a", "b", now=4.2), connected=False, quorum=frozenset("ab"))
    told, lost, dropped, asked = react(membership, answer)
    assert told == TellPeers(names=("b",), attempt=2), "they may also wait for its handshake"
    assert isinstance(lost, RecordEvent) and "not over the connection" in lost.text and dropped == DropConnections()
    assert asked == AskLighthouse(step=1, established=True, reconnect=True)
    away = LighthouseUnreachable(now=5.0, reason="refused")
    assert react(membership, away)[-1] == AskLighthouse(step=1, established=True, after_s=0.2), "once is enough"


def test_nobody_is_told_of_a_lost_request_that_led_to_no_quorum() -> None:
    membership = asking()
    react(membership, Tick(now=0.1), Tick(now=2.2))
    answer = dataclasses.replace(alive("a", "b", now=4.2), connected=False, quorum=frozenset("bc"))
    lost, asked = react(membership, answer)
    assert isinstance(lost, RecordEvent) and asked == AskLighthouse(step=0, reconnect=True)


@pytest.mark.parametrize(("attempt", "comes"), [(6, True), (7, False), (8, False)])
def test_a_handshake_that_will_not_come_is_not_waited_for(attempt: int, comes: bool) -> None:
    """The quorum was formed of the seventh request of b, which says to which of its requests it lacks the answer."""
    membership = asking()
    formed = dataclasses.replace(quorum("a", "b"), attempts=(1, 7))
    assert isinstance(react(membership, formed, alive("a", "b"))[-1], SendHandshake)
    following = react(membership, PeerAsksAgain(now=3.0, name="b", attempt=attempt))
    assert (following == []) == comes
    assert comes or isinstance(following[-1], AskLighthouse)


def test_of_two_states_that_are_equally_far_that_of_more_replicas_counts() -> None:
    assert agree([handshake(5, 7), handshake(5, 8), handshake(5, 8)]).transfers == {0: 1}


def test_what_a_lighthouse_does_not_know_in_its_first_moments_proves_nothing() -> None:
    membership = idle()
    react(membership, requested(now=1.0), LighthouseUnreachable(now=50.0, reason="refused"))
    assert objects(membership, lacks={}, now=51.5), "it may have stood still since then"
    assert objects(membership, lacks={}, now=52.0)  # heartbeats may take 0.8 s
    assert not objects(membership, lacks={}, now=52.4)


def test_an_established_replica_asks_in_the_place_of_the_first() -> None:
    membership = asking()
    following = react(membership, quorum("a", "b", established=(False, True)))
    assert isinstance(following[-1], SendHandshake), "b asks"
    following = react(idle(), requested(), quorum("b", "a", established=(False, True)))
    assert following == [CheckHeartbeats(besides=("b", "a"))]


def test_fewer_replicas_than_the_minimum_do_not_train_whatever_the_lighthouse_says() -> None:
    membership = idle(min_replicas=2)
    assert react(membership, requested(), quorum("a")) == [
        RecordEvent("lost", "1 replicas are here, and 2 are needed"),
        AskLighthouse(step=0, after_s=1.0),
    ]


def test_one_objection_makes_all_ask_for_another_quorum_after_a_pause() -> None:
    membership = in_handshake("a", "b")
    said = HandshakesReceived(now=0, handshakes=(handshake(0, 5), handshake(0, 5, objects=True)))
    assert react(membership, said) == [AskLighthouse(step=0, after_s=0.1)]
    react(membership, quorum("a", "b"), alive("a", "b"))
    late = dataclasses.replace(said, now=20.0)
    reason = "a replica that the lighthouse has left out sends heartbeats and may still be training"
    assert react(membership, late) == [RecordEvent("waiting", reason), AskLighthouse(step=0, after_s=0.1)]


def test_after_five_objections_the_quorum_is_accepted_until_a_step_is_committed() -> None:
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1))
    for number in range(2, 8):
        *_, sent = react(
            membership, quorum("a", number=number), alive("a", "b", groups={"b": group("a", "b", established=True)})
        )
        assert isinstance(sent, SendHandshake) and sent.handshake.objects == (number < 7)
        react(membership, HandshakesReceived(now=0, handshakes=(sent.handshake,)))
    react(membership, GroupConnected(now=0), committed(), requested(step=2))
    *_, sent = react(membership, *accepted("a", "b", number=8))
    assert isinstance(sent, SendHandshake) and not sent.handshake.objects, "b is back"


def test_while_handshakes_are_missing_heartbeats_are_checked() -> None:
    membership = in_handshake("a", "b", now=100.0)  # the heartbeat timeout is 0.8 s
    assert react(membership, Tick(now=100.7)) == []
    assert react(membership, Tick(now=100.9)) == [CheckHeartbeats()]
    assert react(membership, HeartbeatsReceived(now=100.9, ages={"a": 0.0, "b": 0.7})) == []
    assert react(membership, Tick(now=101.2)) == [], "not again before half of the timeout has passed"
    assert react(membership, Tick(now=101.4)) == [CheckHeartbeats()]
    assert react(membership, HeartbeatsReceived(now=101.4, ages={"a": 0.0, "b": 1.2})) == [
        RecordEvent("lost", "no heartbeat of b"),
        AskLighthouse(step=0),
    ]


def test_a_replica_that_sends_heartbeats_and_no_handshake_is_given_up_after_a_while() -> None:
    membership = in_handshake("a", "b", now=100.0)
    react(membership, Tick(now=110.1), HeartbeatsReceived(now=110.1, ages={"a": 0.0, "b": 0.0}))
    assert react(membership, Tick(now=110.2)) == [
        RecordEvent("lost", "not every replica sent its handshake within 10 s"),
        AskLighthouse(step=0),
    ]


def test_a_failed_handshake_asks_for_another_quorum() -> None:
    assert react(in_handshake("a", "b"), HandshakeFailed(now=0, reason="no store")) == [
        RecordEvent("lost", "no store"),
        AskLighthouse(step=0),
    ]


def test_an_incompatible_replica_ends_with_the_reason() -> None:
    membership = in_handshake("a", "b")
    said = (handshake(0, 5, established=False), handshake(9, 7, job=JOBS[1]))
    assert react(membership, HandshakesReceived(now=0, handshakes=said)) == [
        Unregister(),
        Refuse("seed is '1' here and '2' in the fleet"),
    ]


def test_the_others_ask_for_a_quorum_without_the_incompatible_replica() -> None:
    membership = in_handshake("a", "b")
    said = (handshake(0, 5), handshake(9, 7, established=False, job=JOBS[1]))
    assert react(membership, HandshakesReceived(now=0, handshakes=said)) == [
        RecordEvent("lost", "incompatible replicas were refused: 9/7"),
        AskLighthouse(step=0),
    ]


def test_compatible_replicas_connect() -> None:
    (connect,) = react(in_handshake("b", "a"), handshakes((0, 5, True), (0, 5, True)))
    assert isinstance(connect, Connect) and (connect.names, connect.rank) == (("b", "a"), 1)


def test_replicas_that_cannot_connect_ask_again() -> None:
    membership = in_handshake("a", "b")
    react(membership, handshakes((0, 5, True), (0, 5, True)))
    assert react(membership, ConnectionFailed(now=0, reason="refused")) == [
        RecordEvent("lost", "refused"),
        AskLighthouse(step=0),
    ]


def ask(membership: Membership) -> AskLighthouse:
    """The request for a quorum after a failure; all peers that are looked for before have answered."""
    asked = react(membership, requested())
    if isinstance(asked[-1], CheckLinks):
        asked = react(membership, LinksChecked(now=0, unreachable=()))
    assert isinstance(asked[-1], AskLighthouse)
    return asked[-1]


def fail(membership: Membership, number: int, *replicas: str, backend: bool = False, at: float = 0.0) -> list[str]:
    """Let the sum of the gradients fail with the replicas of the quorum that was asked for; the reasons to wait."""
    equal = handshakes(*[(0, 5, True)] * len(replicas))
    if react(membership, *accepted(*replicas, number=number), equal, GroupConnected(now=at)) == [LoadCheckpoint()]:
        react(membership, NoNewerCheckpoint(now=at))  # one that is gone might have gone on alone
    failed = react(membership, StepFailed(now=at, reason="duplicate GPU", backend=backend))
    assert failed[-1] == DropConnections()
    return [one.text for one in failed if isinstance(one, RecordEvent) and one.what == "waiting"]


def gives_up(membership: Membership, *hopeless: bool, names: str = "ab") -> bool:
    """Whether it gives up when the lighthouse says which replicas of the quorum are certain."""
    ended = react(membership, dataclasses.replace(quorum(*names, number=100), hopeless=hopeless))
    return ended == [Unregister(), GiveUp("duplicate GPU")]


def test_what_fails_five_times_with_the_same_replicas_is_given_up() -> None:
    membership = idle()
    for number in range(1, 6):
        assert not ask(membership).hopeless
        fail(membership, number, "a", "b", backend=True)
    assert ask(membership).hopeless
    assert gives_up(membership, True, False)


def test_what_sounds_like_lost_connections_is_given_up_after_ten_times_and_two_minutes() -> None:
    for failures, every_s, hopeless in ((9, 20.0, False), (10, 20.0, True), (60, 2.0, False), (61, 2.0, True)):
        membership = idle()
        for number in range(failures):  # the last one is (failures - 1) * every_s seconds after the first
            ask(membership)
            fail(membership, number, "a", "b", at=every_s * number)
        assert ask(membership).hopeless == hopeless


@pytest.mark.parametrize("failures", [2, 3])
def test_replicas_that_have_failed_three_times_give_up_when_one_of_them_is_certain(failures: int) -> None:
    membership = idle()
    for number in range(failures):
        ask(membership)
        fail(membership, number, "a", "b")
    assert not ask(membership).hopeless
    assert gives_up(membership, False, True) == (failures == 3)


def test_nobody_gives_up_with_replicas_other_than_those_that_failed() -> None:
    membership = idle()
    for number in range(5):
        ask(membership)
        fail(membership, number, "a", "b", backend=True)
    assert ask(membership).hopeless
    assert not gives_up(membership, True, False, names="ac")


def test_failures_with_the_same_replicas_are_followed_by_pauses_and_explained_once() -> None:
    """No pause after the first; 0.1 s after the peers were looked for; from the third on twice as long each time."""
    membership, pauses, reasons = idle(), [], []
    for number in range(9):
        pauses.append(ask(membership).after_s)
        reasons += [(number, reason) for reason in fail(membership, number, "a", "b")]
    assert pauses == [0.0, 0.0, 0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert [number for number, _ in reasons] == [2] and "duplicate GPU" in reasons[0][1]


def test_a_peer_that_cannot_be_reached_other_replicas_and_committed_steps_are_no_reason_to_give_up() -> None:
    membership = idle()
    for number in range(10):
        ask(membership)
        fail(membership, number, "a", "b", at=60.0 * number)
    (asked,) = react(membership, requested(), LinksChecked(now=0, unreachable=("b",)))
    assert isinstance(asked, AskLighthouse) and not asked.hopeless
    membership = idle()
    for number in range(20):  # the other replica is another incarnation each time
        assert not ask(membership).hopeless
        fail(membership, number, "a", f"b{number % 2}", backend=True, at=60.0 * number)
    for number in range(20):
        assert not ask(membership).hopeless
        fail(membership, number, "a", "b", backend=True, at=60.0 * number)
        ask(membership)
        equal = handshakes((0, 5, True), (0, 5, True))
        if react(membership, *accepted("a", "b"), equal, GroupConnected(now=0)) == [LoadCheckpoint()]:
            react(membership, NoNewerCheckpoint(now=0))
        react(membership, committed())


def test_a_newcomer_with_another_secret_gives_up_and_one_that_met_others_does_not() -> None:
    failed = HandshakeFailed(now=0, reason="another secret", foreign=True)
    membership = asking()
    for number in range(1, 3):
        assert isinstance(react(membership, *accepted("a", "b", number=number), failed)[-1], AskLighthouse)
    (unregister, refused) = react(membership, *accepted("a", "b", number=3), failed)
    assert unregister == Unregister() and isinstance(refused, Refuse) and "secret" in refused.difference
    trained = computing("a", "b")
    react(trained, committed(), requested(step=1))
    for number in range(2, 20):  # whoever has no secret can only delay those that have it
        assert isinstance(react(trained, *accepted("a", "b", "x", number=number), failed)[-1], AskLighthouse)


# Links that are cut ---------------------------------------------------------------------------------------------------


def with_links(formed: QuorumFormed, *unreachable: str, steps: tuple[int, ...] = ()) -> QuorumFormed:
    """A quorum whose replicas do not reach these others: one text per replica."""
    said = tuple(tuple(names.split()) for names in unreachable)
    return dataclasses.replace(formed, unreachable=said, steps=steps or (1,) * len(formed.replicas))


@pytest.mark.parametrize(
    ("unreachable", "steps", "out"),
    [
        (("", "", ""), (4, 4, 4), ""),
        (("c", "", "a"), (4, 4, 4), "c"),  # the last one by name
        (("c", "", "a"), (4, 4, 5), "a"),  # nobody else has the step of c
        (("c", "", ""), (4, 4, 4), "a"),  # only a can notice that it reaches c again
        (("b c", "a", "a"), (4, 4, 4), "a"),  # both others reach each other
        (("b", "a c", "b"), (4, 4, 4), "b"),
        (("b c", "a c", "a b"), (4, 4, 4), "b c"),  # none reaches another
        (("d", "", ""), (4, 4, 4), ""),  # the quorum lacks it anyway
    ],
)
def test_who_is_left_out_follows_from_what_all_say(
    unreachable: tuple[str, ...], steps: tuple[int, ...], out: str
) -> None:
    assert out_of_reach(with_links(quorum("a", "b", "c"), *unreachable, steps=steps)) == {*out.split()}


def test_a_newcomer_is_left_out_and_not_the_replica_that_trains() -> None:
    formed = quorum("a", "b", "c", established=(False, True, True))
    assert out_of_reach(with_links(formed, "b", "a", "")) == {"a"}


def test_after_two_failures_the_peers_are_tried_and_the_lighthouse_learns_who_does_not_answer() -> None:
    membership = computing("a", "b", "c")
    failed = StepFailed(now=0, reason="no answer")
    react(membership, failed)
    equal = handshakes((0, 5, True), (0, 5, True), (0, 5, True))
    react(membership, requested(), *accepted("a", "b", "c"), equal)
    refused = ConnectionFailed(now=0, reason="refused")
    assert react(membership, refused) == [RecordEvent("lost", "refused"), CheckLinks(names=("b", "c"))]
    (asked,) = react(membership, LinksChecked(now=0, unreachable=("c",)))
    assert isinstance(asked, AskLighthouse) and asked.unreachable == ("c",)
    react(membership, *accepted("a", "b"), handshakes((0, 5, True), (0, 5, True)), GroupConnected(now=0), committed())
    (asked,) = react(membership, requested(step=1))
    assert isinstance(asked, AskLighthouse) and asked.unreachable == (), "after a step that is forgotten"


def test_the_replica_that_is_left_out_stops_its_heartbeats_until_it_reaches_its_peer_again() -> None:
    membership = asking()
    told, unregister, check = react(membership, with_links(quorum("0", "a", "b"), "a", "0", ""))
    assert isinstance(told, RecordEvent) and told.what == "waiting" and "left out" in told.text and "0" in told.text
    assert unregister == Unregister() and check == CheckLinks(names=("0",), after_s=5.0)
    assert react(membership, LinksChecked(now=5, unreachable=("0",))) == [check]
    assert react(membership, LinksChecked(now=10, unreachable=())) == [Register()]
    assert asks(membership, Registered(now=10, name="a2", store="store-a"), step=0)


@pytest.mark.parametrize(
    ("blocked", "steps", "out"),
    [
        (("d", "", "", "a"), (4, 4, 4, 4), "d"),
        (("d", "", "", "a"), (4, 4, 4, 5), "a"),  # nobody else has the step of d
        (("b c d", "a", "a", "a"), (4, 4, 4, 4), "a"),  # the one that the most report
        (("b", "a", "d", "c"), (4, 4, 4, 4), ""),  # two of four would be left
        (("b c d", "a c d", "a b d", "a b c"), (4, 4, 4, 4), ""),  # none reaches another: that is no single link
        (("e", "", "", ""), (4, 4, 4, 4), ""),  # the quorum lacks it anyway
    ],
)
def test_one_side_of_blocked_ports_is_left_out_if_more_than_half_of_the_replicas_stay(
    blocked: tuple[str, ...], steps: tuple[int, ...], out: str
) -> None:
    formed = with_links(quorum("a", "b", "c", "d"), "", "", "", "", steps=steps)
    said = dataclasses.replace(formed, blocked=tuple(tuple(names.split()) for names in blocked))
    assert out_of_reach(said) == {*out.split()}
    assert out_of_reach(said, min_replicas=4) == set(), "nobody could train without it"


def test_of_two_replicas_with_blocked_ports_between_them_none_is_left_out_to_train_alone() -> None:
    formed = dataclasses.replace(quorum("a", "b"), blocked=(("b",), ("a",)))
    assert out_of_reach(formed) == set()
    assert out_of_reach(dataclasses.replace(formed, unreachable=((), ("a",)))) == {"b"}, "unlike those of a cut link"


def test_a_cut_link_counts_even_if_blocked_ports_cannot_be_avoided() -> None:
    formed = with_links(quorum("a", "b", "c"), "", "c", "b")
    assert out_of_reach(dataclasses.replace(formed, blocked=(("b", "c"), ("a",), ("a",)))) == {"c"}


def test_a_replica_that_is_left_out_because_of_blocked_ports_names_its_peer_and_waits_until_they_are_open() -> None:
    membership = asking()
    formed = dataclasses.replace(quorum("0", "a", "b"), blocked=(("a",), ("0",), ()))
    told, unregister, check = react(membership, formed)
    assert isinstance(told, RecordEvent) and "connections with 0 fail" in told.text and "firewall" in told.text
    assert unregister == Unregister() and check == CheckLinks(names=("0",), after_s=5.0)
    assert react(membership, LinksChecked(now=5, unreachable=(), blocked=("0",))) == [check]
    assert react(membership, LinksChecked(now=10, unreachable=())) == [Register()]


def test_blocked_ports_are_reported_and_named_when_two_replicas_give_up_because_of_them() -> None:
    membership = idle()
    for number in range(5):
        ask(membership)
        fail(membership, number, "a", "b", backend=True)
    (asked,) = react(membership, requested(), LinksChecked(now=0, unreachable=(), blocked=("b",)))
    assert isinstance(asked, AskLighthouse) and asked.blocked == ("b",) and asked.hopeless, "it still counts"
    ended = react(membership, dataclasses.replace(quorum("a", "b", number=100), hopeless=(True, False)))
    assert isinstance(ended[-1], GiveUp) and ended[-1].reason.startswith("duplicate GPU; connections with b fail")


@pytest.mark.parametrize(("others", "further", "looks"), [("", 0, True), ("b", 0, True), ("b", 1, False)])
def test_one_that_comes_back_after_the_others_have_finished_looks_for_their_last_checkpoint(
    others: str, further: int, looks: bool
) -> None:
    """Else it would repeat the steps that they have committed meanwhile, alone, and write other final weights."""
    membership = computing("a", "b", "c")
    react(membership, committed(), requested(step=1))
    react(membership, dataclasses.replace(quorum("0", "a", "b", number=2), unreachable=((), ("0",), ())))
    react(membership, LinksChecked(now=10, unreachable=()), Registered(now=10, name="a", store="store-a"))
    for now in (10.5, 11.0, 11.5):
        membership.objections.watch.answered(now, about_quorum=False, ages={})
    own = membership.state.lineage
    met = handshakes((1, own, True), *[(1 + further, own + further, True) for _ in others], now=12)
    connected = react(membership, *accepted("a", *others, number=3, now=12), met, GroupConnected(now=12))
    assert connected == [LoadCheckpoint() if looks else ReceiveState(1, listen=True)]
    if looks:
        assert isinstance(react(membership, NoNewerCheckpoint(now=12))[-1], ComputeStep)


def test_the_others_ask_for_a_quorum_without_the_one_that_is_left_out() -> None:
    lost, asked = react(asking(), with_links(quorum("a", "b", "c"), "", "c", "b"))
    assert isinstance(lost, RecordEvent) and lost.what == "lost" and "c: left out" in lost.text
    assert isinstance(asked, AskLighthouse) and asked.after_s > 0


def test_a_replica_that_is_left_out_leaves_when_it_is_told_to() -> None:
    membership = asking()
    react(membership, with_links(quorum("0", "a"), "a", "0"))
    assert react(membership, ToldToLeave(now=1)) == [LeaveFleet(save_state=False)]


def test_a_replica_that_has_stopped_its_heartbeats_registers_again() -> None:
    membership = computing("a", "b")
    react(membership, StepFailed(now=70, reason="closed"))
    unregister, lost, register = react(membership, dataclasses.replace(requested(), registered=False))
    assert unregister == Unregister() and register == Register()
    assert isinstance(lost, RecordEvent) and "kept them waiting" in lost.text


def test_a_replica_that_trained_with_the_others_and_does_not_answer_is_given_up_after_five_objections() -> None:
    """And not before 20 seconds, in which it would have asked for its next step if it had gone on without them."""
    membership = computing("a", "b", "c")
    react(membership, committed(), requested(step=1))
    for number, now in enumerate([0, 1, 2, 3, 4, 5, 20, 20.1], 2):
        formed = dataclasses.replace(quorum("a", "b", number=number, now=now), steps=(1, 1))
        *_, sent = react(membership, formed, alive("a", "b", "c", now=now, groups={"c": None}))
        assert isinstance(sent, SendHandshake) and sent.handshake.objects is (now < 20.1)
        if now < 20.1:
            objection = dataclasses.replace(handshakes((1, 6, True)).handshakes[0], objects=True)
            react(membership, HandshakesReceived(now=now, handshakes=(objection, objection)))
    stranger = alive("a", "b", "x", groups={"x": None})
    react(membership, HandshakeFailed(now=0, reason="no store"))
    *_, sent = react(membership, quorum("a", "b", number=9), stranger)
    assert isinstance(sent, SendHandshake) and sent.handshake.objects, "of another one it is not known what it does"


def test_a_replica_whose_weights_differ_is_no_longer_established() -> None:
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1), quorum("a", "b", group=KEY))
    assert membership.state.established
    react(membership, WeightsDiffer(now=0))
    assert not membership.state.established


def connected(*states: tuple[int, int, bool]) -> tuple[Membership, list[Instruction]]:
    """Replica a with these states of itself and its peers, right after connecting."""
    membership = idle()
    step, lineage, _ = states[0]
    names = "abc"[: len(states)]
    react(membership, requested(step=step, lineage=lineage), *accepted(*names), handshakes(*states))
    return membership, react(membership, GroupConnected(now=0))


def test_if_nobody_has_trained_a_checkpoint_may_be_further() -> None:
    membership, instructions = connected((0, 5, False), (0, 5, False))
    assert instructions == [LoadCheckpoint()]
    assert react(membership, CheckpointLoaded(now=0, step=40, lineage=9)) == [
        RecordEvent("lost", "a checkpoint is further than all replicas"),
        DropConnections(),
        AskLighthouse(step=40),
    ]
    assert membership.state == ReplicaState(step=40, lineage=9)


def test_without_a_further_checkpoint_the_step_begins() -> None:
    membership, _ = connected((0, 5, False), (0, 5, False))
    assert react(membership, NoNewerCheckpoint(now=0)) == [
        RecordEvent("members", "a b"),
        ComputeStep(step=0, participants=("a", "b"), rank=0),
    ]


def test_replicas_with_the_same_lineage_compute_at_once() -> None:
    _, instructions = connected((3, 5, True), (3, 5, True))
    assert instructions == [
        RecordEvent("members", "a b"),
        ComputeStep(step=3, participants=("a", "b"), rank=0),
    ]


def test_a_replica_with_another_lineage_receives_the_state_and_is_not_established_by_it() -> None:
    membership, instructions = connected((0, 5, False), (3, 9, True))
    assert instructions == [ReceiveState(1)]
    assert react(membership, StateReceived(now=0, step=3, lineage=9, size=1000)) == [
        RecordEvent("received", "1000 bytes from b"),
        RecordEvent("members", "a b"),
        ComputeStep(step=3, participants=("a", "b"), rank=0, receiving=frozenset({0})),
    ]
    assert membership.state == ReplicaState(step=3, lineage=9)


def test_the_replica_with_the_right_lineage_sends_it_to_all_who_need_it() -> None:
    membership, instructions = connected((3, 9, True), (0, 5, False), (2, 8, True))
    assert instructions == [SendState((1, 2))]
    (*_, step) = react(membership, StateSent(now=0))
    assert step == ComputeStep(step=3, participants=("a", "b", "c"), rank=0, receiving=frozenset({1, 2}))


def listened_to(*more: tuple[int, int, bool]) -> Membership:
    """Replica a, in the first step of a group in which b listens."""
    membership, _ = connected((3, 9, True), (0, 5, False), *more)
    react(membership, StateSent(now=0))
    return membership


def test_the_group_goes_on_without_the_lighthouse_until_nobody_listens_any_more() -> None:
    membership = listened_to()
    for step in (4, 5):
        react(membership, committed())
        assert react(membership, requested(step=step)) == [
            ComputeStep(step=step, participants=("a", "b"), rank=0, receiving=frozenset({1}))
        ]
    react(membership, committed(arrived=frozenset({1})))
    assert asks(membership, requested(step=6), step=6)


def test_whoever_listened_goes_through_the_steps_that_it_heard_and_then_takes_part() -> None:
    membership, _ = connected((0, 5, False), (3, 9, True))
    key = membership.group.key if membership.group is not None else ""
    (*_, step) = react(membership, StateReceived(now=0, step=3, lineage=9, size=1000))
    assert step == ComputeStep(step=3, participants=("a", "b"), rank=0, receiving=frozenset({0}))
    react(membership, committed())
    (step,) = react(membership, requested(step=4, lineage=membership.state.lineage))
    assert step == ComputeStep(step=4, participants=("a", "b"), rank=0, receiving=frozenset({0}))
    react(membership, committed(arrived=frozenset({0})))
    lineage = extend_lineage(extend_lineage(9, STEP, key), STEP, key)
    assert membership.state == ReplicaState(step=5, lineage=lineage, established=True)
    assert asks(membership, requested(step=5), step=5)


def test_nobody_listens_in_a_group_that_failed() -> None:
    membership = listened_to()
    react(membership, StepFailed(now=0, reason="no heartbeat of b"))
    assert membership.listening == frozenset()
    assert asks(membership, requested(step=3, lineage=9), step=3)


def test_when_one_leaves_those_who_have_the_state_go_on_without_those_who_listen() -> None:
    membership = listened_to((3, 9, True))
    (publish, _, connect) = react(membership, committed(frozenset({2})))
    assert isinstance(publish, PublishGroup) and publish.group.names == ("a",)
    assert isinstance(connect, Connect) and connect.names == ("a",)
    assert membership.listening == frozenset()


def test_a_replica_that_has_just_applied_what_it_heard_comes_back_through_the_lighthouse_if_one_left() -> None:
    membership, _ = connected((0, 5, False), (3, 9, True), (3, 9, True))
    react(membership, StateReceived(now=0, step=3, lineage=9, size=1000))
    (recorded, dropped) = react(membership, committed(frozenset({2})))
    assert isinstance(recorded, RecordEvent) and dropped == DropConnections()
    assert membership.state.established and asks(membership, requested(step=4, lineage=9), step=4)
    states = ((4, 9, True), (0, 5, False))
    formed = react(membership, *accepted("a", "b", number=2), handshakes(*states), GroupConnected(now=0))
    assert formed == [LoadCheckpoint()], "those who went on may have left meanwhile"


def test_if_all_who_have_the_state_leave_the_first_of_them_saves_it() -> None:
    assert react(listened_to(), committed(frozenset({0}))) == [LeaveFleet(save_state=True)]
    assert react(listened_to(), committed(frozenset({0, 1}))) == [LeaveFleet(save_state=True)]
    assert react(listened_to((3, 9, True)), committed(frozenset({0}))) == [LeaveFleet(save_state=False)]


def test_one_that_listened_to_somebody_further_who_left_looks_for_the_last_checkpoint() -> None:
    """Else it would go on from its own older state, and the steps that they have committed would be lost."""
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1, lineage=8))
    met = handshakes((1, 8, True), (9, 9, True))
    received = react(membership, *accepted("a", "b", number=2), met, GroupConnected(now=0))
    assert received[-1] == ReceiveState(1, listen=True)
    react(membership, ConnectionFailed(now=0, reason="a replica left"))
    membership.objections.watch.answered(0, about_quorum=False, ages={})
    alone = (*accepted("a", number=3, now=9), handshakes((1, 8, True), now=9), GroupConnected(now=9))
    assert react(membership, *alone) == [LoadCheckpoint()]
    assert isinstance(react(membership, NoNewerCheckpoint(now=9))[-1], ComputeStep)


@pytest.mark.parametrize(("failed_at", "looks"), [(1.0, False), (11.0, True)])
def test_one_that_was_held_up_in_a_step_looks_for_the_last_checkpoint_of_the_others(
    failed_at: float, looks: bool
) -> None:
    """They may have gone on without it, and have finished: a backend that fails at one replica may block at another."""
    membership = computing("a", "b")
    react(membership, StepFailed(now=failed_at, reason="connection closed", backend=True))
    membership.objections.watch.answered(failed_at, about_quorum=False, ages={})
    now = failed_at + 9
    react(membership, requested(now=failed_at))
    alone = (*accepted("a", number=2, now=now), handshakes((0, 0, True), now=now), GroupConnected(now=now))
    assert (react(membership, *alone) == [LoadCheckpoint()]) == looks


def test_a_peer_lost_while_the_state_is_sent_costs_the_group() -> None:
    membership, _ = connected((3, 9, True), (0, 5, False))
    assert react(membership, ConnectionFailed(now=0, reason="connection closed")) == [
        RecordEvent("lost", "connection closed"),
        DropConnections(),
        AskLighthouse(step=3),
    ]


def test_a_committed_step_extends_the_lineage_and_establishes_the_replica() -> None:
    membership = computing("a", "b")
    react(membership, committed())
    assert membership.state == ReplicaState(step=1, lineage=extend_lineage(5, STEP, KEY), established=True)
    assert react(membership, requested(step=1)) == [AskLighthouse(step=1, group=KEY, established=True)]


def test_a_failed_step_costs_the_group_and_the_next_request_reports_the_failure() -> None:
    membership = computing("a", "b")
    assert react(membership, StepFailed(now=0, reason="no heartbeat of b")) == [
        RecordEvent("lost", "no heartbeat of b"),
        DropConnections(),
    ]
    assert react(membership, requested()) == [AskLighthouse(step=0)]


PART = KeptPart(workers=3, samples=12, micro_batches=(0, 2))


def test_what_replicas_have_kept_of_a_failed_step_is_known_to_all_in_the_next_attempt_and_in_no_later_step() -> None:
    membership = computing("a", "b", "c")
    react(membership, StepFailed(now=0, reason="no heartbeat of c"))
    again = StepRequested(now=0, step=0, lineage=5, kept=PART)
    lost = HeartbeatsReceived(now=0, ages={"a": 0.0, "b": 0.0, "c": 0.9})
    (*_, sent) = react(membership, again, quorum("a", "b", number=2), lost)
    assert isinstance(sent, SendHandshake) and sent.handshake.kept == PART
    assert Handshake.decode(sent.handshake.encode()) == sent.handshake
    theirs = Handshake(name="b", store="store-b", job=JOBS[0], state=sent.handshake.state)
    react(membership, HandshakesReceived(now=0, handshakes=(sent.handshake, theirs)))
    (*_, step) = react(membership, GroupConnected(now=0), NoNewerCheckpoint(now=0))
    assert step == ComputeStep(step=0, participants=("a", "b"), rank=0, kept=(PART, None))
    react(membership, committed(), requested(step=1))
    assert membership.group is not None
    same = quorum("a", "b", group=membership.group.key)
    assert react(membership, same) == [ComputeStep(step=1, participants=("a", "b"), rank=0)]


def test_a_part_of_a_step_that_follows_another_state_is_worth_nothing() -> None:
    membership = idle()
    react(membership, StepRequested(now=0, step=2, lineage=8, kept=PART), *accepted("a", "b"))
    own = Handshake(
        name="a", store="s", job=JOBS[0], state=ReplicaState(step=2, lineage=8, established=True), kept=PART
    )
    theirs = Handshake(name="b", store="s", job=JOBS[0], state=ReplicaState(step=3, lineage=9, established=True))
    react(membership, HandshakesReceived(now=0, handshakes=(own, theirs)), GroupConnected(now=0))
    (*_, step) = react(membership, StateReceived(now=0, step=3, lineage=9, size=1000))
    assert step == ComputeStep(step=3, participants=("a", "b"), rank=0, receiving=frozenset({0}))


def test_a_replica_that_said_so_leaves_after_the_step() -> None:
    assert react(computing("a", "b"), committed(frozenset({0}))) == [LeaveFleet(save_state=False)]


@pytest.mark.parametrize(("replicas", "saves"), [(("a", "b"), True), (("b", "a"), False)])
def test_if_all_leave_at_once_the_first_of_them_saves_the_state(replicas: tuple[str, ...], saves: bool) -> None:
    assert react(computing(*replicas), committed(frozenset({0, 1}))) == [LeaveFleet(save_state=saves)]


def test_the_others_form_a_group_without_the_leaver_and_without_the_lighthouse() -> None:
    membership = computing("a", "b", "c")
    assert membership.group is not None
    key = membership.group.key
    assert react(membership, committed(frozenset({1}))) == [
        PublishGroup(group("a", "c", established=True, step=1)),
        DropConnections(),
        Connect(rendezvous=f"store-a/ebbflow/{key}+", names=("a", "c"), rank=0),
    ]
    assert react(membership, GroupConnected(now=50.0)) == [RecordEvent("members", "a c")]
    assert react(membership, requested(step=1, lineage=6)) == [ComputeStep(step=1, participants=("a", "c"), rank=0)]
    react(membership, committed())
    assert membership.state.lineage == extend_lineage(6, STEP, f"{key}+"), "the key of the group is another one"


def test_several_leave_one_after_the_other() -> None:
    membership = computing("a", "b", "c")
    react(membership, committed(frozenset({1})), GroupConnected(now=0), requested(step=1))
    *_, connect = react(membership, committed(frozenset({1})))
    assert isinstance(connect, Connect) and connect.names == ("a",) and connect.rendezvous.endswith("++")


def test_too_few_replicas_do_not_go_on_by_themselves() -> None:
    membership = computing("a", "b", min_replicas=2)
    assert react(membership, committed(frozenset({1}))) == [
        RecordEvent("lost", "1 replicas are left, and 2 are needed"),
        DropConnections(),
    ]
    assert asks(membership, requested(step=1), step=1)


def test_a_group_that_cannot_form_without_the_leaver_asks_the_lighthouse() -> None:
    membership = computing("a", "b", "c")
    react(membership, committed(frozenset({1})))
    assert react(membership, ConnectionFailed(now=0, reason="refused")) == [RecordEvent("lost", "refused")]
    assert asks(membership, requested(step=1), step=1)


def independent() -> Membership:
    membership = computing("a", "b", "c")
    react(membership, committed(frozenset({1})), GroupConnected(now=50.0), requested(step=1))
    return membership


def test_a_group_on_its_own_returns_to_the_lighthouse_when_that_has_forgotten_the_leaver() -> None:
    membership = independent()
    assert not membership.wants_lighthouse(50.9)  # 0.8 s for the heartbeat timeout, 0.2 s for two heartbeats
    assert membership.wants_lighthouse(51.1)
    react(membership, committed(lighthouse_wanted=True))
    assert not membership.wants_lighthouse(60.0)
    assert asks(membership, requested(step=2), step=2)


def test_the_last_meeting_of_all_replicas_is_at_the_lighthouse() -> None:
    membership = independent()
    react(membership, committed(), LighthouseWanted(now=0))
    assert asks(membership, requested(step=2), step=2)


def test_a_failed_step_ends_the_independence_of_a_group() -> None:
    membership = independent()
    react(membership, StepFailed(now=0, reason="lost"), requested(step=1), quorum("a", number=2))
    react(membership, HeartbeatsReceived(now=0, ages={"c": 2.0}), handshakes((1, 6, True)), GroupConnected(now=0))
    react(membership, committed())
    assert asks(membership, requested(step=2), step=2)


def test_a_replica_without_a_group_that_is_told_to_leave_leaves_at_once() -> None:
    membership = asking()
    assert react(membership, Tick(now=5)) == []
    assert react(membership, ToldToLeave(now=5)) == [LeaveFleet(save_state=False)]


def test_a_replica_with_a_group_that_is_told_to_leave_waits_for_one_more_step() -> None:
    membership = computing("a", "b")
    react(membership, committed(), requested(step=1, now=100.0))
    assert react(membership, ToldToLeave(now=100.1)) == []
    assert react(membership, Tick(now=102.0)) == []
    assert react(membership, Tick(now=110.0)) == [LeaveFleet(save_state=True)], "nobody else may have the state"


def test_an_event_that_cannot_happen_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"GroupConnected.* cannot happen in phase ASKING"):
        react(asking(), GroupConnected(now=0))
