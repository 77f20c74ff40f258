"""Who computes which micro-batches of a live step."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Assignment, split_step
from ebbflow.live.membership_events import KeptPart
from ebbflow.live.shares import share_micro_batches, usable_parts

sizes = st.sampled_from([(3, 24), (4, 24)])
some_parts = st.lists(
    st.none() | st.builds(
        lambda size, numbers: KeptPart(workers=size[0], samples=size[1], micro_batches=tuple(sorted(numbers))),
        sizes, st.sets(st.integers(0, 5)),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(some_parts, st.data())
def test_every_micro_batch_counts_once_whatever_was_kept(kept: list[KeptPart | None], data: st.DataObject) -> None:
    parts = usable_parts(kept)
    (workers, samples) = next(((part.workers, part.samples) for part in parts.values()), (3, 24))
    micro_batches = split_step(Assignment(0, 0, samples), workers=workers, largest=4)
    assert len(micro_batches) == 6
    ranks = sorted(data.draw(st.sets(st.sampled_from(range(len(kept))), min_size=1)))
    shares = share_micro_batches(micro_batches, ranks, parts)
    computed = [number for numbers in shares.values() for number in numbers]
    earlier = [number for part in parts.values() for number in part.micro_batches]
    assert Counter(computed + earlier) == Counter(range(6))
    loads = [len(numbers) for numbers in shares.values()]
    if parts:
        assert max(loads) - min(loads) <= 1, "what is missing is shared evenly"
    assert set(shares) == set(ranks)


def test_without_a_loss_worker_w_is_computed_by_the_rank_w_mod_ranks() -> None:
    micro_batches = split_step(Assignment(0, 0, 20), workers=5, largest=4)
    assert share_micro_batches(micro_batches, [0, 1], {}) == {0: (0, 2, 4), 1: (1, 3)}


def test_a_part_of_another_size_is_forgotten() -> None:
    """The part with most micro-batches decides; of equal ones the first rank."""
    small, large = (
        KeptPart(workers=2, samples=8, micro_batches=(0,)),
        KeptPart(workers=3, samples=12, micro_batches=(1, 2)),
    )
    assert usable_parts([small, large]) == {1: large}
    assert usable_parts([None, None]) == {}
