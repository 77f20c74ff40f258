"""Every sample exactly once an epoch: the ledger, and how a step is cut into micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Assignment, Ledger, micro_batch_sizes, split_step
from ebbflow.errors import CheckpointError, DataError, LedgerError

# The invariant ------------------------------------------------------------------------------------------------------


attempts = st.lists(st.tuples(st.integers(1, 70), st.sampled_from(["commit", "lose", "resume"])), max_size=300)
"""Attempts at steps: (requested samples, outcome): the step commits, is lost, or the run is saved and resumed."""


@given(samples=st.one_of(st.integers(1, 60), st.sampled_from([97, 199, 997])), events=attempts)
def test_any_history_commits_every_sample_exactly_once_an_epoch(samples: int, events: list[tuple[int, str]]) -> None:
    ledger = Ledger(samples=samples)
    committed: Counter[tuple[int, int]] = Counter()
    for requested, event in events:
        step = ledger.assign(requested)
        if event == "commit":
            ledger = ledger.commit(step)
            committed.update((step.epoch, i) for i in range(step.start, step.stop))
        elif event == "resume":
            ledger = Ledger.restore(ledger.state())
    done = [(epoch, i) for epoch in range(ledger.epoch) for i in range(samples)]
    assert committed == Counter(done + [(ledger.epoch, i) for i in range(ledger.position)])
    assert ledger.total == committed.total()


@given(samples=st.integers(2, 300), requested=st.lists(st.integers(2, 40), min_size=1))
def test_no_step_has_a_single_sample_unless_it_is_requested(samples: int, requested: list[int]) -> None:
    ledger, i = Ledger(samples=samples), 0
    while ledger.epoch == 0:
        step = ledger.assign(requested[i % len(requested)])
        assert step.batch >= 2
        ledger, i = ledger.commit(step), i + 1


def test_an_epoch_of_ten_in_steps_of_four_ends_with_a_smaller_one() -> None:
    ledger, sizes = Ledger(samples=10), []
    while ledger.epoch == 0:
        step = ledger.assign(4)
        sizes.append(step.batch)
        ledger = ledger.commit(step)
    assert sizes == [4, 4, 2]
    assert ledger == Ledger(samples=10, epoch=1)
    assert ledger.total == 10


def test_a_lost_step_is_assigned_again_to_the_workers_that_are_left() -> None:
    ledger = Ledger(samples=100, position=20)
    assert ledger.assign(16) == Assignment(0, 20, 36)
    # The workers of that step die; two of four are left and take half of the samples.
    assert ledger.assign(8) == Assignment(0, 20, 28)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("committed twice", Assignment(2, 0, 10)),
        ("a gap", Assignment(2, 12, 20)),
        ("another epoch", Assignment(1, 10, 20)),
        ("beyond the end", Assignment(2, 10, 101)),
        ("empty", Assignment(2, 10, 10)),
        ("backwards", Assignment(2, 10, 5)),
    ],
)
def test_a_step_that_does_not_continue_the_ledger_is_refused(what: str, wrong: Assignment) -> None:
    ledger = Ledger(samples=100, epoch=2, position=10)
    with pytest.raises(LedgerError, match="at position 10 of epoch 2"):
        ledger.commit(wrong)


def test_a_ledger_cannot_be_changed() -> None:
    ledger = Ledger(samples=10)
    with pytest.raises(FrozenInstanceError):
        ledger.position = 3  # type: ignore[misc]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, -5])
def test_an_empty_epoch_is_refused(samples: int) -> None:
    with pytest.raises(DataError, match=f"an epoch has {samples} samples"):
        Ledger(samples=samples)


@pytest.mark.parametrize("place", [{"epoch": -1}, {"position": -1}, {"position": 10}])
def test_a_place_outside_of_the_epoch_is_refused(place: dict[str, int]) -> None:
    with pytest.raises(LedgerError, match="is not a position in epochs of 10 samples"):
        Ledger(samples=10, **place)


@pytest.mark.parametrize("requested", [0, -1])
def test_a_step_without_samples_is_refused(requested: int) -> None:
    with pytest.raises(LedgerError, match=f"a step of {requested} samples"):
        Ledger(samples=10).assign(requested)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"samples": 10, "epoch": 0}, "position None"),
        ({"samples": 10, "epoch": 0, "position": 1.5}, "position 1.5"),
        ({"samples": 10, "epoch": True, "position": 1}, "epoch True"),
        ({"samples": 10, "epoch": 0, "position": 11}, "damaged"),
        ({"samples": 0, "epoch": 0, "position": 0}, "damaged"),
    ],
)
def test_a_damaged_state_is_refused(state: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Ledger.restore(state)


# Micro-batches
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "largest", "expected"),
    [
        (32, 32, (32,)),
        (33, 32, (17, 16)),  # two micro-batches are needed: 33 = 17 + 16, not 32 and a single one
        (100, 32, (25, 25, 25, 25)),
        (3, 2, (3,)),  # two micro-batches would have a single one: one micro-batch above the limit
        (5, 2, (3, 2)),  # three would: two
        (3, 1, (1, 1, 1)),  # asked for
        (1, 8, (1,)),  # nothing else is there
        (7, 3, (3, 2, 2)),
        (8, 3, (3, 3, 2)),  # ceil(8 / 3) = 3 micro-batches; four of two would be even, too, but one more than needed
    ],
)
def test_a_step_is_cut_into_even_micro_batches(batch: int, largest: int, expected: tuple[int, ...]) -> None:
    assert micro_batch_sizes(batch, largest=largest) == expected


@given(batch=st.integers(1, 5000), largest=st.integers(1, 300))
def test_micro_batches_add_up_are_even_and_never_have_a_single_sample(batch: int, largest: int) -> None:
    sizes = micro_batch_sizes(batch, largest=largest)
    assert sum(sizes) == batch
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= largest + 1
    if sizes[0] > largest:  # only where a micro-batch would have a single sample otherwise
        assert largest == 2
    if largest > 1 and batch > 1:
        assert sizes[-1] >= 2


@given(start=st.integers(0, 1000), batch=st.integers(1, 600), workers=st.integers(1, 9), largest=st.integers(1, 64))
def test_shares_cover_the_assignment_once_and_go_round_the_workers(
    start: int, batch: int, workers: int, largest: int
) -> None:
    parts = split_step(Assignment(0, start, start + batch), workers=workers, largest=largest)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(start, start + batch))
    assert [part.worker for part in parts] == [i % workers for i in range(len(parts))]


def test_at_the_tail_some_workers_have_nothing() -> None:
    parts = split_step(Assignment(0, 90, 97), workers=4, largest=4)
    assert [(part.worker, part.start, part.stop) for part in parts] == [(0, 90, 94), (1, 94, 97)]


@pytest.mark.parametrize(("batch", "largest"), [(0, 4), (4, 0), (-1, 4)])
def test_impossible_micro_batches_are_refused(batch: int, largest: int) -> None:
    with pytest.raises(LedgerError, match=f"{batch} samples cannot be cut into micro-batches of {largest}"):
        micro_batch_sizes(batch, largest=largest)


def test_a_step_without_workers_is_refused() -> None:
    with pytest.raises(LedgerError, match="shared by 0 workers"):
        split_step(Assignment(0, 0, 4), workers=0, largest=2)
