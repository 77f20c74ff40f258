"""What speaks against a quorum: one hand-written history per decision. Most of them were found by simulated fleets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ebbflow.live.membership_events import Handshake, HeartbeatsReceived, PublishedGroup, QuorumFormed, ReplicaState
from ebbflow.live.objections import LighthouseWatch, Objections

TIMEOUT_S, PATIENCE_S = 0.8, 20.0


@dataclass
class Knowing:
    """Replica a, which has committed a step with these participants."""

    participants: tuple[str, ...] = ()
    step: int = 0
    objections: Objections = field(init=False)
    ages: dict[str, float] = field(default_factory=dict)
    """What the lighthouse said last of the heartbeats."""

    def __post_init__(self) -> None:
        self.objections = Objections(heartbeat_timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)
        self.objections.committed(self.participants)

    def answers(self, *times: float) -> None:
        """The lighthouse answers at these times."""
        for now in times:
            self.objections.watch.answered(now, about_quorum=False, ages=self.ages)

    def meets(self, *steps: int) -> None:
        """It exchanges handshakes with established replicas that have come this far."""
        self.objections.meet(
            [Handshake(name="", store="", state=ReplicaState(step=at, lineage=at, established=True)) for at in steps]
        )

    def objects(
        self,
        now: float,
        *,
        quorum: str = "a",
        steps: tuple[int, ...] = (),
        ages: dict[str, float] | None = None,
        groups: dict[str, PublishedGroup | None] | None = None,
    ) -> bool:
        """Whether it objects to a quorum, by what it learns then. Those who have not committed a step are new."""
        steps = steps or (self.step,)
        formed = QuorumFormed(
            now=now, quorum_id=1, replicas=tuple(quorum), rank=quorum.index("a"), store="", groups=("",) * len(quorum),
            established=tuple(step > 0 for step in steps), steps=steps,
        )  # fmt: skip
        self.objections.consider(formed)
        if not self.objections.looks:
            return False
        self.ages = dict.fromkeys(quorum, 0.0) | (ages or {})
        self.objections.watch.answered(now, about_quorum=True, ages=self.ages)
        objects = self.objections.objects(HeartbeatsReceived(now=now, ages=self.ages, groups=groups or {}))
        if objects:
            self.objections.objected(now)
        return objects


def test_a_newcomer_begins_nothing_before_the_lighthouse_has_answered_for_a_heartbeat_timeout() -> None:
    """Seed 104,674: a lighthouse that was restarted stood still before it had heard of the two that train."""
    newcomer = Knowing()
    assert newcomer.objects(4.9), "this is its first answer, however long ago the newcomer has registered"
    assert newcomer.objects(5.2) and newcomer.objects(5.6)
    assert not newcomer.objects(5.71)


def test_a_lighthouse_that_stood_still_is_watched_anew_by_newcomers() -> None:
    newcomer = Knowing()
    newcomer.answers(0.0, 0.5, 1.0, 1.5)
    assert newcomer.objects(5.0), "no answer for 3.5 s: its first one may not know of replicas that are alive"
    assert newcomer.objects(5.4)
    assert not newcomer.objects(5.81)


def test_where_every_quorum_takes_longer_than_the_heartbeat_timeout_newcomers_begin_at_the_fifth() -> None:
    """As with a thousand replicas: the gaps between the answers are no standstill of the lighthouse."""
    newcomer = Knowing()
    assert [newcomer.objects(7.5 * number) for number in range(5)] == [True] * 4 + [False]


def test_a_replica_that_has_met_others_does_not_go_on_from_its_older_state_when_they_have_just_died() -> None:
    """Seed 106,297: one that received the state of others was alone after the lighthouse had stood still."""
    receiver = Knowing(("a", "b", "c", "d"), step=9)
    receiver.answers(12.0, 12.5, 13.0, 13.3)
    receiver.meets(9, 19, 19, 19)
    dead = {"b": 1.5, "c": 1.5, "d": 1.5}
    assert receiver.objects(13.4, ages=dead)
    receiver.answers(14.0, 14.5)
    assert not receiver.objects(15.0, ages=dict.fromkeys(dead, 3.1)), "they are dead"


def test_a_replica_that_has_met_others_looks_even_if_another_asks_for_all() -> None:
    """The one that asks, an established one that comes first, may not know how far the fleet has come."""
    receiver = Knowing(("a", "b"), step=9)
    receiver.answers(12.0, 12.5, 13.0)
    assert not receiver.objects(13.1, quorum="ca", steps=(9, 9), ages={"b": 1.5})
    receiver.meets(19)
    assert receiver.objects(13.1, quorum="ca", steps=(9, 9), ages={"b": 1.5})


@pytest.mark.parametrize(("participants", "waits"), [("ab", True), ("abcd", True), ("abc", False)])
def test_before_most_of_the_others_are_believed_to_be_dead_at_once_they_are_looked_at_again(
    participants: str, waits: bool
) -> None:
    """Seed 111,273: twice a lighthouse that stood still took all for dead but the one that asked first."""
    survivor = Knowing(tuple(participants), step=16)
    survivor.answers(0.0)
    alive = {"ab": "a", "abcd": "ab", "abc": "ab"}[participants]
    dead = dict.fromkeys(sorted({*participants} - {*alive}), 1.1)
    steps = (16,) * len(alive)
    assert survivor.objects(7.8, quorum=alive, steps=steps, ages=dead) is waits
    if waits:
        back = dict.fromkeys(dead, 0.0)
        assert survivor.objects(7.9, quorum=alive, steps=steps, ages=back), "their heartbeats come again"
        assert not survivor.objects(8.1, quorum=alive, steps=steps, ages=dead), "they do not"


def test_no_group_goes_on_from_an_older_state_while_one_that_has_come_further_is_alive() -> None:
    """Seed 113,104: the only one that had the last steps hung, while a received its state."""
    receiver = Knowing(("a", "b", "c"), step=5)
    receiver.answers(66.0, 66.5)
    hangs = {"c": PublishedGroup(names=("a", "c"), established=True, step=18)}
    for number in range(20):
        assert receiver.objects(66.9 + number, quorum="ab", steps=(5, 0), ages={"c": 0.0}, groups=hangs)
    behind = {"c": PublishedGroup(names=("a", "c"), established=True, step=5)}
    receiver.answers(86.1, 86.6)
    assert not receiver.objects(87.0, quorum="ab", steps=(5, 0), ages={"c": 0.0}, groups=behind)


def test_one_that_trained_with_this_group_and_does_not_answer_may_have_gone_on_behind_a_cut_link() -> None:
    """Seed 420,747: it trained with another that had left, and was to ask the lighthouse after its step."""
    behind = Knowing(("a", "b", "c"), step=1)
    behind.answers(0.0, 0.5, 1.0)
    silent: dict[str, PublishedGroup | None] = {"c": None}
    times = [1.0 + number / 2 for number in range(42)]
    said = [behind.objects(now, quorum="ab", steps=(1, 0), ages={"c": 0.0}, groups=silent) for now in times]
    assert said == [now - 1.0 <= PATIENCE_S for now in times]


def test_the_only_one_that_has_the_last_steps_is_waited_for_even_if_it_does_not_answer() -> None:
    """Seed 509,279: it hung without letting its threads run, while a received its state."""
    receiver = Knowing(("a", "b"), step=2)
    receiver.answers(0.0, 0.5, 1.0)
    receiver.meets(2, 6)
    for number in range(100):
        assert receiver.objects(1.0 + number / 2, ages={"b": 0.0}, groups={"b": None})
    receiver.answers(51.0, 51.7, 52.4, 53.1)
    assert not receiver.objects(53.5, ages={"b": 3.0}), "until it is dead"


def test_a_lighthouse_that_has_forgotten_a_living_replica_was_restarted_and_is_watched_anew() -> None:
    """Seed 205,242: it was away between two requests of one that was behind, and had not heard of the others yet."""
    behind = Knowing(("a",), step=9)
    behind.answers(0.0, 0.5, 1.0)
    further = {"b": PublishedGroup(names=("b", "c"), established=True, step=31)}
    assert behind.objects(1.5, ages={"b": 0.0}, groups=further)
    assert behind.objects(1.6), "b is not even known to be dead"
    assert behind.objects(2.3)
    assert not behind.objects(2.5), "it has answered for 0.9 s"


def test_a_committed_step_ends_what_spoke_against_quorums() -> None:
    replica = Knowing(("a", "b"), step=2)
    replica.meets(6)
    replica.objections.committed(("a", "b", "c"))
    replica.answers(0.0)
    assert not replica.objects(1.0, quorum="ab", steps=(3, 3), ages={"c": 0.9})


def test_a_watch_counts_from_the_first_answer_and_from_the_last_gap() -> None:
    watch = LighthouseWatch(TIMEOUT_S)
    assert watch.reached_s(0.5) < 0.0 and watch.answers_s(0.5) < 0.0
    watch.reached(0.5)
    assert watch.reached_s(1.0) == 0.5 and watch.answers_s(1.0) < 0.0
    for now in (1.0, 1.5, 2.2, 3.1):
        watch.answered(now, about_quorum=False, ages={})
    assert watch.reached_s(4.0) == 3.5
    assert watch.answers_s(4.0) == pytest.approx(0.9), "since the one that took 0.9 s"
    watch.lost()
    watch.answered(9.0, about_quorum=False, ages={})
    assert watch.reached_s(9.5) == watch.answers_s(9.5) == 0.5
