"""What a replica keeps of the steps that it hears while the state is on its way, with stand-ins for both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ebbflow.engines.process_group import PeerLost
from ebbflow.live import listening
from ebbflow.live.listening import HeardStep, listen


class Incoming:
    """A state of 100 bytes that is there after so many steps were heard, or when it is waited for."""

    size = 100

    def __init__(self, after: int) -> None:
        self.left = after
        self.waited = False

    @property
    def complete(self) -> bool:
        return self.left <= 0

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waited = self.waited or timeout_s is None
        return self.complete or self.waited


def hear(
    incoming: Any, *, leaving: Iterable[int] = (), leaves_at: int = 99, breaks_at: int = 99, arrived: int = 99
) -> Any:
    """What takes part in steps whose sums have 40 bytes; rank 5 says in step `arrived` that it has the state."""
    heard: list[frozenset[int]] = []

    def one(listens: frozenset[int]) -> HeardStep:
        number = len(heard)
        heard.append(listens)
        incoming.left -= 1
        if number == breaks_at:
            raise PeerLost("it is broken")
        leavers = frozenset(leaving) if number == leaves_at else frozenset()
        has = frozenset({5}) if number == arrived else frozenset()
        return HeardStep(message=torch.full((10,), float(number)), leaving=leavers, arrived=has)

    one.heard = heard  # type: ignore[attr-defined]
    return one


ME, OTHER = 2, 5
BOTH = frozenset({ME, OTHER})


def numbers(steps: Iterable[HeardStep]) -> list[float]:
    return [float(step.message[0]) for step in steps]


def test_steps_are_heard_until_the_state_is_there_and_kept_in_their_order() -> None:
    incoming: Any = Incoming(after=3)
    hears = hear(incoming, arrived=1)
    assert numbers(listen(incoming, hears, BOTH, rank=ME)) == [0.0, 1.0, 2.0]
    assert hears.heard == [BOTH, BOTH, {ME}] and not incoming.waited


@pytest.mark.parametrize(("least", "most", "kept"), [(0, 64, 5), (300, 64, 7), (300, 3, 3)])
def test_sums_are_kept_up_to_twice_the_size_of_the_state_and_then_the_others_wait(
    least: int, most: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 40 bytes: five of them in 200, seven in 300."""
    monkeypatch.setattr(listening, "_LEAST_BYTES", least)
    monkeypatch.setattr(listening, "_MOST_STEPS", most)
    incoming: Any = Incoming(after=50)
    assert len(listen(incoming, hear(incoming), BOTH, rank=ME)) == kept
    assert incoming.waited


def test_what_was_heard_is_forgotten_if_the_group_breaks_before_the_state_is_there() -> None:
    incoming: Any = Incoming(after=5)
    with pytest.raises(PeerLost, match="broken"):
        listen(incoming, hear(incoming, breaks_at=2), BOTH, rank=ME)


def test_what_was_heard_counts_if_the_group_breaks_when_the_state_is_there() -> None:
    """The steps 0 and 1 were confirmed by all; the third breaks, and meanwhile the state has come."""
    incoming: Any = Incoming(after=3)
    assert numbers(listen(incoming, hear(incoming, breaks_at=2), BOTH, rank=ME)) == [0.0, 1.0]


@pytest.mark.parametrize(("after", "leaving", "kept"), [(9, {0}, None), (2, {0}, 2), (9, {0, ME}, 2)])
def test_when_a_replica_leaves_a_listener_begins_anew_unless_it_has_the_state_or_leaves_itself(
    after: int, leaving: set[int], kept: int | None
) -> None:
    incoming: Any = Incoming(after=after)
    hears = hear(incoming, leaving=leaving, leaves_at=1)
    if kept is None:
        with pytest.raises(PeerLost, match="left the group"):
            listen(incoming, hears, BOTH, rank=ME)
    else:
        assert len(listen(incoming, hears, BOTH, rank=ME)) == kept
