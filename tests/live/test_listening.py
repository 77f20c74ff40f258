"""What a replica keeps of the steps that it hears while the state is on its way, with stand-ins for both."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbflow.engines.process_group import PeerLost
from ebbflow.live import listening
from ebbflow.live.listening import HeardStep, Listener

ME, OTHER = 2, 5
BOTH = frozenset({ME, OTHER})
TIMEOUT_S = 30.0


class Incoming:
    size = 100


class Others:
    """The others, who add up a step when `add_up` says so; sums have 40 bytes and hold the number of the step."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
        self.coming: queue.SimpleQueue[HeardStep | Exception] = queue.SimpleQueue()
        self.steps = 0

    def hear(self, listens: frozenset[int], caught_up: Callable[[], bool]) -> HeardStep:
        self.waiting.put(listens)
        step = self.coming.get(timeout=TIMEOUT_S)
        if isinstance(step, Exception):
            raise step
        arrived = step.arrived | ({ME} if caught_up() else frozenset())
        return HeardStep(message=step.message, leaving=step.leaving, arrived=arrived)

    def add_up(self, *, leaving: frozenset[int] = frozenset(), arrived: frozenset[int] = frozenset()) -> frozenset[int]:
        """Add up the next step, to which the listener comes; the ranks that listen, as far as it knows."""
        listens = self.waiting.get(timeout=TIMEOUT_S)
        self.coming.put(HeardStep(message=torch.full((10,), float(self.steps)), leaving=leaving, arrived=arrived))
        self.steps += 1
        return listens

    def break_up(self) -> None:
        self.waiting.get(timeout=TIMEOUT_S)
        self.coming.put(PeerLost("it is broken"))

    def wait_for_listener(self, *, never: bool = False) -> bool:
        """Whether the listener comes to the next step; it has then kept the one before."""
        try:
            self.waiting.put(self.waiting.get(timeout=0.2 if never else TIMEOUT_S))
        except queue.Empty:
            return False
        return True


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def listener(others: Others) -> Listener:
    incoming: Any = Incoming()
    return Listener(others.hear, BOTH, incoming, rank=ME)


def number(step: HeardStep) -> float:
    return float(step.message[0])


def test_steps_are_heard_in_their_order_and_go_on_while_they_are_applied(others: Others, listener: Listener) -> None:
    assert [others.add_up(), others.add_up(arrived=frozenset({OTHER})), others.add_up()] == [BOTH, BOTH, {ME}]
    assert [number(listener.next()), number(listener.next())] == [0.0, 1.0]
    others.add_up()
    assert others.wait_for_listener()
    last = [listener.next(), listener.next()]
    assert [number(step) for step in last] == [2.0, 3.0]
    assert all(ME not in step.arrived for step in last), "others of them were still to be applied"


def test_the_step_for_which_a_listener_waits_is_the_last_one_that_it_hears(others: Others, listener: Listener) -> None:
    found: queue.SimpleQueue[HeardStep] = queue.SimpleQueue()
    others.add_up()
    assert others.wait_for_listener()
    assert number(listener.next()) == 0.0
    threading.Thread(target=lambda: found.put(listener.next()), daemon=True).start()
    while not listener._caught_up():
        time.sleep(0.001)
    others.add_up()
    assert found.get(timeout=TIMEOUT_S).arrived == {ME}
    with pytest.raises(PeerLost):
        listener.next()
    assert not others.wait_for_listener(never=True)


@pytest.mark.parametrize(("least", "most", "kept"), [(0, 64, 5), (300, 64, 7), (300, 3, 3)])
def test_when_no_more_sums_can_be_kept_the_others_wait_until_all_are_applied(
    others: Others, listener: Listener, least: int, most: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 40 bytes: five of them in twice the size of the state, seven in 300 bytes."""
    monkeypatch.setattr(listening, "_LEAST_BYTES", least)
    monkeypatch.setattr(listening, "_MOST_STEPS", most)
    for _ in range(kept):
        others.add_up()
    assert not others.wait_for_listener(never=True)
    found: queue.SimpleQueue[HeardStep] = queue.SimpleQueue()
    threading.Thread(target=lambda: [found.put(listener.next()) for _ in range(kept + 1)], daemon=True).start()
    others.add_up()
    steps = [found.get(timeout=TIMEOUT_S) for _ in range(kept + 1)]
    assert [number(step) for step in steps] == [*map(float, range(kept + 1))]
    assert [step.arrived for step in steps] == [frozenset()] * kept + [{ME}]


def test_the_others_wait_for_a_listener_that_does_not_catch_up_with_them(others: Others, listener: Listener) -> None:
    """It has two steps when it begins to apply them, and has heard six more when it has applied one of them."""
    for _ in range(2):
        others.add_up()
    assert others.wait_for_listener()
    assert number(listener.next()) == 0.0
    for _ in range(6):
        others.add_up()
    assert not others.wait_for_listener(never=True)
    assert [number(listener.next()) for _ in range(7)] == [*map(float, range(1, 8))]


def test_what_was_heard_before_the_group_broke_can_be_applied(others: Others, listener: Listener) -> None:
    others.add_up()
    assert listener.failure is None
    others.break_up()
    assert number(listener.next()) == 0.0
    with pytest.raises(PeerLost, match="broken"):
        listener.next()
    assert isinstance(listener.failure, PeerLost)


@pytest.mark.parametrize("leaving", [{0}, {0, ME}])
def test_nothing_is_heard_after_a_step_in_which_a_replica_left(
    others: Others, listener: Listener, leaving: set[int]
) -> None:
    others.add_up(leaving=frozenset(leaving))
    assert listener.next().leaving == leaving
    with pytest.raises(PeerLost, match="left the group"):
        listener.next()
    assert listener.leaves == (ME in leaving)


def test_a_listener_that_waits_for_room_ends_when_it_is_closed(
    others: Others, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_MOST_STEPS", 1)
    others.add_up()
    assert not others.wait_for_listener(never=True)
    listener.close()
    assert number(listener.next()) == 0.0
    with pytest.raises(PeerLost):
        listener.next()
