"""What an engine says is coming is what it then asks for, unless something happens that nobody could know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.emulated.base import EmulatedEngine
from ebbflow.engines.emulated.ranks import Ranks
from ebbflow.plan.growth import allow
from ebbflow.plan.plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.traces.trace import Trace
from ebbflow.workloads import cross_entropy

SAMPLES = 211  # a prime: every epoch has an uneven tail
PLAN = BatchPlan.from_trace(Trace.parse("0s:4 2s:2 4s:7 6s:3 8s:1 10s:5 12s:6 14s:2 16s").repeat(3), Follow(6), "1s")
KINDS: list[tuple[type[EmulatedEngine], dict[str, Any]]] = [(LoopEngine, {}), (FusedEngine, {"chunk": 13})]

Piece = tuple[int, tuple[int, ...]]


class Witness:
    """Answers an engine's requests, and notes with each one what the engine says is coming."""

    def __init__(self, kind: type[EmulatedEngine], *, looks_ahead: bool = False, **settings: Any) -> None:
        model = nn.Linear(2, 3)
        self.engine = kind(model, self.fetch, cross_entropy, PLAN, samples=SAMPLES, seed=3, **settings)
        if isinstance(self.engine, FusedEngine):
            self.engine.looks_ahead = looks_ahead
        self.asked: list[Piece] = []
        self.told: list[list[Piece]] = []

    def fetch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append((torch.initial_seed(), tuple(indices.tolist())))
        coming = ((seed, tuple(samples.tolist())) for seed, samples in self.engine.coming())
        self.told.append([piece for piece, _ in zip(coming, range(12), strict=False)])
        return torch.zeros(len(indices), 2), torch.zeros(len(indices), dtype=torch.int64)

    def run(self, steps: int, *, wanted: list[int] | None = None) -> None:
        """`wanted`: the batch that a growing policy wants in each step."""
        ledger, step = Ledger(samples=SAMPLES), 0
        while step < steps:
            size = self.engine.members(step)
            size = size if wanted is None else allow(size, wanted[step])
            assignment = ledger.assign(size.samples)
            self.engine.gradients(assignment, size)
            if self.engine.commit():
                ledger, step = ledger.commit(assignment), step + 1

    def surprises(self) -> int:
        """Requests that were not what the one before said would come next."""
        before = [told[1:2] for told in self.told[:-1]]
        return sum(told != [asked] for told, asked in zip(before, self.asked[1:], strict=True))


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_run_that_goes_as_planned_is_foretold_piece_by_piece_to_the_end_of_the_plan(kind, settings, looks_ahead):
    witness = Witness(kind, looks_ahead=looks_ahead, **settings)
    steps = PLAN.steps
    assert steps == 48
    witness.run(steps)
    for i, told in enumerate(witness.told):
        assert told == witness.asked[i : i + 12]
    assert len({seed for seed, _ in witness.asked}) == len(witness.asked)  # each piece has its own


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_lost_step_surprises_and_the_next_one_is_not_guessed_before_things_go_on_as_expected(kind, settings):
    # The step 9 of 1 worker is lost, and asked for again: one surprise. Then it goes on as it would have, which is
    # not looked at before step 10 has been asked for: the second.
    witness = Witness(kind, faults=Faults().lose(worker=0, step=9), **settings)
    witness.engine.faults.present = lambda step, size: size  # the worker is back at once
    witness.run(20)
    assert witness.surprises() == 2


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_batch_that_stays_below_the_plan_is_expected_to_stay_there(looks_ahead):
    witness = Witness(FusedEngine, chunk=13, looks_ahead=looks_ahead)
    witness.run(16, wanted=[5] * 8 + [4] * 8)
    # Four workers of six could take 24, as two steps of the plan have it, and the policy wants 5 from the first step
    # on, which is not a surprise yet. Step 8 is one; that guessing begins again after it looks like another.
    assert witness.surprises() == 2


def test_a_batch_that_is_another_one_in_every_step_is_not_guessed_in_vain():
    witness = Witness(FusedEngine, chunk=13, looks_ahead=True)
    witness.run(16, wanted=list(range(2, 18)))
    samples = sum(len(indices) for _, indices in witness.asked)
    # 2 + 3 + ... + 17 as wanted, less where the plan's one and two workers allow 6 and 12; wrong guesses: two at most.
    assert samples <= sum(range(2, 18)) + 2 * 6


def test_a_run_that_begins_in_the_middle_is_foretold_from_there():
    witness = Witness(LoopEngine)
    ledger = Ledger(samples=SAMPLES, epoch=2, position=100)
    size = witness.engine.members(20)
    witness.engine.gradients(ledger.assign(size.samples), size)
    assert witness.told[0][: len(witness.asked)] == witness.asked
    assert len(witness.told[0]) == 12


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_rank_foretells_its_own_pieces_only(kind, settings, monkeypatch):
    # A rank's part of a step is all that is needed here, and not what is then done with it.
    monkeypatch.setattr("ebbflow.engines.emulated.base.StepSum", lambda *a, **k: None)
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
