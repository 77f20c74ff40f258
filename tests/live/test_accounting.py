"""The account of a fleet: which steps survived, that every sample is in them once, and what changes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Ledger
from ebbflow.errors import RecordError
from ebbflow.live.accounting import JobAccount, account, account_lines, read_account, surviving_steps
from ebbflow.record import Event, Header, RecordWriter, StepRow, ValidationRow
from ebbflow.report.results import load_results

SAMPLES = 23


def node(step: int, stop: int, batch: int, lineage: int, parent: int, *, epoch: int = 0) -> StepRow:
    return StepRow(
        step=step, time_s=0.0, wall_s=0.0, epoch=epoch, samples=epoch * 10 + stop, workers=1, batch=batch,
        micro_batches=1,
        lr_base=0.1, lr=0.1, multiplier=1.0, loss=0.0, stats={"lineage": lineage, "parent": parent},
    )  # fmt: skip


def test_a_step_that_one_replica_committed_and_nobody_kept_is_given_up() -> None:
    # 1 -> 2 -> 3 survives; 9 was committed by a replica that then received the state of another.
    rows = [node(0, 4, 4, 1, 0), node(1, 8, 4, 9, 1), node(1, 6, 2, 2, 1), node(2, 10, 4, 3, 2)]
    found = account(rows, epoch_samples=10)
    assert [r.stats["lineage"] for r in found.steps] == [1, 2, 3]
    assert found.exactly_once and found.given_up == 1 and found.epochs == 1 and found.samples == 10


def test_a_run_that_goes_back_to_a_snapshot_goes_on_from_there() -> None:
    # The snapshot is the state after 1. After 3 the run goes back to it: 2 and 3 are given up, whatever follows.
    back = node(2, 10, 2, 3, 2)
    back = replace(back, stats={**back.stats, "given_back": 6.0, "fork": 1})
    rows = [node(0, 4, 4, 1, 0), node(1, 8, 4, 2, 1), back]
    assert [row.stats["lineage"] for row in surviving_steps(rows)] == [1]
    found = account([*rows, node(3, 10, 6, 4, 1)], epoch_samples=10)
    assert [row.stats["lineage"] for row in found.steps] == [1, 4]
    assert found.exactly_once and found.samples == 10
    assert [row.stats["lineage"] for row in found.given_back] == [2, 3] and not found.given_up, "nobody was lost"
    to_the_beginning = replace(back, stats={**back.stats, "fork": 0})
    assert surviving_steps([*rows[:2], to_the_beginning]) == []


def test_of_branches_that_were_compared_the_steps_of_the_kept_one_survive() -> None:
    # The branches begin at 1: 2, scored by 3, and 4, scored by 5. The run goes on from the end of the first, 2.
    def back(row: StepRow, to: int) -> StepRow:
        return replace(row, stats={**row.stats, "probe": 1.0, "given_back": 1.0, "fork": to})

    rows = [
        node(0, 2, 2, 1, 0), node(1, 4, 2, 2, 1), back(node(2, 7, 3, 3, 2), 1),
        node(3, 4, 2, 4, 1), back(node(4, 7, 3, 5, 4), 2), node(5, 10, 6, 6, 2),
    ]  # fmt: skip
    found = account(rows, epoch_samples=10)
    assert [row.stats["lineage"] for row in found.steps] == [1, 2, 6]
    assert [row.stats["lineage"] for row in found.given_back] == [3, 4, 5] and not found.given_up
    # A replica that commits 9 after 2, and is lost with it, has given nothing back.
    lost = account(rows, [*rows[:2], node(2, 9, 5, 9, 2)], epoch_samples=10)
    assert (lost.given_up, len(lost.given_back)) == (1, 3)


def test_rows_that_several_replicas_wrote_count_once() -> None:
    rows = [node(0, 10, 10, 1, 0)] * 3
    assert account(rows, epoch_samples=10).samples == 10


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (node(1, 10, 5, 2, 1), "step 1 has samples 5 to 10 of epoch 0, but the step before ended at sample 4"),
        (node(1, 10, 7, 2, 1), "step 1 has samples 3 to 10 of epoch 0, but the step before ended at sample 4"),
        (node(1, 5, 5, 2, 1, epoch=1), "step 1 has samples 0 to 5 of epoch 1, but the step before ended at sample 4"),
    ],
)
def test_a_lost_or_repeated_sample_is_a_mistake(second: StepRow, what: str) -> None:
    found = account([node(0, 4, 4, 1, 0), second], epoch_samples=10)
    assert not found.exactly_once and what in found.mistakes[0]


def test_missing_rows_are_a_mistake() -> None:
    found = account([node(1, 10, 6, 2, 1)], epoch_samples=10)
    assert found.mistakes == ("the rows of steps 0 to 0 are in no record",) and found.missing == 1


def test_rows_that_are_in_no_record_are_no_lost_samples(tmp_path: Path) -> None:
    # Steps 1 and 2, samples 4 to 8 of epoch 0 and 0 to 4 of epoch 1, were written by nobody.
    write(tmp_path, "r0", [row(0, 4, 1, 0, time=1.0), row(3, 16, 4, 3, time=4.0)])
    found = read_account(tmp_path)
    assert (found.steps, found.missing_steps, found.given_up_steps, found.epochs) == (2, 2, 0, 2)
    lines = account_lines(LAUNCHER, found)
    assert lines[2:4] == [
        "whether every sample was committed exactly once cannot be said:",
        "    the rows of steps 1 to 2 are in no record",
    ]


def test_the_line_that_the_fleet_is_on_counts_and_not_the_longest_one() -> None:
    # Both commit steps 0 and 1 and die, with r2, which goes on alone to step 3 and never comes back. The next fleet
    # begins at the checkpoint after step 0 (lineage 1) and has come to step 1: fewer samples, and the present line.
    shared = [node(0, 2, 2, 1, 0), node(1, 4, 2, 2, 1)]
    alone = [node(2, 6, 2, 3, 2), node(3, 8, 2, 4, 3)]
    again = [node(1, 5, 3, 12, 1)]
    found = account([*shared, *again], [*shared, *again], [*shared, *alone], epoch_samples=10)
    assert [row.stats["lineage"] for row in found.steps] == [1, 12]
    assert found.exactly_once and found.given_up == 3


def test_living_replicas_that_gave_up_their_steps_are_on_the_line_of_those_they_joined() -> None:
    # r0 trains alone to step 3; r1 begins a line of its own, from step 0, and r0 receives its state.
    alone = [node(0, 3, 3, 1, 0), node(1, 6, 3, 2, 1), node(2, 9, 3, 3, 2)]
    other = [node(0, 2, 2, 21, 20), node(1, 4, 2, 22, 21)]
    found = account([*alone, other[1]], other, epoch_samples=10)
    assert [row.stats["lineage"] for row in found.steps] == [21, 22] and found.given_up == 3


def test_a_record_of_no_fleet_is_refused() -> None:
    other = StepRow(
        step=0, time_s=0, wall_s=0, epoch=0, samples=4, workers=1, batch=4, micro_batches=1, lr_base=0.1, lr=0.1,
        multiplier=1.0, loss=0.0,
    )  # fmt: skip
    with pytest.raises(RecordError, match="no lineage"):
        surviving_steps([other])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=60))
def test_any_history_of_restores_is_accounted_for(history: list[tuple[int, int, int]]) -> None:
    """Steps of any size by one or both of two replicas; now and then the fleet goes back to an earlier state and trains
    on from there."""
    states = [(Ledger(samples=SAMPLES), 0, 0)]  # ledger, step, lineage
    records: list[list[StepRow]] = [[], []]
    for number, (batch, back, who) in enumerate(history, start=1):
        if back == 3 and len(states) > 1:
            del states[-1]  # its rows stay in the records
        ledger, step, lineage = states[-1]
        assignment = ledger.assign(batch)
        after = ledger.commit(assignment)
        row = StepRow(
            step=step, time_s=0, wall_s=0, epoch=assignment.epoch, samples=after.total, workers=1,
            batch=assignment.batch, micro_batches=1, lr_base=0.1, lr=0.1, multiplier=1.0, loss=0.0,
            stats={"lineage": number, "parent": lineage},
        )  # fmt: skip
        for replica in (0, 1):
            if who & (replica + 1):
                records[replica].append(row)
        states.append((after, step + 1, number))
    found = account(*records, epoch_samples=SAMPLES)
    assert found.exactly_once
    assert found.given_up + len(found.steps) == len(history)
    ends = [record[-1].stats["lineage"] for record in records if record]
    assert found.steps[-1].stats["lineage"] in ends
    if len(set(ends)) == 1:  # all records say where the fleet is
        assert found.steps[-1].stats["lineage"] == len(history)


# The account of a job -------------------------------------------------------------------------------------------------


LAUNCHER = {"job": "j", "status": "finished", "seconds": 10.0, "starts": 3, "deaths": 1, "folder": "/j"}


def row(step: int, stop: int, lineage: int, parent: int, *, time: float, workers: int = 2, batch: int = 4) -> StepRow:
    return StepRow(
        step=step, time_s=time, wall_s=time, epoch=(stop - batch) // 8, samples=stop, workers=workers, batch=batch,
        micro_batches=1, lr_base=0.1, lr=0.1, multiplier=1.0, loss=1.0, stats={"lineage": lineage, "parent": parent},
    )  # fmt: skip


def write(folder: Path, replica: str, rows: Sequence[StepRow | ValidationRow | Event]) -> None:
    with RecordWriter(folder / "replicas" / replica / "record.jsonl") as record:
        record.write(Header(config={"epoch_samples": 8}))
        for item in rows:
            record.write(item)


def test_the_steps_of_a_fleet_are_reported_on_one_clock(tmp_path: Path) -> None:
    # r0 begins steps 0 and 1 at 5 and 7 s, and dies. r1 came 4 s later; its clock says 3 and 6 s at steps 1 and 2. Both
    # are killed, and r1 is started anew: its clock says 0.5 s at step 3, which nobody saw beside step 2.
    steps = [replace(row(i, 4 * i + 4, i + 1, i, time=0.0), duration_s=1.5) for i in range(4)]
    at = [[(0, 5.0), (1, 7.0)], [(1, 3.0), (2, 6.0), (3, 0.5)]]
    last = ValidationRow(step=4, epoch=2.0, samples=16, time_s=0.5, wall_s=5, metrics={"loss": 0.5})
    for name, times, more in (("r0", at[0], []), ("r1", at[1], [last])):
        write(tmp_path, name, [*(replace(steps[i], time_s=time) for i, time in times), *more])
    (arm,) = load_results(tmp_path).arms
    assert list(arm.columns["time_s"]) == [5.0, 7.0, 10.0, 11.5]
    assert (arm.end_s, list(arm.times)) == (13.0, [13.0])


def test_an_empty_folder_has_an_empty_account(tmp_path: Path) -> None:
    account = read_account(tmp_path)
    assert (account.steps, account.exactly_once, account.problems) == (0, True, ())
    assert account_lines(LAUNCHER, account)[-1] == "no step was committed; logs are in /j/replicas"


def test_steps_of_two_replicas_are_counted_once_and_a_death_has_its_cost(tmp_path: Path) -> None:
    # Epochs of 8 samples. Both commit steps 0 to 2, half a second apart; r1 dies, r0 alone begins step 3 after 2 s.
    shared = [row(step, 4 * step + 4, step + 1, step, time=1 + 0.5 * step) for step in range(3)]
    alone = [row(3, 14, 4, 3, time=4.0, workers=1, batch=2), row(4, 16, 5, 4, time=4.4, workers=1, batch=2)]
    last = ValidationRow(step=5, epoch=2.0, samples=16, time_s=5, wall_s=5, metrics={"accuracy": 0.75, "loss": None})
    write(tmp_path, "r0", [*shared, *alone, last])
    write(tmp_path, "r1", shared)
    account = read_account(tmp_path)
    assert (account.steps, account.samples, account.epochs, account.exactly_once) == (5, 16, 2, True)
    # From the beginning of step 2 (2.0 s) to that of step 3 (4.0 s): 2 s, of which half a second is usual.
    (change,) = account.changes
    assert (change.step, change.before, change.after, change.lost_s) == (3, 2, 1, 1.5)
    assert account.to_json()["lost_s_a_change"] == {"mean": 1.5, "median": 1.5, "max": 1.5}
    assert account_lines({**LAUNCHER, "kills": 1, "notices": 0}, account) == [
        "j: finished after 10.0 s, 3 starts, 1 death, 1 kill and 0 notices by the trace",
        "5 steps, 16 samples, 2 whole epochs of 8",
        "every sample was committed exactly once per epoch",
        "changes of the fleet: 1, delay 1.5 s (median), at most 1.5 s",
        "last validation: accuracy 0.7500, loss nan",
    ]


def test_steps_lost_with_the_whole_fleet_are_given_up_and_no_replica_measured_the_new_beginning(tmp_path: Path) -> None:
    # r0 commits steps 0 and 1 and dies; the checkpoint is from after step 0. Its second start (its clock begins anew)
    # does step 1 again, along another line, and goes further.
    first = [row(0, 4, 1, 0, time=1.0, workers=1), row(1, 8, 2, 1, time=2.0, workers=1)]
    again = [row(1, 8, 12, 1, time=0.5, workers=1), row(2, 12, 13, 12, time=1.5, workers=1)]
    write(tmp_path, "r0", [*first, *again])
    account = read_account(tmp_path)
    assert (account.steps, account.samples, account.exactly_once) == (3, 12, True)
    assert (account.given_up_steps, account.given_up_samples) == (1, 4)
    assert [(change.step, change.lost_s) for change in account.changes] == [(1, None)]
    assert any("1 steps (4 samples) were lost" in line for line in account_lines(LAUNCHER, account))


def test_a_report_has_the_time_of_the_fleet_and_not_of_a_replica_that_was_started_again(tmp_path: Path) -> None:
    # r0 begins a step every second. r1 dies after step 1, and its second start, whose clock begins anew, takes part in
    # steps 3 and 4. By the clock of r0, step 4 begins at 9 s and takes one, the median.
    rows = [row(step, 4 * step + 4, step + 1, step, time=5.0 + step) for step in range(5)]
    last = ValidationRow(step=4, epoch=2.0, samples=16, time_s=0.2, wall_s=5, metrics={"accuracy": 0.75})
    write(tmp_path, "r0", rows)
    write(tmp_path, "r1", [*rows[:2], replace(rows[3], time_s=0.2), last, replace(rows[4], time_s=1.4)])
    (arm,) = load_results(tmp_path).arms
    assert arm.columns["time_s"].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert (arm.end_s, arm.times.tolist()) == (10.0, [9.0])


def test_steps_that_the_rule_gave_back_are_not_lost_and_no_change_of_the_fleet(tmp_path: Path) -> None:
    # Two replicas go back to the state after step 0 when step 2 shows damage: 4 + 4 samples are trained on again.
    back = row(2, 12, 3, 2, time=3.0)
    back = replace(back, stats={**back.stats, "given_back": 8.0, "fork": 1, "coefficient": 1.0})
    rows = [row(0, 4, 1, 0, time=1.0), row(1, 8, 2, 1, time=2.0), back, row(3, 8, 14, 1, time=4.0)]
    for name in ("r0", "r1"):
        write(tmp_path, name, rows)
    account = read_account(tmp_path)
    assert (account.steps, account.given_up_steps, account.changes) == (2, 0, ())
    assert (account.given_back_steps, account.given_back_samples) == (2, 8)
    assert account_lines({**LAUNCHER, "deaths": 0}, account)[3:] == [
        "2 steps (8 samples) were given back by the rule, which went on from an earlier state, and trained on again"
    ]
    note = load_results(tmp_path).arms[0].note
    assert "went back to a snapshot once, 8 samples were trained on again" in note


def test_a_standstill_of_an_unchanged_fleet_has_its_cost(tmp_path: Path) -> None:
    # Two replicas, half a second per step. Before step 3 the lighthouse is dead for five minutes; the workers are the
    # same two before and after. The gap is 301.5 s, of which half a second is usual.
    times = [1.0, 1.5, 2.0, 303.5, 304.0]
    steps = [row(step, 4 * step + 4, step + 1, step, time=time) for step, time in enumerate(times)]
    lost = Event(step=3, what="lost", text="the lighthouse at 127.0.0.1:1 does not answer")
    write(tmp_path, "r0", [*steps[:3], lost, *steps[3:]])
    write(tmp_path, "r1", steps)
    found = read_account(tmp_path)
    assert [(change.step, change.before, change.after, change.lost_s) for change in found.changes] == [(3, 2, 2, 301.0)]
    assert account_lines(LAUNCHER, found)[-1] == "changes of the fleet: 1, delay 5.0 min (median), at most 5.0 min"


def test_a_lost_sample_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, "r0", [row(0, 4, 1, 0, time=1.0), row(1, 10, 2, 1, time=2.0)])  # samples 4 and 5 are missing
    account = read_account(tmp_path)
    assert not account.exactly_once
    assert account_lines(LAUNCHER, account)[2] == "NOT exactly once:"


@pytest.mark.parametrize("text", ["", "rubbish\n", '{"kind": "step"}\n'])
def test_a_record_that_cannot_be_read_is_a_problem_and_not_an_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, "r0", [row(0, 4, 1, 0, time=1.0)])
    (tmp_path / "replicas" / "r1").mkdir()
    (tmp_path / "replicas" / "r1" / "record.jsonl").write_text(text)
    account = read_account(tmp_path)
    assert not account.exactly_once
    assert "r1/record.jsonl" in account.problems[0]


def test_an_epoch_that_is_not_whole_is_not_called_exactly_once() -> None:
    launcher = {"job": "j", "status": "stopped", "seconds": 1.0, "starts": 1, "deaths": 0, "folder": "f"}
    some = JobAccount(steps=3, samples=24, epochs=0, epoch_samples=97)
    assert not any("exactly once" in line for line in account_lines(launcher, some))
    assert any("exactly once" in line for line in account_lines(launcher, replace(some, epochs=1)))
