"""Who computes which micro-batches of a live step, as pure functions: all participants come to the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbflow.data.ledger import MicroBatch
from ebbflow.live.membership_events import ComputeStep, KeptPart

__all__ = ["computing_ranks", "share_micro_batches", "usable_parts"]


def computing_ranks(step: ComputeStep) -> list[int]:
    """The ranks that compute: those that need not receive the state first.

    >>> computing_ranks(ComputeStep(step=3, participants=("a", "b", "c"), rank=0, receiving=frozenset({1})))
    [0, 2]
    """
    return [rank for rank in range(len(step.participants)) if rank not in step.receiving]


def usable_parts(kept: Sequence[KeptPart | None]) -> dict[int, KeptPart]:
    """The kept parts that fit together, by rank: of one size of the step, and no micro-batch twice.

    A part is a sum, from which no micro-batch can be taken out. So of two parts that overlap, as after replicas had
    lost sight of each other, the larger one is used, and the other one is forgotten.

    >>> parts = [KeptPart(workers=3, samples=12, micro_batches=numbers) for numbers in [(0,), (1, 2), (2, 0)]]
    >>> sorted(usable_parts([*parts, None]))
    [0, 1]
    """
    ranked = sorted(
        ((rank, part) for rank, part in enumerate(kept) if part is not None and part.micro_batches),
        key=lambda found: (-len(found[1].micro_batches), found[0]),
    )
    chosen: dict[int, KeptPart] = {}
    taken: set[int] = set()
    for rank, part in ranked:
        first = next(iter(chosen.values()), part)
        same_step = (part.workers, part.samples) == (first.workers, first.samples)
        if same_step and taken.isdisjoint(part.micro_batches):
            chosen[rank] = part
            taken.update(part.micro_batches)
    return chosen


def share_micro_batches(
    micro_batches: Sequence[MicroBatch], ranks: Sequence[int], kept: Mapping[int, KeptPart]
) -> dict[int, tuple[int, ...]]:
    """The numbers of the micro-batches that each rank is to compute now.

    Worker w is computed by the rank number w mod ranks of those that compute. In a repeated step only what nobody has
    kept is computed, by all in turn.

    >>> step = [MicroBatch(worker % 3, 4 * worker, 4 * worker + 4) for worker in range(4)]
    >>> share_micro_batches(step, [0, 2], {})
    {0: (0, 2, 3), 2: (1,)}
    >>> share_micro_batches(step, [0, 2], {0: KeptPart(workers=3, samples=16, micro_batches=(0, 3))})
    {0: (1,), 2: (2,)}
    """
    shares: dict[int, list[int]] = {rank: [] for rank in ranks}
    done = {number for part in kept.values() for number in part.micro_batches}
    missing = [number for number in range(len(micro_batches)) if number not in done]
    for turn, number in enumerate(missing):
        worker = turn if kept else micro_batches[number].worker
        shares[ranks[worker % len(ranks)]].append(number)
    return {rank: tuple(numbers) for rank, numbers in shares.items()}
