"""Random histories of simulated fleets, and what must be true of every one of them."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from random import Random

from live.fleet_simulator import Commit, SimulatedFleet, Violation

FAULTS = (
    "start", "kill", "kill two", "pause", "leave", "cut off", "stall", "restart lighthouse", "cut link", "hang",
    "block", "block one way", "lose",
)  # fmt: skip

MORE_FAULTS = (*FAULTS, "leave all", "leave all", "differ", "differ")
"""With those that came later: the seeds of documented histories are of `FAULTS`."""
ORDERLY = ("start", "leave", "leave all", "differ")
"""What costs no committed step, in whatever order it happens."""


def random_history(
    seed: int, *, majority: bool = False, faults: tuple[str, ...] = FAULTS, longest_transfer_s: float = 6.0
) -> SimulatedFleet:
    """Let a small fleet live through faults that follow from the seed, then let it recover; raises `Violation`.

    `majority`: fewer than a majority of all replicas that ever run at a time do not train. `longest_transfer_s`: of the
    state, in every second history; else it takes less than a step.
    """
    random = Random(seed)
    size = random.randint(2, 4)
    most = size + 1
    fleet = SimulatedFleet(
        random,
        min_replicas=most // 2 + 1 if majority else 1,
        join_timeout_s=random.choice((1.0, 10.0)),
        step_s=random.choice(((0.1, 0.3), (0.2, 1.0), (0.2, 3.0))),
        transfer_s=random.choice(((0.01, 0.3), (0.1, longest_transfer_s))),
        checkpoint_every=random.choice((0, 3)),
        between_steps_s=12.0,  # longer than the answer to a question that was asked ahead is used
    )
    for _ in range(size):
        fleet.at(random.uniform(0, 0.5), fleet.start)
    time = random.uniform(0.5, 4.0)
    for _ in range(random.randint(1, 6)):
        fleet.run_until(time)
        _cause(fleet, random.choice(faults), random, most)
        time += random.choice((random.uniform(0.0, 0.8), random.uniform(0.0, 4.0)))
    fleet.run_until(time)
    recover(fleet)
    check_lineages(fleet)
    if set(faults) <= set(ORDERLY):
        survive = {*fleet.ancestry(fleet.commits[-1].state)}
        if lost := [commit for commit in fleet.commits if commit.state not in survive]:
            raise Violation(f"{len(lost)} committed steps are lost, although nobody was: the first is {lost[0]}")
    if fleet.given_up:
        raise Violation(f"replicas gave up, although nothing was in their way for two minutes: {fleet.given_up}")
    return fleet


def _cause(fleet: SimulatedFleet, fault: str, random: Random, most: int) -> None:
    running = fleet.running()
    if fault == "restart lighthouse":
        fleet.lighthouse.restart(random.uniform(0.0, 2.0))
    elif fault == "stall":
        fleet.lighthouse.stall(random.uniform(0.1, random.choice((2.0, 6.0))))
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
        victim = random.choice(running)
        victim.hangs_until = fleet.now + random.uniform(1.0, 90.0)
        victim.holds_lock = random.random() < 0.3
    elif fault == "lose":
        random.choice(running).to_lose = random.randint(1, 3)
    elif fault == "leave":
        random.choice(running).leaving = True
    elif fault == "leave all":
        for one in running:
            one.leaving = True
            if random.random() < 0.7:  # the same command continues
                fleet.at(random.uniform(0.8, 12.0), fleet.start)
    elif fault == "differ":
        random.choice(running).differs = True
    elif fault == "cut off":
        victim = random.choice(running)
        fleet.cut_off(victim)
        fleet.at(random.uniform(0.2, 5.0), lambda: fleet.reconnect(victim))
    elif fault == "block one way" and len(running) > 1:
        first, second = random.sample(running, 2)
        way = (first.machine, second.machine)
        fleet.refuses = random.random() < 0.5
        fleet.one_way.add(way)
        fleet.at(random.choice((6.0, 60.0)) * random.random(), lambda: fleet.one_way.discard(way))
    elif fault in ("cut link", "block") and len(running) > 1:
        link = frozenset(one.machine for one in random.sample(running, 2))
        cut = fleet.cut_links if fault == "cut link" else fleet.blocked
        fleet.refuses = random.random() < 0.5
        cut.add(link)
        # A group that is connected notices blocked ports after 75 s; after 120 s two replicas give up because of them.
        longest = 60.0 if fault == "cut link" else 90.0
        fleet.at(random.choice((6.0, longest)) * random.random(), lambda: cut.discard(link))


def check_lineages(fleet: SimulatedFleet) -> None:
    """Every sample exactly once on every lineage; with a majority, no two groups that train at the same time."""
    starts = {commit.state: (commit.assignment.start, commit.assignment.stop) for commit in fleet.commits}
    for state, parent in fleet.parents.items():
        if starts[state][0] != (starts[parent][1] if parent in starts else 0):
            raise Violation(f"samples {starts[state]} follow {starts.get(parent, 'nothing')}")
    if len({*fleet.lineages.values()}) < len(fleet.lineages):
        raise Violation("two states have the same lineage")
    if fleet.min_replicas > 1:
        groups: dict[int, list[Commit]] = defaultdict(list)
        for commit in fleet.commits:
            groups[commit.group_number].append(commit)
        # From the first to the last decided step: replicas that were paused, or listened, commit steps later than that.
        spans = [
            (min(one.decided for one in commits), max(one.decided for one in commits), commits[0].group)
            for commits in groups.values()
        ]
        for (first, last, group), (other_first, other_last, other) in combinations(spans, 2):
            if first < other_last and other_first < last:
                raise Violation(f"{group} and {other} train at the same time, at {max(first, other_first)}")


def recover(fleet: SimulatedFleet, within_s: float = 100.0) -> None:
    """No more faults: the replicas that are left, or enough new ones, commit a step together within bounded time.

    The time counts from when all that was cut, paused or away has come back, and nobody hangs any longer; one transfer
    of the state comes on top of it.
    """
    fleet.run_until(fleet.now + 6.0)
    while fleet.cut_links or fleet.blocked or fleet.one_way:
        fleet.run_until(fleet.now + 1.0)
    for replica in fleet.running():
        replica.leaving = False  # those that do not know it yet
        replica.to_lose = 0
    hanging_s = max((replica.hangs_until - fleet.now for replica in fleet.running()), default=0.0)
    within_s += max(0.0, hanging_s) + fleet.transfer_s[1]
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
    states = {r.model.number for r in fleet.running()}
    longest = max(({*fleet.ancestry(state)} for state in states), key=len)
    if not states <= longest:
        raise Violation("replicas that train together have different lineages")
