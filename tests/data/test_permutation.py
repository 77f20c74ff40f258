"""The shuffle is a bijection, is the same everywhere, and mixes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.core.units import MOST_SAMPLES
from ebbflow.data import permutation
from ebbflow.data.permutation import Permutation
from ebbflow.errors import ConfigError, DataError

Ints = npt.NDArray[np.int64]
LARGE = 40_009
"""A prime above the threshold, so that the network and its cycle walking are at work."""


def whole(n: int, seed: int = 0, epoch: int = 0) -> Ints:
    return Permutation(n, seed, epoch).indices(0, n)


def assert_bijective(n: int, order: Ints) -> None:
    assert np.array_equal(np.sort(order), np.arange(n)), f"not a permutation of {n}"


# Bijective ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [None, 0], ids=["as-used", "network-only"])
def test_every_small_n_is_permuted_bijectively(monkeypatch: pytest.MonkeyPatch, threshold: int | None) -> None:
    if threshold is not None:
        monkeypatch.setattr(permutation, "_SMALL", threshold)
    for n in range(1, 601):
        assert_bijective(n, whole(n, seed=n))


@examples(40)
@given(n=st.integers(601, 300_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_any_larger_n_is_permuted_bijectively(n: int, seed: int, epoch: int) -> None:
    assert_bijective(n, whole(n, seed, epoch))


@pytest.mark.parametrize("n", [2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 2**20, 2**20 + 1])
def test_powers_of_two_and_their_neighbours_are_permuted_bijectively(n: int) -> None:
    assert_bijective(n, whole(n))


@examples(40)
@given(n=st.integers(2**30, MOST_SAMPLES), seed=st.integers(0, 100), data=st.data())
def test_huge_n_gives_distinct_samples_in_range(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 5000))
    part = Permutation(n, seed, 0).indices(start, start + 5000)
    assert part.min() >= 0
    assert part.max() < n
    assert len(np.unique(part)) == 5000


@examples(30)
@given(n=st.sampled_from([1000, LARGE, 10**9]), data=st.data())
def test_a_part_is_the_same_whatever_was_read_around_it(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1000))
    a, b = sorted(data.draw(st.tuples(st.integers(0, 1000), st.integers(0, 1000))))
    order = Permutation(n, 7, 3)
    around = order.indices(start, start + 1000)
    assert np.array_equal(order.indices(start + a, start + b), around[a:b])


def test_a_read_longer_than_a_block_equals_its_parts() -> None:
    order = Permutation(10**8, 1, 2)
    long = order.indices(1000, 101_000)
    parts = [order.indices(i, i + 1000) for i in range(1000, 101_000, 1000)]
    assert np.array_equal(long, np.concatenate(parts))


# The same everywhere ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "start", "expected"),
    [
        (10, 0, [9, 3, 0, 4, 6, 2, 5, 1]),
        (1797, 1000, [453, 153, 646, 1066, 1206, 1390, 1430, 1321]),
        (LARGE, 0, [10908, 2939, 10834, 23707, 25615, 3117, 6477, 16271]),
        (1_281_167, 640_000, [1094113, 1154624, 1132411, 1153720, 780655, 564248, 207594, 49199]),
        (10**9, 999_999_992, [188535188, 717953809, 274587306, 631982464, 300626180, 537703544, 339791737, 293356273]),
        (
            2**40,
            2**39,
            [
                963344054828,
                475884955565,
                917706805077,
                573425728654,
                505315633239,
                469290357853,
                686943593231,
                1011658634874,
            ],
        ),
    ],
)
def test_the_order_is_pinned(n: int, start: int, expected: list[int]) -> None:
    # A saved run continues in the order it began with: a change here breaks every checkpoint of users.
    assert Permutation(n, seed=42, epoch=7).indices(start, start + 8).tolist() == expected


def test_without_shuffling_the_order_is_the_identity() -> None:
    for n in (10, 10**9):
        order = Permutation(n, 5, 9, shuffle=False)
        assert order.indices(n - 4, n).tolist() == [n - 4, n - 3, n - 2, n - 1]


@pytest.mark.parametrize("n", [100, LARGE])
def test_seeds_and_epochs_give_different_orders(n: int) -> None:
    # (1 + 5 * 2^32, 0) and (1, 5) are the same words one after the other; they must not be the same order.
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 5), (1 + 5 * 2**32, 0), (2**64 - 1, 0)]
    orders = {tuple(whole(n, *key)[:100].tolist()) for key in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize("n", [10, LARGE])
def test_writing_to_a_part_leaves_the_order_as_it_was(n: int) -> None:
    order = Permutation(n, 0, 0)
    part = order.indices(0, 5)
    before = part.tolist()
    part[:] = -1
    assert order.indices(0, 5).tolist() == before


# Mixing -------------------------------------------------------------------------------------------------------------
#
# Each check returns how many standard deviations a count lies from what a random order gives. Orders are fixed by
# their seeds, so a check passes always or never; beyond 5 would happen by chance once in a million.


def deviation(counts: Ints, expected: npt.ArrayLike) -> float:
    """Pearson's chi-square over buckets, as standard deviations from its mean."""
    expected = np.broadcast_to(np.asarray(expected, dtype=float), counts.shape)
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def where_samples_lie(n: int) -> float:
    """The samples at the first positions, over many epochs, are spread evenly over the data."""
    heads = np.concatenate([Permutation(n, 1, epoch).indices(0, 64) for epoch in range(512)])
    return deviation(np.bincount(heads * 128 // n, minlength=128), heads.size / 128)


def which_sample_lies_first(n: int) -> float:
    """One position over many epochs: sixteen equal parts of the data come equally often."""
    first = np.array([int(Permutation(n, 1, epoch).indices(n // 3, n // 3 + 1)[0]) for epoch in range(2048)])
    return deviation(np.bincount(first * 16 // n, minlength=16), first.size / 16)


def steps_between_neighbours(n: int) -> float:
    """Differences of neighbours in the order, modulo n, are spread evenly."""
    order = whole(n, seed=3)
    steps = np.diff(order) % n
    return deviation(np.bincount(steps * 256 // n, minlength=256), steps.size / 256)


def low_bits_of_pairs(n: int) -> float:
    """The xor of the low bits of neighbours takes each value equally often (a trace that short networks leave)."""
    order = whole(n, seed=4)
    pairs = (order[0:-1:2] ^ order[1::2]) & 63
    return deviation(np.bincount(pairs, minlength=64), pairs.size / 64)


def parts_far_apart(n: int) -> float:
    """Positions a part of the network apart (they share their low part) have differences spread evenly."""
    order = whole(n, seed=5)
    apart = 1 << ((n - 1).bit_length() // 2)
    steps = (order[apart:] - order[:-apart]) % n
    return deviation(np.bincount(steps * 256 // n, minlength=256), steps.size / 256)


def descents(n: int) -> float:
    """A random order falls at (n - 1)/2 places, with variance (n + 1)/12."""
    falls = int((np.diff(whole(n, seed=6)) < 0).sum())
    return (falls - (n - 1) / 2) / ((n + 1) / 12) ** 0.5


def epochs_agree(n: int) -> float:
    """Two epochs have the same sample at one position about once an epoch: 199 pairs of epochs, a Poisson of 199."""
    orders = [whole(n, seed=7, epoch=epoch) for epoch in range(200)]
    same = sum(int((a == b).sum()) for a, b in pairwise(orders))
    return (same - 199) / 199**0.5


CHECKS: list[Callable[[int], float]] = [
    where_samples_lie,
    which_sample_lies_first,
    steps_between_neighbours,
    low_bits_of_pairs,
    parts_far_apart,
    descents,
    epochs_agree,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("n", [4099, LARGE, 2**16, 100_003])
def test_the_order_passes_for_random(check: Callable[[int], float], n: int) -> None:
    assert abs(check(n)) < 5


@pytest.mark.parametrize(
    ("rounds", "caught"),
    [
        (1, {"steps_between_neighbours", "low_bits_of_pairs", "parts_far_apart", "descents", "epochs_agree"}),
        (2, {"steps_between_neighbours", "low_bits_of_pairs", "parts_far_apart", "descents"}),
        (3, {"low_bits_of_pairs", "parts_far_apart"}),
        (4, {"parts_far_apart"}),
    ],
)
def test_the_checks_catch_a_network_of_fewer_rounds(
    monkeypatch: pytest.MonkeyPatch, rounds: int, caught: set[str]
) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    assert {check.__name__ for check in CHECKS if abs(check(100_003)) > 5} == caught


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, 2**40 + 1])
def test_a_size_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(DataError, match=rf"order of {n} samples .* expected 1 to 2\^40"):
        Permutation(n, 0, 0)


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1)])
def test_a_negative_seed_or_epoch_is_refused(seed: int, epoch: int) -> None:
    with pytest.raises(ConfigError, match="from 0 up"):
        Permutation(10, seed, epoch)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_beyond_the_order_are_refused(start: int, stop: int, shuffle: bool) -> None:
    with pytest.raises(DataError, match="expected 0 <= start <= stop <= 10"):
        Permutation(10, 0, 0, shuffle=shuffle).indices(start, stop)
