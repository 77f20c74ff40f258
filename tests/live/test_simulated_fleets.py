"""Simulated fleets that live through random faults. What they have found has a test of its own in test_membership.py.

`make test` runs a part of the histories. All 100,000 take minutes: `make test ARGS="-m long tests/live"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partialmethod
from itertools import combinations, pairwise
from random import Random
from typing import Any
from unittest import mock

import pytest

from ebbflow.live import membership
from ebbflow.live.agreement import Agreement, agree
from ebbflow.live.membership_events import AskLighthouse, Handshake, LeaveFleet
from ebbflow.live.objections import Objections
from live import fleet_simulator
from live.fleet_histories import FAULTS, MORE_FAULTS, ORDERLY, check_lineages, random_history, recover
from live.fleet_simulator import Replica, SimulatedFleet, Violation
from live.simulated_lighthouse import SimulatedLighthouse


def failures(
    first: int, number: int, majority: bool, longest_transfer_s: float = 6.0, faults: tuple[str, ...] = FAULTS
) -> list[str]:
    """The seeds of histories in which a guarantee does not hold, and which."""
    found = []
    for seed in range(first, first + number):
        try:
            random_history(seed, majority=majority, longest_transfer_s=longest_transfer_s, faults=faults)
        except Violation as violation:
            found.append(f"seed {seed}: {violation}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("majority", [False, True])
def test_no_guarantee_is_violated_in_a_random_history(majority: bool) -> None:
    assert failures(0, 500, majority) == []


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("majority", [False, True])
def test_no_guarantee_is_violated_in_fifty_thousand_random_histories(majority: bool) -> None:
    with ProcessPoolExecutor() as pool:
        parts = [pool.submit(failures, first, 500, majority) for first in range(0, 50_000, 500)]
        assert [violation for part in parts for violation in part.result()] == []


def test_no_guarantee_is_violated_while_states_travel_for_many_steps() -> None:
    assert failures(50_000, 100, majority=False, longest_transfer_s=25.0) == []


@pytest.mark.parametrize("majority", [False, True])
def test_no_guarantee_is_violated_if_all_leave_at_once_or_something_changes_the_weights_of_one(majority: bool) -> None:
    assert failures(8_200_000, 100, majority, longest_transfer_s=12.0, faults=MORE_FAULTS) == []


def test_no_committed_step_is_lost_where_replicas_only_come_leave_and_differ() -> None:
    assert failures(8_100_000, 100, majority=False, faults=ORDERLY) == []


def test_it_is_noticed_if_those_who_leave_do_not_save_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(fleet: SimulatedFleet, replica: Replica, _: LeaveFleet) -> None:
        fleet.kill(replica)

    monkeypatch.setitem(fleet_simulator._EXECUTE, LeaveFleet, leave)
    assert "are lost, although nobody was" in failures(0, 10, majority=False, faults=ORDERLY)[0]


def one_that_is_behind(handshakes: Sequence[Handshake]) -> Agreement:
    """The state that counts is the one that has come least far."""
    agreement = agree(handshakes)
    if not agreement.transfers:
        return agreement
    return agree([dataclasses.replace(one, state=turned(one)) for one in handshakes])


def turned(handshake: Handshake) -> Any:
    return dataclasses.replace(handshake.state, step=-handshake.state.step)


def without_transfers(handshakes: Sequence[Handshake]) -> Agreement:
    return dataclasses.replace(agree(handshakes), transfers={})


BROKEN: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "no objections": (False, (mock.patch.object(Objections, "objects", return_value=False),)),
    "the state that is behind": (False, (mock.patch.object(membership, "agree", one_that_is_behind),)),
    "no transfers": (False, (mock.patch.object(membership, "agree", without_transfers),)),
    "numbers as lineages": (False, (mock.patch.object(membership, "extend_lineage", lambda lineage, *_: lineage + 1),)),
    "no majority": (
        True,
        (
            # Objections keep most groups apart even so.
            mock.patch.object(Objections, "objects", return_value=False),
            mock.patch.object(SimulatedFleet, "_excused", return_value=True),
            mock.patch.object(
                membership.Membership, "__init__", partialmethod(membership.Membership.__init__, min_replicas=1)
            ),
            mock.patch.object(
                SimulatedLighthouse, "__init__", partialmethod(SimulatedLighthouse.__init__, min_replicas=1)
            ),
        ),
    ),
}
"""Protocols that do not work: with a majority or not, and what is replaced."""


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_protocol_is_noticed_within_a_hundred_histories(what: str) -> None:
    majority, patches = BROKEN[what]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for seed in range(100):
            try:
                random_history(seed, majority=majority)
            except Violation:
                return
    raise AssertionError("no check has failed")


def test_a_seed_reproduces_a_history() -> None:
    histories = [random_history(7).commits for _ in range(2)]
    assert histories[0] == histories[1] and histories[0] != random_history(8).commits


def trained(replicas: int, *, seed: int = 1, join_timeout_s: float = 10.0) -> SimulatedFleet:
    """A fleet that has trained for ten seconds."""
    fleet = SimulatedFleet(Random(seed), join_timeout_s=join_timeout_s)
    for _ in range(replicas):
        fleet.start()
    fleet.run_until(10.0)
    assert set(fleet.commits[-1].group) == set(fleet.replicas)
    return fleet


def training(fleet: SimulatedFleet) -> set[str]:
    """The first names of those that took part in the last step."""
    return {fleet.replicas[name].machine for name in fleet.commits[-1].group}


def lines_of(fleet: SimulatedFleet) -> int:
    """How many committed steps do not belong to the longest lineage, when the fleet has recovered."""
    recover(fleet)
    check_lineages(fleet)
    return len({commit.state for commit in fleet.commits}) - max(one.state.step for one in fleet.running())


def test_a_lighthouse_that_stands_still_after_its_restart_lets_no_newcomer_begin() -> None:
    """Seed 104,674: it had not heard of the trainers yet when it answered the newcomer."""
    for seed in range(20):
        fleet = trained(2, seed=seed, join_timeout_s=1.0)
        fleet.lighthouse.restart(1.1)
        fleet.start()
        fleet.run_until(fleet.now + 1.1)
        fleet.lighthouse.stall(1.2 + seed / 10)
        assert lines_of(fleet) == 0


def test_a_lighthouse_that_stands_still_again_and_again_makes_nobody_go_on_alone_twice() -> None:
    """Seeds 106,297 and 111,273: it then takes all for dead but the one whose request it sees first."""
    for seed in range(20):
        fleet = trained(3, seed=seed, join_timeout_s=1.0)
        fleet.transfer_s = (0.1, 6.0)
        fleet.cut_off(fleet.running()[0])
        fleet.run_until(fleet.now + 3.0)
        fleet.reconnect(fleet.running()[0])
        for _ in range(4):
            fleet.lighthouse.stall(1.0 + seed / 20)
            fleet.run_until(fleet.now + 1.5 + seed / 20)
        assert lines_of(fleet) == 0


def test_a_lighthouse_that_is_restarted_between_two_requests_lets_nobody_go_on_from_an_older_state() -> None:
    """Seed 205,242: one that was behind had no request under way, and the new lighthouse had heard of nobody else."""
    for seed in range(20):
        fleet = trained(3, seed=seed, join_timeout_s=1.0)
        behind, *others = fleet.running()
        fleet.cut_off(behind)
        fleet.run_until(fleet.now + 4.0)
        fleet.step_s = (8.0, 9.0)  # the others do not ask for a while
        fleet.run_until(fleet.now + 1.5)
        for other in others:
            fleet.cut_off(other)
        fleet.reconnect(behind)
        fleet.lighthouse.restart(0.02)  # it hears of the one that is behind first, and then names that one again
        fleet.run_until(fleet.now + 0.4)
        for other in others:
            fleet.reconnect(other)
        fleet.run_until(fleet.now + 1.0)

        def has_not_asked(fleet: SimulatedFleet = fleet, behind: Replica = behind) -> bool:
            return type(behind.waiting_for) is AskLighthouse and not fleet.lighthouse.asked

        assert fleet.run_until(fleet.now + 1.0, stop=has_not_asked)
        fleet.lighthouse.restart(0.02)
        assert lines_of(fleet) == 0


@pytest.mark.parametrize("holds_lock", [False, True])
def test_the_only_replica_with_the_last_steps_may_hang_while_another_receives_them(holds_lock: bool) -> None:
    """Seeds 113,104 and 509,279: the receiver, which has an older state, waits and does not go on from that."""
    fleet = trained(2, join_timeout_s=1.0)
    alone, away = fleet.running()
    fleet.transfer_s = (10.0, 10.0)
    fleet.cut_off(away)
    fleet.run_until(fleet.now + 5.0)
    fleet.reconnect(away)
    assert fleet.run_until(fleet.now + 10.0, stop=lambda: away.group is not None and bool(away.membership.listening))
    alone.hangs_until, alone.holds_lock = fleet.now + 69.0, holds_lock
    fleet.start()
    fleet.run_until(fleet.now + 69.0)
    assert lines_of(fleet) == 0


def test_a_replica_behind_a_cut_link_is_not_taken_for_one_that_hangs() -> None:
    """Seed 420,747: two went on without the third, one of them left, and the other is not reached by the third."""
    for seed in range(20):
        fleet = trained(3, seed=seed, join_timeout_s=1.0)
        away, stays, leaves = fleet.running()
        fleet.cut_off(away)
        fleet.run_until(fleet.now + 3.0)
        leaves.leaving = True
        fleet.step_s = (3.0, 4.0)
        fleet.start()
        link = frozenset((away.machine, stays.machine))
        fleet.cut_links.add(link)
        fleet.at(20.0, lambda fleet=fleet, link=link: fleet.cut_links.discard(link))  # type: ignore[misc]
        assert fleet.run_until(fleet.now + 5.0, stop=lambda leaves=leaves: leaves.dead)  # type: ignore[misc]
        fleet.run_until(fleet.now + 0.2)
        fleet.lighthouse.stall(1.2)
        fleet.run_until(fleet.now + 0.5)
        fleet.reconnect(away)
        fleet.run_until(fleet.now + 25.0)
        assert lines_of(fleet) == 0


def test_with_a_majority_a_step_that_was_decided_before_a_pause_may_be_applied_after_it() -> None:
    """Seed 209,813: meanwhile two newcomers have begun anew; they give up their steps, and do not train beside it."""
    fleet = SimulatedFleet(Random(3), min_replicas=2, join_timeout_s=1.0, step_s=(0.2, 0.3))
    one, other = fleet.start(), fleet.start()
    fleet.run_until(10.0)
    assert fleet.run_until(20.0, stop=lambda: len(other.committed) > len(one.committed))
    fleet.pause(one)
    fleet.kill(other)
    newcomers = [fleet.start(), fleet.start()]
    assert fleet.run_until(30.0, stop=lambda: all(len(new.committed) > 3 for new in newcomers))
    fleet.resume(one)
    recover(fleet)
    check_lineages(fleet)
    assert len({commit.group for commit in fleet.commits}) >= 3, "all three train together at the end"


def test_a_newcomer_meets_a_replica_that_has_asked_ahead_and_does_something_else() -> None:
    """The lighthouse names both at once; the trainer reads that within the time in which it uses the answer."""
    fleet = trained(1)
    fleet.between_steps_s = 9.0
    fleet.run_until(fleet.now + 20.0)
    fleet.start()
    assert fleet.run_until(fleet.now + 40.0, stop=lambda: len(fleet.commits[-1].group) == 2)
    assert lines_of(fleet) == 0


def test_a_lighthouse_that_was_restarted_hears_of_a_lone_replica_before_its_next_step() -> None:
    """Seed 46964: it had asked before, began a step six seconds later by that answer, and hung in it. The lighthouse,
    which had been restarted meanwhile, knew nothing of its state, the others did not reach it, and went on without."""
    random_history(46964)


def test_two_kills_shortly_after_one_another_start_no_second_lineage() -> None:
    for gap_s in (0.05, 0.3, 0.6, 0.75):
        fleet = trained(3, join_timeout_s=1.0)
        first, second, _ = fleet.running()
        fleet.kill(first)
        fleet.at(gap_s, lambda fleet=fleet, second=second: fleet.kill(second))  # type: ignore[misc]
        fleet.run_until(10.1)
        fleet.start()
        fleet.run_until(10.9)
        fleet.start()
        recover(fleet)
        check_lineages(fleet)
        survivor = max(replica.state.step for replica in fleet.running())
        assert len({commit.state for commit in fleet.commits}) == survivor, "every step is of one lineage"


def test_newcomers_wait_for_a_trainer_that_is_busy_for_longer_than_the_lighthouse_waits() -> None:
    fleet = trained(1, join_timeout_s=1.0)
    fleet.step_s = (20.0, 20.0)
    fleet.run_until(12.0)
    fleet.start()
    fleet.start()
    fleet.run_until(60.0)
    assert len(fleet.commits[-1].group) == 3
    assert len({commit.state for commit in fleet.commits}) == max(r.state.step for r in fleet.running())


@pytest.mark.parametrize("dies", ["nobody", "sender", "another", "newcomer"])
def test_the_others_do_not_wait_for_a_state_that_travels_for_many_steps(dies: str) -> None:
    """Steps of one second, and a state that travels for ten: the newcomer hears them, and applies them all."""
    fleet = trained(3)
    fleet.step_s, fleet.transfer_s = (0.9, 1.0), (10.0, 10.0)
    newcomer = fleet.start()
    assert fleet.run_until(fleet.now + 10.0, stop=lambda: newcomer.group is not None)
    fleet.run_until(fleet.now + 7.0)
    assert not newcomer.committed and len(newcomer.heard) >= 4
    sender = next(one for _, _, one in newcomer.group.sent.values()) if newcomer.group is not None else newcomer
    others = [one for one in fleet.running() if one not in (sender, newcomer)]
    victim = {"sender": sender, "another": others[0], "newcomer": newcomer}.get(dies)
    if victim is not None:
        fleet.kill(victim)
    fleet.run_until(fleet.now + 25.0)
    running = fleet.running()
    assert set(fleet.commits[-1].group) == {one.name for one in running}
    assert not any(one.membership.listening for one in running)
    check_lineages(fleet)
    times = [commit.time for commit in fleet.commits if commit.replica == others[-1].name]
    assert max(later - earlier for earlier, later in pairwise(times)) < (4.5 if victim is not None else 1.5)
    assert len({commit.state for commit in fleet.commits}) == max(one.state.step for one in running)


@pytest.mark.parametrize("away_s", [0.0, 1.0, 30.0])
def test_a_lighthouse_that_is_restarted_costs_two_seconds_more_than_its_restart(away_s: float) -> None:
    fleet = trained(3)
    fleet.lighthouse.restart(away_s)
    fleet.run_until(fleet.now + away_s)
    before, back = len(fleet.commits), fleet.now
    fleet.run_until(back + 60.0, stop=lambda: len(fleet.commits) > before + 3)
    # The three commits of one step after the one that was under way.
    assert fleet.now - back < 2.0 + fleet.step_s[1]


def test_a_lighthouse_that_stands_still_costs_no_replica() -> None:
    for seed in range(20):
        fleet = trained(3, seed=seed)
        fleet.lighthouse.stall(2.0)
        fleet.run_until(20.0)
        recover(fleet)
        assert len(fleet.commits[-1].group) == 3


def test_messages_that_are_lost_cost_no_replica_and_no_step() -> None:
    """Two of one replica, four times, to the lighthouse or to a store, or the answers to them."""
    for seed in range(20):
        fleet = trained(3, seed=seed)
        one = fleet.running()[seed % 3]
        for _ in range(4):
            newcomer = fleet.start()  # so that all of them meet
            one.to_lose = 2
            assert fleet.run_until(fleet.now + 200.0, stop=lambda one=one: one.to_lose == 0)  # type: ignore[misc]
            fleet.kill(newcomer)
        assert lines_of(fleet) == 0
        assert len(fleet.commits[-1].group) == 3


@pytest.mark.parametrize("meets", [False, True])
def test_an_answer_of_the_lighthouse_that_is_lost_silently_costs_a_few_seconds(meets: bool) -> None:
    """The replica looks at its connection after 2 s and a tick or two of 1 s, and steps take one second. In reality it
    also waits for 2 s for an answer over that connection. `meets`: the answer is about a fleet with a newcomer."""
    for seed in range(20):
        fleet = trained(3, seed=seed)
        one, replicas = fleet.running()[seed % 3], 3 + meets
        if meets:
            fleet.start()

        def loses(replica: Replica, one: Replica = one, fleet: SimulatedFleet = fleet, size: int = replicas) -> bool:
            lost = replica is one and one.to_lose > 0 and len(fleet.lighthouse.previous) == size
            one.to_lose -= lost
            return lost

        one.to_lose = 1
        with mock.patch.object(fleet, "loses", loses), mock.patch.object(fleet, "loses_silently", return_value=True):
            assert fleet.run_until(fleet.now + 20.0, stop=lambda one=one: one.disconnected)  # type: ignore[misc]
        lost_at, before = fleet.now, len(one.committed)
        assert fleet.run_until(lost_at + 7.0, stop=lambda one=one, before=before: len(one.committed) > before + 1)  # type: ignore[misc]
        fleet.run_until(fleet.now + 5.0)
        assert len(fleet.commits[-1].group) == replicas and lines_of(fleet) == 0


@pytest.mark.parametrize(("replicas", "pair"), [(2, (0, 1)), (3, (0, 1)), (3, (1, 2)), (4, (0, 3))])
def test_a_cut_link_costs_one_replica_and_no_more_than_forty_seconds(replicas: int, pair: tuple[int, int]) -> None:
    """A sum that waits for 14 s, a group that cannot connect for 10 s, an attempt at a store, a heartbeat timeout."""
    fleet = trained(replicas)
    names = sorted(fleet.replicas)  # the first one has the store where all meet
    link = frozenset(names[one] for one in pair)
    fleet.cut_links.add(link)
    # Steps take one second, and so there is always one under way when the link is cut.
    fleet.run_until(fleet.now + 2.0)
    cut_at, before = fleet.now, len(fleet.commits)
    assert fleet.run_until(cut_at + 40.0, stop=lambda: len(fleet.commits) > before), "one side is left out"
    fleet.run_until(cut_at + 200.0)
    (out,) = {*names} - training(fleet)
    assert out == max(link), "of two that have come equally far, the last one by name"
    times = [commit.time for commit in fleet.commits if commit.time > cut_at + 40.0]
    assert max(later - earlier for earlier, later in pairwise(times)) < 2.0, "it does not disturb the others meanwhile"
    fleet.cut_links.clear()
    fleet.run_until(fleet.now + 15.0)
    assert training(fleet) == {*names}, "it is back"
    check_lineages(fleet)
    assert len({commit.state for commit in fleet.commits}) == max(one.state.step for one in fleet.running())


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_that_hangs_is_left_behind_after_eighty_seconds_and_comes_back(replicas: int) -> None:
    """The others wait for 60 s. After 60 s and twice a step of one second, it looks for ten whether they are gone."""
    fleet = trained(replicas)
    hangs = fleet.running()[-1]
    hangs.hangs_until = fleet.now + 200.0
    fleet.run_until(fleet.now + 3.0)
    before = len(fleet.commits)
    assert fleet.run_until(fleet.now + 77.0, stop=lambda: len(fleet.commits) > before)
    everybody = {one.machine for one in fleet.running()}
    assert training(fleet) == everybody - {hangs.machine}
    fleet.run_until(hangs.hangs_until + 15.0)
    assert training(fleet) == everybody
    check_lineages(fleet)
    assert len({commit.state for commit in fleet.commits}) == max(one.state.step for one in fleet.running())


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_none_of_which_reaches_more_than_the_store_of_another_end_together_after_two_minutes(
    replicas: int, refuses: bool
) -> None:
    """A firewall that lets gloo's ports not through. Connecting fails after 10 s or at once, and then after pauses of a
    second at most and a look at the other ports, which takes 1 or 4 s. The first attempt begins after a sum has been
    waited for during 60 s. Nobody is left out: less than a majority would stay."""
    fleet = trained(replicas)
    names = [one.machine for one in fleet.running()]
    fleet.blocked.update(map(frozenset, combinations(names, 2)))
    fleet.refuses = refuses
    fleet.run_until(fleet.now + 2.0)
    began, groups, before = fleet.now, len(fleet.groups), len(fleet.commits)
    fleet.run_until(began + 60.0 + 110.0)
    assert not fleet.given_up and len(fleet.running()) == replicas
    fleet.run_until(began + 60.0 + 170.0)
    assert set(fleet.given_up) == set(names), "all of them, so that none goes on alone"
    assert len(fleet.commits) == before and 10 <= len(fleet.groups) - groups <= 130


def test_replicas_end_together_if_too_few_would_stay_without_one_side_of_a_blocked_link() -> None:
    fleet = SimulatedFleet(Random(1), min_replicas=3)
    names = [fleet.start().machine for _ in range(3)]
    fleet.run_until(10.0)
    fleet.blocked.add(frozenset(names[:2]))
    fleet.run_until(fleet.now + 60.0 + 200.0)
    assert set(fleet.given_up) == set(names)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("ways", ["both", "there", "back"])
@pytest.mark.parametrize(("replicas", "pair"), [(3, (0, 1)), (3, (1, 2)), (4, (0, 3))])
def test_ports_that_are_blocked_between_two_of_several_replicas_cost_one_of_them(
    replicas: int, pair: tuple[int, int], ways: str, refuses: bool
) -> None:
    """A sum that waits for 60 s, a group that cannot connect for 10 s, an attempt at the ports, a heartbeat timeout.
    What lets new connections through in one direction only matters when a group is formed: here because another
    replica is killed and started again; then there are two groups that cannot connect for 10 s."""
    fleet = trained(replicas + 1)
    names = sorted(one.machine for one in fleet.running())  # the first one has the store where all meet
    first, second = (names[one] for one in pair)
    fleet.refuses = refuses
    if ways == "both":
        fleet.blocked.add(frozenset((first, second)))
    else:
        fleet.one_way.add((first, second) if ways == "there" else (second, first))
        fleet.kill(fleet.replicas[names[-1]])
        fleet.start()
    began = fleet.now
    everybody = {one.machine for one in fleet.running()}
    fleet.run_until(began + 90.0)
    works_anyway = ways == "there"  # the last one by name begins the connection, and is not the one that cannot
    left_out = everybody - training(fleet)
    assert left_out == (set() if works_anyway else {second}), "of two that have come equally far, the last one by name"
    fleet.run_until(began + 300.0)
    assert everybody - training(fleet) == left_out and not fleet.given_up
    times = [commit.time for commit in fleet.commits if commit.time > began + 90.0]
    assert max(later - earlier for earlier, later in pairwise(times)) < 2.0, "it does not disturb the others meanwhile"
    for name in left_out:
        assert f"connections with {first} fail" in fleet.said[name], "it says whom it does not reach"
    fleet.blocked.clear()
    fleet.one_way.clear()
    fleet.run_until(fleet.now + 15.0)
    assert training(fleet) == everybody, "it is back"
    check_lineages(fleet)
    assert len({commit.state for commit in fleet.commits}) == max(one.state.step for one in fleet.running())


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_go_on_when_a_firewall_that_kept_them_apart_for_two_minutes_is_opened(
    replicas: int, refuses: bool
) -> None:
    """They notice it after 60 s, and try for another 50 s."""
    fleet = trained(replicas)
    names = {one.machine for one in fleet.running()}
    fleet.blocked.add(frozenset([*names][:2]))
    fleet.refuses = refuses
    fleet.run_until(fleet.now + 110.0)
    assert {one.machine for one in fleet.running()} == names
    fleet.blocked.clear()
    fleet.run_until(fleet.now + 30.0)
    assert training(fleet) == names and not fleet.given_up
    check_lineages(fleet)
    assert len({commit.state for commit in fleet.commits}) == max(one.state.step for one in fleet.running())


def test_a_replica_that_has_connected_notices_that_its_peer_has_not() -> None:
    """Seed 15,013,904: a firewall was opened between the attempts of the two. The peer's store says that it asks again,
    which is seen after 14 s at most; the simulator had let the first one wait for the sum during 60 s."""
    for opened in range(60):
        fleet = trained(2)
        names = frozenset(one.machine for one in fleet.running())
        fleet.blocked.add(names)
        fleet.refuses = True
        fleet.run_until(100.0 + opened / 20)
        fleet.blocked.clear()
        before = len(fleet.commits)
        assert fleet.run_until(
            fleet.now + 25.0, stop=lambda fleet=fleet, before=before: len(fleet.commits) > before + 3
        )  # type: ignore[misc]
        assert training(fleet) == names and not fleet.given_up
