"""What is asked of a data set, and the answer to it, the same in whichever process it is read.

A *request* is a list of samples and one random number. It is read in *slices* of at most 32 samples, each in one go and
in one process. Before a slice, the global generators of torch, numpy and Python are seeded from the request's number
and the slice's place in it: what a transform draws depends on nothing else, neither on the number of processes nor on
what was read before.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ebbflow.engines.replica import micro_batch_seed
from ebbflow.errors import ConfigError, DataError

__all__ = ["SLICE", "Failed", "Request", "collate", "read_slice", "seeded"]

SLICE = 32
"""Samples of a slice. Part of what a seed means: with another number, transforms draw other numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """Samples, in the order in which they are wanted, and the number that all randomness of their transforms is from.

    >>> [len(part.indices) for part in Request(7, tuple(range(70))).slices()]
    [32, 32, 6]
    """

    seed: int
    indices: tuple[int, ...]

    def slices(self) -> list[Request]:
        """The same samples in parts that are read at once, each with a number of its own."""
        return [
            Request(micro_batch_seed(self.seed, 0, start), self.indices[start : start + SLICE])
            for start in range(0, len(self.indices), SLICE)
        ]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a sample could not be read; it crosses from process to process, as an exception might not."""

    index: int
    reason: str
    trace: str

    def error(self, dataset: Dataset[Any]) -> DataError:
        """What to raise; the traceback of the data set's own error is its note."""
        error = DataError(
            f"sample {self.index} of {type(dataset).__name__} cannot be read: {self.reason}; mend it, or leave it out "
            f"of the data set"
        )
        error.add_note(self.trace)
        return error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators on the CPU begin at a seed inside, and go on outside as if nothing had been drawn."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def read_slice(dataset: Dataset[Any], part: Request) -> list[Any] | Failed:
    """The samples of a slice one by one, or the first that cannot be read."""
    samples = []
    with seeded(part.seed):
        for index in part.indices:
            try:
                samples.append(dataset[index])
            except Exception as error:  # whatever the data set's own code raises
                return Failed(index, f"{type(error).__name__}: {error}", traceback.format_exc())
    return samples


def collate(samples: list[Any], dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """One batch of (input, target) samples, by torch's default."""
    name = type(dataset).__name__
    try:
        pair = default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"samples of {name} do not make a batch: {error}; expected (input, target) pairs of equal shapes"
        ) from error
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        found = [type(part).__name__ for part in pair] if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise ConfigError(f"{name} gives {found}; expected (input, target), each a tensor or a number")
    return pair[0], pair[1]
