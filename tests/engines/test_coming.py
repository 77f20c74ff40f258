"""What an engine says is upcoming is what it then asks for, unless something happens that nobody could know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated import EmulatedEngine, FusedEngine, LoopEngine, Ranks
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.growing import allow
from ebbflow.plan.policies import Follow
from ebbflow.traces.availability import Trace
from ebbflow.workloads import cross_entropy

SAMPLES = 211  # a prime: every epoch has an uneven tail
PLAN = BatchPlan.from_trace(Trace.parse("0s:4 2s:2 4s:7 6s:3 8s:1 10s:5 12s:6 14s:2 16s").repeat(3), Follow(6), "1s")
KINDS: list[tuple[type[EmulatedEngine], dict[str, Any]]] = [(LoopEngine, {}), (FusedEngine, {"fused_batch": 13})]

SamplerMicroBatch = tuple[int, tuple[int, ...]]


class Witness:
    """Answers an engine's requests, and notes with each one what the engine says is upcoming."""

    def __init__(self, kind: type[EmulatedEngine], *, prefetches: bool = False, **settings: Any) -> None:
        model = nn.Linear(2, 3)
        self.engine = kind(model, self.fetch, cross_entropy, PLAN, samples=SAMPLES, seed=3, **settings)
        if isinstance(self.engine, FusedEngine):
            self.engine.prefetches = prefetches
        self.asked: list[SamplerMicroBatch] = []
        self.told: list[list[SamplerMicroBatch]] = []

    def fetch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append((torch.initial_seed(), tuple(indices.tolist())))
        upcoming = ((seed, tuple(samples.tolist())) for seed, samples in self.engine.upcoming())
        self.told.append([micro_batch for micro_batch, _ in zip(upcoming, range(12), strict=False)])
        return torch.zeros(len(indices), 2), torch.zeros(len(indices), dtype=torch.int64)

    def run(self, steps: int, *, requested: list[int] | None = None) -> None:
        """`requested`: the batch that a growing policy wants in each step."""
        ledger, step = Ledger(samples=SAMPLES), 0
        while step < steps:
            size = self.engine.participants(step)
            size = size if requested is None else allow(size, requested[step])
            assignment = ledger.assign(size.samples)
            self.engine.gradients(assignment, size)
            if self.engine.commit():
                ledger, step = ledger.commit(assignment), step + 1

    def surprises(self) -> int:
        """Requests that were not what the one before said would come next."""
        before = [told[1:2] for told in self.told[:-1]]
        return sum(told != [asked] for told, asked in zip(before, self.asked[1:], strict=True))


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_run_that_goes_as_planned_is_foretold_piece_by_piece_to_the_end_of_the_plan(kind, settings, prefetches):
    witness = Witness(kind, prefetches=prefetches, **settings)
    steps = PLAN.steps
    assert steps == 48
    witness.run(steps)
    for i, told in enumerate(witness.told):
        assert told == witness.asked[i : i + 12]
    assert len({seed for seed, _ in witness.asked}) == len(witness.asked)  # each micro-batch has its own


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_lost_step_surprises_and_the_next_one_is_not_guessed_before_things_go_on_as_expected(kind, settings):
    # The step 9 of 1 worker is lost, and asked for again: one surprise. Then it goes on as it would have, which is
    # not looked at before step 10 has been asked for: the second.
    witness = Witness(kind, faults=Faults().lose(worker=0, step=9), **settings)
    witness.engine.faults.present = lambda step, size: size  # the worker is back at once
    witness.run(20)
    assert witness.surprises() == 2


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_batch_that_stays_below_the_plan_is_expected_to_stay_there(prefetches):
    witness = Witness(FusedEngine, fused_batch=13, prefetches=prefetches)
    witness.run(16, requested=[5] * 8 + [4] * 8)
    # Four workers of six could take 24, as two steps of the plan have it, and the policy wants 5 from the first step
    # on, which is not a surprise yet. Step 8 is one; that guessing begins again after it looks like another.
    assert witness.surprises() == 2


def test_a_batch_that_is_another_one_in_every_step_is_not_guessed_in_vain():
    witness = Witness(FusedEngine, fused_batch=13, prefetches=True)
    witness.run(16, requested=list(range(2, 18)))
    samples = sum(len(indices) for _, indices in witness.asked)
    # 2 + 3 + ... + 17 as requested, less where the plan's one and two workers allow 6 and 12; wrong guesses: two at
    # most.
    assert samples <= sum(range(2, 18)) + 2 * 6


def test_a_run_that_begins_in_the_middle_is_foretold_from_there():
    witness = Witness(LoopEngine)
    ledger = Ledger(samples=SAMPLES, epoch=2, position=100)
    size = witness.engine.participants(20)
    witness.engine.gradients(ledger.assign(size.samples), size)
    assert witness.told[0][: len(witness.asked)] == witness.asked
    assert len(witness.told[0]) == 12


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_rank_foretells_its_own_pieces_only(kind, settings, monkeypatch):
    # A rank's part of a step is all that is needed here, and not what is then done with it.
    monkeypatch.setattr("ebbflow.engines.emulated.emulated_engine.StepAllReduce", lambda *a, **k: None)
    own = []
    for rank in range(2):
        witness = Witness(kind, ranks=Ranks(rank, 2), **settings)
        witness.run(1)
        assert witness.told[0][: len(witness.asked)] == witness.asked
        own.append({index for _, indices in witness.asked for index in indices})
    whole = Witness(kind, **settings)
    whole.run(1)
    assert not own[0] & own[1]
    assert own[0] | own[1] == {index for _, indices in whole.asked for index in indices}
    assert len(own[0]) == len(own[1]) == 12
