"""Sample dropping: what absent workers hold is dropped and counted, and no sample counts twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.data.ledger import Ledger
from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import CheckpointError, ConfigError, LedgerError, PlanError
from ebbflow.live.accounting import account
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Drop, make_policy
from ebbflow.report.export import effort_table
from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train
from ebbflow.simulate import simulate
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.traces.availability import Trace


def test_a_step_covers_all_parts_and_trains_on_those_that_are_there() -> None:
    policy = make_policy("drop(parts=4)", local_batch=32)
    assert policy == Drop(32, parts=4)
    workers, samples = policy.sizes(np.array([0, 1, 3, 4, 9]))
    assert (workers.tolist(), samples.tolist()) == ([0, 1, 3, 4, 4], [0, 128, 128, 128, 128])
    assert [Drop(32, parts=4).split(n) for n in (1, 3, 4)] == [(32, 96), (96, 32), (128, 0)]
    with pytest.raises(PlanError, match="drop: parts is 0"):
        make_policy("drop(parts=0)", local_batch=32)
    with pytest.raises(PlanError, match="local_batch times parts"):
        make_policy(f"drop(parts={1 << 40})", local_batch=1 << 40)


def test_the_last_step_of_an_epoch_drops_in_proportion() -> None:
    # Three of four parts. Of 20 samples 16 are covered: 12 and 4; then 4 are left, of which 3 and 1.
    ledger = Ledger(samples=20)
    step = ledger.assign(12, 4)
    assert (step.start, step.stop, step.dropped) == (0, 12, 4)
    ledger = ledger.commit(step)
    assert (ledger.position, ledger.dropped, ledger.total) == (16, 4, 16)
    step = ledger.assign(12, 4)
    assert (step.start, step.stop, step.dropped) == (16, 19, 1)
    assert ledger.commit(step) == Ledger(samples=20, epoch=1)
    # A quarter of 4 would be a single sample, on which batch norm cannot train: two of them are trained on.
    assert ledger.assign(4, 12).batch == 2
    with pytest.raises(LedgerError, match="cannot drop -1 samples"):
        ledger.assign(4, -1)


@given(
    samples=st.integers(1, 400),
    local=st.integers(1, 9),
    parts=st.integers(1, 12),
    history=st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=60),
)
@examples(200)
def test_every_sample_is_trained_on_or_dropped_at_most_once_and_in_all_exactly_once(
    samples: int, local: int, parts: int, history: list[tuple[int, bool]]
) -> None:
    policy, ledger = Drop(local, parts), Ledger(samples=samples)
    trained, dropped = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
    for count, succeeds in history:
        workers, covers = (int(value[0]) for value in policy.sizes(np.array([count])))
        step = ledger.assign(*policy.split(workers))
        assert step.batch >= 1
        assert (step.dropped == 0) or workers < parts
        if step.stop + step.dropped < samples and samples - ledger.position > covers + 1:
            assert (step.batch, step.dropped) == policy.split(workers)
        if not succeeds:  # a step that is lost leaves no trace
            continue
        trained[step.start : step.stop] += 1
        dropped[step.stop : step.stop + step.dropped] += 1
        ledger = Ledger.restore(json.loads(json.dumps(ledger.commit(step).state())), samples=samples)
        done = samples if ledger.position == 0 else ledger.position
        assert (trained + dropped)[:done].tolist() == [1] * done
        assert (trained + dropped)[done:].sum() == 0
        assert ledger.dropped in (int(dropped.sum()), 0)
        if ledger.position == 0:
            trained[:], dropped[:] = 0, 0


def test_a_position_that_drops_more_than_it_covers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="5 of the first 4 samples cannot have been dropped"):
        Ledger.restore({"samples": 20, "epoch": 0, "position": 4, "dropped": 5})


# -- runs --------------------------------------------------------------------------------------------------------------

CONFIG = RunConfig(
    workload="digits-mlp(width=16)", rule="linear", trace="0s:4 20s:2 35s:3 1h", epochs=3, ref_batch=32,
    local_batch=32, policy="drop(parts=4)", step_time="1s", repeat=True,
)  # fmt: skip


def test_a_run_counts_what_it_drops_in_every_step_and_epoch(tmp_path: Path) -> None:
    # Digits have 1,442 samples: 11 steps of 128 and one of 34 in every epoch, as on the complete fleet. The fleet has
    # 4 workers for 20 steps, 2 for 15, and 3 in the last step. Epoch 0: nothing is dropped. Epoch 1 (steps 12 to 23):
    # 3 x 64 and, of the last 34, 34 - 34 x 2 // 4 = 17. Epoch 2: 11 x 64, and 34 - 34 x 3 // 4 = 9.
    run = train(CONFIG, tmp_path)
    assert len(run.steps) == 36
    assert [row.batch for row in run.steps[18:24]] == [128, 128, 64, 64, 64, 17]
    events = [(event.step, event.text) for event in run.events if event.what == "dropped samples"]
    assert events == [
        (23, "209 of the 1,442 samples of epoch 1 were dropped"),
        (35, "713 of the 1,442 samples of epoch 2 were dropped"),
    ]
    assert sum(row.batch + row.stats.get("dropped", 0) for row in run.steps) == 3 * 1442 == run.steps[-1].samples
    assert "dropped" not in run.steps[0].stats
    # The rate follows what was trained on: 64 samples are twice the reference batch.
    assert run.steps[21].multiplier == pytest.approx(2)
    (result,) = (results := load_results(tmp_path)).arms
    assert "922 of 4,326 samples were dropped" in result.note
    # What is called samples was trained on, at each validation, too.
    assert (result.samples, result.dropped, run.dropped) == (4326 - 922, 922, 922)
    assert result.counts.tolist() == [1442, 2 * 1442 - 209, 3 * 1442 - 922]
    assert result.epochs.tolist() == [1, 2, 3]
    summary = summarise(results.arms, results.config)
    (cell,) = summary.cells
    assert (cell.as_json()["samples"], cell.as_json()["dropped"]) == (3404, 922)
    head, row = effort_table(summary, cell.workload)
    assert dict(zip(head, row, strict=True)).items() >= {"samples": "3,404", "dropped": "922"}.items()


def test_what_was_given_back_is_not_counted_as_dropped(tmp_path: Path) -> None:
    run = train(CONFIG, tmp_path)
    twice = [*run.steps[:30], *run.steps[25:]]  # after step 29 the run went back to before step 25
    assert replace(run, steps=twice).dropped == 922
    assert replace(run, steps=twice).dropped_until([0, 1442, 2 * 1442, 10**9]).tolist() == [0, 0, 209, 922]


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_run_that_is_interrupted_drops_the_same_samples(engine: str, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"engine": engine})
    whole = train(config, tmp_path / "whole")
    stops = iter([False] * 21 + [True] + [False] * 1000)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", callbacks=Callbacks(should_stop=lambda: next(stops)))
    resumed = train(config, tmp_path / "cut")
    assert [(row.batch, row.stats.get("dropped_in_epoch")) for row in resumed.steps] == [
        (row.batch, row.stats.get("dropped_in_epoch")) for row in whole.steps
    ]
    assert resumed.end is not None
    assert whole.end is not None
    assert resumed.end.weights_sha256 == whole.end.weights_sha256


def test_a_ramp_does_not_begin_anew_where_an_epoch_ends(tmp_path: Path) -> None:
    # From step 20 on the fleet is half of what it was, and the rate, too; steps at the ends of epochs change nothing.
    run = train(CONFIG.model_copy(update={"rule": "linear+ramp", "trace": "0s:4 20s:2 1h"}), tmp_path)
    assert [row.stats["ramp"] for row in run.steps[24:34]] == pytest.approx([1.0] * 10)


def test_the_account_of_a_fleet_counts_dropped_samples(tmp_path: Path) -> None:
    run = train(CONFIG, tmp_path)
    rows = [replace(row, stats={**row.stats, "lineage": row.step + 1, "parent": row.step}) for row in run.steps]
    found = account(rows, epoch_samples=1442)
    assert (found.exactly_once, found.epochs, found.samples, found.dropped) == (True, 3, 3 * 1442 - 922, 922)
    assert not account(rows[:20] + rows[21:], epoch_samples=1442).exactly_once


def test_a_simulation_takes_the_steps_of_the_complete_fleet_and_computes_what_is_there() -> None:
    # Two of four parts: an epoch of 1,280 samples takes 10 steps, in which each worker computes 32 samples of 0.1 s.
    settings = ScenarioSettings(
        policy="drop(parts=4)",
        local_batch=32,
        samples=1280,
        epochs=1,
        compute_sample="100ms",
        spot_price="1",
        repeat=True,
    )
    found = simulate(settings.scenario("constant(workers=2)"))
    assert (found.steps, found.time_s) == (10, pytest.approx(10 * 3.2))
    with pytest.raises(ConfigError, match="leave the noise scale out"):
        replace(settings, noise_scale="1000", ref_batch=32).scenario("constant(workers=2)")


def test_a_sampler_that_would_drop_nothing_refuses_the_plan() -> None:
    plan = BatchPlan.from_trace(Trace.parse("0s:2 60s"), "drop(32, parts=4)", 1.0)
    with pytest.raises(ConfigError, match=r"drop\(32, parts=4\), whose steps drop samples"):
        ElasticSampler(1000, plan)
