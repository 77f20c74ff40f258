"""The sampler: sizes by the plan, every sample once an epoch, for any reading ahead, resuming and number of ranks."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from drawing_examples import examples
from ebbflow.data.ledger import Ledger, micro_batch_sizes
from ebbflow.data.sampler import ElasticSampler, MicroBatchInfo
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.traces.availability import Trace


@dataclass(frozen=True)
class Fleet:
    """A plan of given worker counts, over and over, one run a step."""

    counts: tuple[int, ...]
    local_batch: int

    def plan(self, steps: int = 20_000) -> BatchPlan:
        workers = np.resize(np.array(self.counts, np.int64), steps)
        step = np.arange(steps)
        return BatchPlan(
            first=step, workers=workers, samples=workers * self.local_batch, start_s=step * 1.0, step_s=np.ones(steps),
            steps=steps,
        )  # fmt: skip


def make(samples: int, plan: Any, **options: Any) -> ElasticSampler:
    return ElasticSampler(samples, plan.plan() if isinstance(plan, Fleet) else plan, **options)


def train(sampler: ElasticSampler, micro_batches: int, *, ahead: int = 0) -> Iterator[tuple[MicroBatchInfo, list[int]]]:
    """Train on micro-batches, epoch after epoch, while the reader is `ahead` micro-batches before the training."""
    trained = 0
    while trained < micro_batches:
        assert len(sampler) or not trained, "an empty epoch after a full one"
        reader = iter(sampler)
        read = list(islice(reader, ahead))
        while batch := [*read, *islice(reader, 1)]:
            if trained == micro_batches:
                return
            read = batch[1:]
            micro_batch = sampler.consume()
            trained += 1
            assert micro_batch.size == len(batch[0])
            yield micro_batch, batch[0]


def epoch_of(sampler: ElasticSampler) -> list[int]:
    return [i for batch in sampler for i in batch]


# What comes out -----------------------------------------------------------------------------------------------------


def test_steps_follow_the_trace_and_the_last_one_is_smaller() -> None:
    # 2 workers for 20 s and 4 workers then, 10 s a step, 3 samples a worker: steps of 6, 6, 12, 12, ... On 41 samples
    # 6 + 6 + 12 + 12 leave 5, which a share of 3 cuts into micro-batches of 3 and 2.
    plan = BatchPlan.from_trace(Trace.parse("0s:2 20s:4 200s"), "follow(3)", "10s")
    micro_batches = [micro_batch for micro_batch, _ in train(ElasticSampler(41, plan), 14)]
    assert [micro_batch.size for micro_batch in micro_batches] == [3] * 12 + [3, 2]
    assert [micro_batch.step for micro_batch in micro_batches] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert [micro_batch.batch for micro_batch in micro_batches] == [6] * 4 + [12] * 8 + [5] * 2
    assert [micro_batch.workers for micro_batch in micro_batches] == [2] * 4 + [4] * 10
    assert [micro_batch.time_s for micro_batch in micro_batches][::2] == [0.0, 10.0, 20.0, 20.0, 30.0, 30.0, 40.0]


def test_a_micro_batch_knows_its_position_in_the_step() -> None:
    sampler = ElasticSampler(33, 1, local_batch=33, shuffle=False)
    assert sampler.peek() == sampler.peek()  # looking changes nothing
    assert sampler.consume() == MicroBatchInfo(
        step=0, size=33, batch=33, workers=1, index=0, count=1, epoch=0, start=0, time_s=0.0
    )
    # The largest micro-batch is 16: 33 = 11 + 11 + 11.
    sampler = make(33, Fleet((1,), 33), local_batch=16)
    first, middle, last = (sampler.consume() for _ in range(3))
    assert (first.size, first.start, first.first, first.last) == (11, 0, True, False)
    assert (middle.index, middle.start, middle.first, middle.last) == (1, 11, False, False)
    assert (last.index, last.start, last.first, last.last) == (2, 22, False, True)


def test_a_local_batch_above_the_plans_share_does_not_merge_workers() -> None:
    assert [len(batch) for batch in make(12, Fleet((3,), 4), local_batch=100)] == [4, 4, 4]


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_workers() -> None:
    def order(workers: int, local_batch: int, seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(997, workers, local_batch=local_batch, seed=seed)
        sampler.set_epoch(epoch)
        return epoch_of(sampler)

    assert order(1, 7, seed=1, epoch=2) == order(5, 32, seed=1, epoch=2)
    assert order(1, 7, seed=1, epoch=2) != order(1, 7, seed=1, epoch=3)
    assert order(1, 7, seed=1, epoch=2) != order(1, 7, seed=2, epoch=2)
    assert epoch_of(ElasticSampler(997, 3, local_batch=8, shuffle=False)) == list(range(997))


def test_orders_longer_than_a_block_are_read_without_a_seam() -> None:
    # 100,003 is a prime above six blocks of 2^14; micro-batches of 37 straddle their edges, micro-batches of 20,000 are
    # longer.
    for local_batch in (37, 20_000):
        sampler = ElasticSampler(100_003, 3, local_batch=local_batch)
        assert sorted(epoch_of(sampler)) == list(range(100_003))


def test_anything_with_a_length_is_a_data_set() -> None:
    assert ElasticSampler(TensorDataset(torch.arange(11)), 1, local_batch=4).samples == 11


# Exactly once -------------------------------------------------------------------------------------------------------

awkward = st.one_of(st.integers(1, 80), st.sampled_from([97, 199, 251]))
fleets = st.builds(
    Fleet, st.lists(st.integers(1, 6), min_size=1, max_size=12).map(tuple), st.sampled_from([1, 2, 3, 5, 8])
)
lives = st.lists(
    st.fixed_dictionaries(
        {
            "fleet": fleets,
            "local_batch": st.none() | st.integers(1, 6),
            "micro_batches": st.integers(0, 60),
            "saved_after": st.integers(0, 60),
            "ahead": st.integers(0, 9),
        }
    ),
    max_size=6,
)


@settings(deadline=None)
@given(samples=awkward, seed=st.integers(0, 5), lives=lives)
def test_any_history_of_workers_kills_and_resumes_trains_every_sample_once_an_epoch(
    samples: int, seed: int, lives: list[dict[str, Any]]
) -> None:
    kept: list[tuple[int, int]] = []  # (epoch, sample) of the steps that the saved state holds
    state = make(samples, Fleet((1,), 1), seed=seed).state_dict()
    for life in lives:
        # A process ends with a kill: what it trained after saving is lost, and so is what it had prefetched.
        sampler = make(samples, life["fleet"], local_batch=life["local_batch"], seed=seed)
        sampler.load_state_dict(json.loads(json.dumps(state)))
        complete, pending = list(kept), []
        if life["saved_after"] == 0:
            state = sampler.state_dict()
        for i, (micro_batch, batch) in enumerate(train(sampler, life["micro_batches"], ahead=life["ahead"]), start=1):
            pending += [(micro_batch.epoch, sample) for sample in batch]
            if micro_batch.last:
                complete, pending = complete + pending, []
            if i == life["saved_after"]:
                state, kept = sampler.state_dict(), complete
    # The last life finishes the epoch it is in.
    sampler = make(samples, Fleet((2,), 4), seed=seed)
    sampler.load_state_dict(state)
    epoch = sampler.epoch
    for micro_batch, batch in train(sampler, len(sampler), ahead=3):
        kept = kept + [(micro_batch.epoch, sample) for sample in batch]
    assert sampler.epoch == epoch + 1
    assert Counter(kept) == Counter((e, i) for e in range(epoch + 1) for i in range(samples))


@settings(deadline=None)
@given(samples=awkward, fleet=fleets, local_batch=st.none() | st.integers(1, 6), data=st.data())
def test_any_number_of_ranks_uses_the_same_samples_at_each_step(
    samples: int, fleet: Fleet, local_batch: int | None, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, 5))
    alone = make(samples, fleet, local_batch=local_batch)
    for _ in range(done):
        alone.consume()
    state = alone.state_dict()

    def steps(world_size: int) -> dict[int, list[int]]:
        used: dict[int, list[int]] = defaultdict(list)
        passes: set[int] = set()
        for rank in range(world_size):
            sampler = make(samples, fleet, local_batch=local_batch, rank=rank, world_size=world_size)
            sampler.load_state_dict(state)
            batches = list(sampler)
            assert len(sampler) == len(batches)
            passes.add(len(batches))
            for batch in batches:
                micro_batch = sampler.consume()
                assert micro_batch.size in (0, len(batch))
                used[micro_batch.step] += batch if micro_batch.size else []
        assert len(passes) == 1, "all ranks make the same number of passes"
        return {step: sorted(samples) for step, samples in used.items()}

    assert steps(1) == steps(2) == steps(3)


@settings(deadline=None)
@given(samples=st.integers(2, 300), fleet=fleets, local_batch=st.none() | st.integers(2, 6))
def test_no_micro_batch_has_a_single_sample(samples: int, fleet: Fleet, local_batch: int | None) -> None:
    if fleet.local_batch > 1:
        assert min(map(len, make(samples, fleet, local_batch=local_batch))) >= 2


# With a DataLoader --------------------------------------------------------------------------------------------------


def loader_of(sampler: ElasticSampler) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(sampler.samples)), batch_sampler=sampler, num_workers=2)


@pytest.mark.process
def test_a_loader_that_reads_ahead_is_stopped_and_resumed_exactly() -> None:
    first = make(211, Fleet((3, 1, 2), 5), seed=3)
    seen: list[int] = []
    pending: list[int] = []
    for number, (batch,) in enumerate(loader_of(first)):
        if number == 11:  # by now the two worker processes have asked for four micro-batches more
            break
        pending += batch.tolist()
        if first.consume().last:
            seen, pending = seen + pending, []
    assert pending, "the stop falls inside a step, so that there is something not to save"
    second = make(211, Fleet((4, 2), 5), seed=3)  # other workers than before
    second.load_state_dict(first.state_dict())
    for (batch,) in loader_of(second):
        seen += batch.tolist()
        second.consume()
    assert Counter(seen) == Counter(range(211))
    assert second.epoch == 1


def test_a_second_loop_in_the_same_process_continues_after_the_last_micro_batch_trained_on() -> None:
    sampler = make(50, Fleet((2,), 4))
    whole = list(sampler)
    first = [sampler.consume() and batch for batch in islice(sampler, 5)]
    assert first + list(sampler) == whole  # five micro-batches are two and a half steps
    assert len(sampler) == len(whole) - 5


@pytest.mark.process
def test_looking_at_a_batch_before_training_costs_nothing() -> None:
    sampler = ElasticSampler(20, 2, local_batch=5)
    next(iter(loader_of(sampler)))  # the worker processes have read the whole epoch
    assert sampler.state_dict()["position"] == 0
    assert sorted(epoch_of(sampler)) == list(range(20))


# Epochs -------------------------------------------------------------------------------------------------------------


def test_epochs_follow_each_other_and_the_plan_runs_on() -> None:
    # 10 samples in steps of 4, 8, 4, 8, ...: 4 + 6 (cut) is epoch 0, and epoch 1 begins with step 2, again of 4.
    # 3 samples in steps of 2: taking 2 would leave a single one, so each epoch is one step of 3.
    steps = [(p.epoch, p.step, p.batch) for p, _ in train(make(10, Fleet((1, 2), 4)), 6) if p.last]
    assert steps == [(0, 0, 4), (0, 1, 6), (1, 2, 4), (1, 3, 6)]
    steps = [(p.epoch, p.step, p.batch) for p, _ in train(make(3, Fleet((1,), 2)), 3)]
    assert steps == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_setting_the_current_epoch_keeps_a_resumed_position() -> None:
    sampler = ElasticSampler(20, 1, local_batch=4)
    for _ in range(7):  # 5 steps are epoch 0, 2 more are 8 samples of epoch 1
        sampler.consume()
    resumed = ElasticSampler(20, 1, local_batch=4)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(1)
    assert resumed.state_dict() == {**sampler.state_dict(), "epoch": 1, "position": 8, "step": 7}


def test_setting_epochs_without_consuming_gives_the_steps_of_a_run_that_consumes() -> None:
    fleet = Fleet((1, 3, 2), 4)
    trained = make(37, fleet)
    looked = make(37, fleet)
    for epoch in range(4):
        trained.set_epoch(epoch)
        looked.set_epoch(epoch)
        assert looked.peek() == trained.peek()
        assert list(looked) == [batch for _, batch in train(trained, len(trained))]
    assert trained.epoch == 4
    looked.set_epoch(1)
    again = make(37, fleet)
    again.set_epoch(1)
    assert looked.state_dict() == again.state_dict()


def test_without_consuming_the_same_epoch_comes_again() -> None:
    sampler = ElasticSampler(20, 1, local_batch=4)
    assert list(sampler) == list(sampler)
    assert sampler.state_dict()["position"] == 0


# Ranks --------------------------------------------------------------------------------------------------------------


def test_a_rank_without_samples_repeats_a_micro_batch_that_does_not_count() -> None:
    # 10 samples in steps of 2 x 2: 4, 4, 2; the last step has one micro-batch, of rank 0, and rank 1 repeats it.
    rank_1 = ElasticSampler(10, 2, local_batch=2, shuffle=False, rank=1, world_size=2)
    assert list(rank_1) == [[2, 3], [6, 7], [8, 9]]
    assert [(m.step, m.size, m.batch) for m in (rank_1.consume() for _ in range(3))] == [
        (0, 2, 4),
        (1, 2, 4),
        (2, 0, 2),
    ]
    assert rank_1.epoch == 1
    rank_2 = ElasticSampler(10, 2, local_batch=2, shuffle=False, rank=2, world_size=3)
    assert [rank_2.consume().size for _ in range(3)] == [0, 0, 0]


def test_all_ranks_are_at_the_same_position_after_each_step() -> None:
    # Steps of 2, 1 and 4 micro-batches; three ranks make 1, 1 and 2 rounds of passes.
    ranks = [make(14, Fleet((2, 1, 4), 2), shuffle=False, rank=rank, world_size=3) for rank in range(3)]
    counts = [[sampler.consume().size for _ in range(4)] for sampler in ranks]
    assert counts == [[2, 2, 2, 2], [2, 0, 2, 0], [0, 0, 2, 0]]
    assert ranks[0].state_dict() == ranks[1].state_dict() == ranks[2].state_dict()
    assert ranks[0].epoch == 1


@pytest.mark.parametrize(("policy", "batches"), [("fixed(12)", [12, 12]), ("follow(4)", [4, 12]), ("follow", [3, 9])])
def test_a_policy_is_asked_for_the_batch_of_the_ranks(policy: str, batches: list[int]) -> None:
    samplers = [ElasticSampler(60, policy, local_batch=3, rank=0, world_size=world) for world in (1, 3)]
    assert [sampler.peek().batch for sampler in samplers] == batches


def test_policies_that_a_sampler_cannot_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match="looks at the progress of training"):
        ElasticSampler(60, "geo(delay=60ep, factor=5)", local_batch=3)
    trace = Trace.parse("0s:4 100s")
    with pytest.raises(ConfigError, match=r"the policy geo\(1ep.* looks at the progress of training"):
        ElasticSampler(60, BatchPlan.from_trace(trace, "geo(1ep, initial=4, local_batch=3)", "1s"), local_batch=3)
    with pytest.raises(ConfigError, match="steps drop samples"):
        ElasticSampler(60, "drop(4, parts=3)")


@pytest.mark.parametrize("samples", [50, 120])
def test_a_loader_of_another_number_of_samples_is_refused(samples: int) -> None:
    """Of more samples, the others would never be trained on; of fewer, an index would not be found."""
    loader = DataLoader(TensorDataset(torch.ones(103, 2)), batch_sampler=ElasticSampler(samples, 2, local_batch=5))
    with pytest.raises(ConfigError, match=f"indices of {samples} samples, but the data set of the DataLoader has 103"):
        iter(loader)


def test_one_of_several_processes_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"one of 3 .* call init_process_group\(\)"):
        ElasticSampler(60, 2, local_batch=3)
    with pytest.raises(ConfigError, match="rank is 0 and world_size is None; give both"):
        ElasticSampler(60, 2, local_batch=3, rank=0)
    assert ElasticSampler(60, 2, local_batch=3, rank=2, world_size=3).rank == 2


# The plan's end -----------------------------------------------------------------------------------------------------


def test_a_plan_that_ends_inside_an_epoch_says_how_far_it_reaches() -> None:
    # 7 steps of 8 are 56: five reach 40 samples of the first epoch of 40, two more 16 of the second.
    sampler = ElasticSampler(40, BatchPlan.constant(2, 8, steps=7))
    assert len([sampler.consume() for _ in sampler]) == 10
    with pytest.raises(PlanError, match=r"reaches 1\.40 epochs: it ends in epoch 1, after 16 of 40 samples") as caught:
        list(sampler)
    assert "repeat" in str(caught.value)


def test_a_plan_that_ends_with_an_epoch_is_long_enough() -> None:
    sampler = ElasticSampler(40, BatchPlan.constant(2, 8, steps=5))
    assert sorted(i for _, batch in train(sampler, 10) for i in batch) == list(range(40))
    assert sampler.epoch == 1


# Counting without iterating -------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    return Trace.parse(" ".join(f"{20 * i}s:{count}" for i, count in enumerate(counts)) + f" {20 * len(counts)}s")


@given(
    trace=traces(),
    share=st.integers(1, 9),
    samples=st.integers(1, 400),
    local_batch=st.none() | st.integers(1, 9),
    world=st.integers(1, 4),
    data=st.data(),
)
@examples(200)
def test_lengths_and_epochs_are_those_of_a_walk_over_the_steps(
    trace: Trace, share: int, samples: int, local_batch: int | None, world: int, data: st.DataObject
) -> None:
    plan = BatchPlan.from_trace(trace.repeat(3), f"follow({share})", "1s")
    sampler = make(samples, plan, local_batch=local_batch, world_size=world, rank=data.draw(st.integers(0, world - 1)))
    # Step by step, as the ledger assigns them.
    ledger, step, starts = Ledger(samples=samples), 0, [0]
    left: list[tuple[Ledger, int, int]] = []
    while step < plan.steps and ledger.epoch < 4:  # type: ignore[operator]
        size = plan.at(step)
        assignment = ledger.assign(size.samples)
        most = min(-(-size.samples // size.workers), local_batch or samples)
        count = -(-len(micro_batch_sizes(assignment.batch, largest=most)) // world)
        left.append((ledger, step, count))
        ledger, step = ledger.commit(assignment), step + 1
        if not ledger.position:
            starts.append(step)
    for place, number, _ in data.draw(st.lists(st.sampled_from(left), max_size=5)):
        sampler.load_state_dict(sampler.state_dict() | place.state() | {"step": number})
        if place.epoch + 1 < len(starts):
            assert len(sampler) == sum(
                c for at, _, c in left if at.epoch == place.epoch and at.position >= place.position
            )
        else:
            with pytest.raises(PlanError, match="the plan reaches"):
                len(sampler)
    sampler.load_state_dict(sampler.state_dict() | Ledger(samples=samples).state() | {"step": 0})
    for epoch in data.draw(st.permutations(range(len(starts)))):
        sampler.set_epoch(epoch)
        assert (sampler.state_dict()["step"], sampler.epoch) == (starts[epoch], epoch)
    with pytest.raises(PlanError, match="the plan reaches"):
        sampler.set_epoch(10**4)


def test_an_epoch_of_a_million_steps_is_counted_at_once() -> None:
    # Two workers of 8 and, every second run, four: 10^6 steps in 2 runs, 12 samples a worker and step on average.
    plan = BatchPlan.from_trace(Trace.parse("0s:2 500000s:4 1000000s"), "follow(8)", "1s")
    sampler = ElasticSampler(16 * 500_000 + 32 * 500_000, plan)
    assert len(sampler) == 2 * 500_000 + 4 * 500_000
    sampler.set_epoch(1)
    assert sampler.state_dict()["step"] == 1_000_000
