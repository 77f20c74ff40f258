"""The account of a fleet: which steps survived, and that every sample is in them once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Ledger
from ebbflow.errors import RecordError
from ebbflow.live.accounting import account, surviving_steps
from ebbflow.record import StepRow

SAMPLES = 23


def row(step: int, stop: int, batch: int, lineage: int, parent: int, *, epoch: int = 0) -> StepRow:
    return StepRow(
        step=step, time_s=0.0, wall_s=0.0, epoch=epoch, samples=epoch * 10 + stop, workers=1, batch=batch,
        micro_batches=1,
        lr_base=0.1, lr=0.1, multiplier=1.0, loss=0.0, stats={"lineage": lineage, "parent": parent},
    )  # fmt: skip


def test_a_step_that_one_replica_committed_and_nobody_kept_is_given_up() -> None:
    # 1 -> 2 -> 3 is the line; 9 was committed by a replica that then took the others' state.
    rows = [row(0, 4, 4, 1, 0), row(1, 8, 4, 9, 1), row(1, 6, 2, 2, 1), row(2, 10, 4, 3, 2)]
    told = account(rows, epoch_samples=10)
    assert [r.stats["lineage"] for r in told.steps] == [1, 2, 3]
    assert told.exactly_once and told.given_up == 1 and told.epochs == 1 and told.samples == 10


def test_rows_that_several_replicas_wrote_count_once() -> None:
    rows = [row(0, 10, 10, 1, 0)] * 3
    assert account(rows, epoch_samples=10).samples == 10


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (row(1, 10, 5, 2, 1), "step 1 has samples 5 to 10 of epoch 0, but the step before ended at sample 4"),
        (row(1, 10, 7, 2, 1), "step 1 has samples 3 to 10 of epoch 0, but the step before ended at sample 4"),
        (row(1, 5, 5, 2, 1, epoch=1), "step 1 has samples 0 to 5 of epoch 1, but the step before ended at sample 4"),
    ],
)
def test_a_lost_or_repeated_sample_is_a_mistake(second: StepRow, what: str) -> None:
    told = account([row(0, 4, 4, 1, 0), second], epoch_samples=10)
    assert not told.exactly_once and what in told.mistakes[0]


def test_missing_rows_are_a_mistake() -> None:
    told = account([row(1, 10, 6, 2, 1)], epoch_samples=10)
    assert any("rows of the steps before it are missing" in mistake for mistake in told.mistakes)


def test_a_record_of_no_fleet_is_refused() -> None:
    other = StepRow(
        step=0, time_s=0, wall_s=0, epoch=0, samples=4, workers=1, batch=4, micro_batches=1, lr_base=0.1, lr=0.1,
        multiplier=1.0, loss=0.0,
    )  # fmt: skip
    with pytest.raises(RecordError, match="no lineage"):
        surviving_steps([other])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=60), st.randoms())
def test_any_history_of_restores_is_told_right(history: list[tuple[int, int]], shuffled: random.Random) -> None:
    """Steps of any size; now and then the fleet goes back to an earlier state and trains on from there."""
    states = [(Ledger(samples=SAMPLES), 0, 0)]  # ledger, step, lineage
    rows = []
    for number, (batch, back) in enumerate(history, start=1):
        if back == 3 and len(states) > 1:
            del states[-1]  # its rows stay in the records
        ledger, step, lineage = states[-1]
        assignment = ledger.assign(batch)
        after = ledger.commit(assignment)
        rows.append(
            StepRow(
                step=step, time_s=0, wall_s=0, epoch=assignment.epoch, samples=after.total, workers=1,
                batch=assignment.batch, micro_batches=1, lr_base=0.1, lr=0.1, multiplier=1.0, loss=0.0,
                stats={"lineage": number, "parent": lineage},
            )
        )  # fmt: skip
        states.append((after, step + 1, number))
    shuffled.shuffle(rows)
    told = account(rows, epoch_samples=SAMPLES)
    assert told.exactly_once
    assert told.samples == max(row.samples for row in rows)
    assert told.given_up + len(told.steps) == len(history)
