"""Data sets for the tests of prefetching, in a module that other processes can import."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

SAMPLES = 203


class Drawing(Dataset[tuple[torch.Tensor, int]]):
    """Samples that contain their index, and noise from each of the three generators that transforms may draw from."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *noise, index % 7 - 3.0]), index % 2


class Broken(Drawing):
    """Sample 70 cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 70:
            raise OSError("cannot identify image file 'cat.jpg'")
        return super().__getitem__(index)


class Ragged(Drawing):
    """Sample 70 is longer than the others."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample, target = super().__getitem__(index)
        return (torch.cat([sample, sample]) if index == 70 else sample), target


class Watched(Drawing):
    """Writes into a folder which process has read which sample."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)

    def readers(self) -> set[int]:
        return {int(path.name) for path in self.folder.iterdir()}

    def read(self) -> set[int]:
        return {int(line) for path in self.folder.iterdir() for line in path.read_text().splitlines()}
