"""Prefetching: training on JPEGs that are decoded in the training process, or by a process beside it.

A convolutional network is trained on generated images of 256x256, which are decoded with Pillow, cropped and resized to
64x64; the number of workers changes all the time. *decode* and *compute* are measured on their own. The limit is the
longer of the two: a run takes so long if there are idle cores and reading costs the training process nothing. The peer
is torch's DataLoader in its simplest use: the list of all batches is given to it before the start.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import FusedEngine
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.traces.availability import Trace
from ebbflow.workloads import DatasetSource, cross_entropy
from ebbflow.workloads.torchvision_import import import_torchvision

SAMPLES, SIDE, CROP = 4500, 256, 64
TRACE = "0s:4 1s:2 2s:5 3s:3 4s:4 5s:1 6s"
Fetch = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


class Jpegs(Dataset[tuple[torch.Tensor, int]]):
    """Images that are decoded whenever they are read; ten samples share each of them."""

    def __init__(self) -> None:
        transforms = import_torchvision(needed_for="this benchmark").transforms
        self.crop = transforms.Compose([transforms.RandomResizedCrop(CROP), transforms.PILToTensor()])
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(SAMPLES // 10):
            coarse = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
            return self.crop(image.convert("RGB")).float() / 255, index % 10


def make_engine(fetch: Fetch, width: int) -> FusedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip
    # 90 steps of 51 samples on average: one epoch, and nothing after it that would be prefetched.
    plan = BatchPlan.from_trace(Trace.parse(TRACE).repeat(15), Follow(16), "1s")
    return FusedEngine(model, fetch, cross_entropy, plan, samples=SAMPLES)


def epoch(engine: FusedEngine) -> float:
    """Return the seconds that an epoch takes, including the start of processes."""
    ledger, step, began = Ledger(samples=SAMPLES), 0, time.perf_counter()
    while ledger.epoch == 0:
        size = engine.participants(step)
        assignment = ledger.assign(size.samples)
        engine.gradients(assignment, size)
        engine.commit()
        ledger, step = ledger.commit(assignment), step + 1
    return time.perf_counter() - began


def with_source(data: Jpegs, width: int, processes: int) -> float:
    source = DatasetSource(data, loader_workers=processes)
    engine = make_engine(lambda indices: source.batch(indices, train=True), width)
    source.prefetch_from(engine.upcoming)
    seconds = epoch(engine)
    source.close()
    return seconds


def with_plain_loader(data: Jpegs, width: int, processes: int) -> float:
    lists: list[list[int]] = []

    def record(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lists.append(indices.tolist())
        return torch.zeros(len(indices), 3, 8, 8), torch.zeros(len(indices), dtype=torch.int64)

    epoch(make_engine(record, 1))
    loader = DataLoader(data, batch_sampler=lists, num_workers=processes, prefetch_factor=2)
    batches: list[Iterator[tuple[torch.Tensor, torch.Tensor]]] = []

    def fetch(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not batches:
            batches.append(iter(loader))  # this starts its processes
        return next(batches[0])

    return epoch(make_engine(fetch, width))


def decode_and_compute(data: Jpegs, width: int) -> tuple[float, float]:
    """Return the seconds that decoding an epoch takes, and computing one."""
    began = time.perf_counter()
    DatasetSource(data).batch(np.arange(SAMPLES), train=True)
    decode = time.perf_counter() - began
    images, labels = torch.rand(128, 3, CROP, CROP), torch.arange(128) % 10
    return decode, epoch(make_engine(lambda indices: (images[: len(indices)], labels[: len(indices)]), width))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="number of loader processes")
    parser.add_argument("--repeats", type=int, default=2, help="number of runs, of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Jpegs()
    print(f"{SAMPLES} JPEGs of {SIDE}x{SIDE}; seconds per epoch, fastest of {options.repeats}")
    for width in (8, 24):
        found = [
            (*decode_and_compute(data, width), with_source(data, width, 0),
             with_source(data, width, options.processes), with_plain_loader(data, width, options.processes))
            for _ in range(options.repeats)
        ]  # fmt: skip
        decode, compute, in_process, prefetch, plain = (min(column) for column in zip(*found, strict=True))
        limit = max(compute, decode / options.processes)
        row = {
            "decode": decode, "compute": compute, "in process": in_process, "prefetch": prefetch, "DataLoader": plain,
            "limit": limit, "prefetch/limit": prefetch / limit, "DataLoader/limit": plain / limit,
            "speed-up": in_process / prefetch,
        }  # fmt: skip
        if width == 8:
            print(f"{'model':>8}" + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in row))
        print(f"{f'width {width}':>8}" + "".join(f"{value:>{max(9, len(name) + 2)}.2f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
