"""Reading ahead: worker processes decode and transform the samples of upcoming steps while the present one is computed.

    read(request)  --- as expected? -->  the slices that the loader has ready, or nearly
                   --- otherwise ----->  ask again what is upcoming, throw away what was read, start from here

The loader, torch's DataLoader, is fed from an iterator over upcoming requests, which is read lazily: as many slices are
under way as the processes can hold, and no more. That iterator may be wrong about the future; what comes out of the
loader is compared with what is asked for, request by request. So a wrong guess costs time, and never gives another
sample.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from ebbflow.engines.replica import micro_batch_seed
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.sources import Indices, standardised, tensors_on

__all__ = ["SLICE", "DatasetSource", "Reader", "Request", "seeded"]

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


Upcoming = Callable[[], Iterator[Request]]
"""Tells what will be asked for, from the present request on; as far as can be told, and with no harm if it is wrong."""

Part = tuple[Tensor, Tensor] | Failed | ConfigError

_LOG = logging.getLogger(__name__)


class _Slices(Dataset[Part]):
    """The data set as the worker processes see it: asked for slices, it gives batches, or says why it cannot."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, part: Request) -> Part:
        samples = read_slice(self.dataset, part)
        if isinstance(samples, Failed):
            return samples
        try:
            return collate(samples, self.dataset)
        except ConfigError as error:
            return ConfigError(str(error))  # without its cause, which might not cross from process to process


class _Feed(Sampler[Request]):
    """What the loader is fed from: the slices of the requests of its owner, which are noted when they are taken."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())
        self.taken: deque[Request] = deque()
        """Requests of which the loader has taken a slice, and nobody has taken the result."""

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.taken.append(request)
            yield from request.slices()


class Reader:
    """Reads requests of a data set with `workers` processes, or in this one if they are none.

    Guarantees: the samples of `read` are those of its request, whatever was expected; they are the same for every
    number of processes, and so is the state of all random generators of this process afterwards. A process that ends
    is an error, within seconds. `close` ends all processes, and so does the end of this process, however it ends.

    Processes start at the first `read`, forked from this one, so that the data set need not be pickled. A process that
    may have no children (a daemon) reads by itself.
    """

    def __init__(self, dataset: Dataset[Any], *, workers: int, ahead: int, pin_memory: bool = False) -> None:
        """`ahead`: samples that are read before they are asked for, where requests are large enough to fill slices."""
        for name, value, least in (("workers", workers, 0), ("ahead", ahead, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}; expected {least} or more")
        self.dataset = dataset
        self.workers = workers
        self.ahead = ahead
        self.pin_memory = pin_memory
        self._feed = _Feed()
        self._loader: DataLoader[Part] | None = None
        self._parts: Iterator[Part] = iter(())
        self._upcoming: list[Upcoming] = []

    @contextmanager
    def following(self, upcoming: Upcoming) -> Iterator[None]:
        """Inside, `upcoming` tells what will be asked for."""
        self._upcoming.append(upcoming)
        try:
            yield
        finally:
            self._upcoming.remove(upcoming)

    def follow(self, upcoming: Upcoming) -> None:
        """From now on, `upcoming` tells what will be asked for."""
        self._upcoming[:] = [upcoming]

    def read(self, request: Request) -> list[tuple[Tensor, Tensor]]:
        """The samples of the request, as batches to be joined."""
        if self.workers == 0 or multiprocessing.current_process().daemon:
            return [self._read_here(request)]
        batches = []
        for part in self._take(request):
            if isinstance(part, Failed):
                raise part.error(self.dataset)
            if isinstance(part, ConfigError):
                raise part
            batches.append(part)
        return batches

    def _take(self, request: Request) -> list[Part]:
        """The slices of a request from the loader."""
        try:
            taken = self._feed.taken
            if not taken or taken[0] != request:
                self._expect(self._from(request))
            taken.popleft()
            return [next(self._parts) for _ in request.slices()]
        except (RuntimeError, OSError, EOFError) as error:  # a process is gone: before its samples, or before they came
            failure = str(error)
        except BaseException:  # interrupted between two slices: what comes next would be taken for something else
            self.close()
            raise
        self.close()  # here, where the error no longer holds on to the loader: all processes end now
        raise DataError(
            f"reading samples of {type(self.dataset).__name__} ahead failed: {failure}. If a process was killed for "
            f"lack of memory, or of shared memory in /dev/shm, use fewer of them (loader_workers)"
        )

    def _read_here(self, request: Request) -> tuple[Tensor, Tensor]:
        samples = []
        for part in request.slices():
            read = read_slice(self.dataset, part)
            if isinstance(read, Failed):
                raise read.error(self.dataset)
            samples += read
        return collate(samples, self.dataset)

    def _from(self, request: Request) -> Iterator[Request]:
        """The request, and what is upcoming after it if this is the one that should come now."""
        upcoming = self._upcoming[-1]() if self._upcoming else iter(())
        later = upcoming if next(upcoming, None) == request else ()
        return itertools.chain([request], later)

    def _expect(self, requests: Iterator[Request]) -> None:
        """Read these from now on; what is under way is waited for and thrown away."""
        if self._feed.taken:
            _LOG.debug("%d requests were read in vain", len(self._feed.taken))
        self._feed.taken.clear()
        self._feed.requests = requests
        if self._loader is None:
            self._loader = self._make_loader()
        with _deaf_to_children():
            self._parts = iter(self._loader)

    def _make_loader(self) -> DataLoader[Part]:
        return DataLoader(
            _Slices(self.dataset),
            sampler=self._feed,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=max(2, -(-self.ahead // (SLICE * self.workers))),
            persistent_workers=True,
            pin_memory=self.pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=functools.partial(_begin_worker, os.getpid()),
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # it draws a number at each start; not from the run's generator
        )

    def close(self) -> None:
        """End the processes; the next `read` starts them again."""
        self._feed.taken.clear()
        self._feed.requests = iter(())
        with _deaf_to_children():
            self._parts = iter(())
            self._loader = None  # its last reference: torch ends the processes and waits for them


def _as_it_is(part: Any) -> Any:
    return part


def _begin_worker(parent: int, number: int) -> None:
    """Ctrl-C in a terminal reaches all processes; the one that trains decides, and may still want samples."""
    if os.getppid() != parent:
        os._exit(1)  # killed while this process began; torch's watchdog would wait for a change that has been
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _deaf_to_children() -> Iterator[None]:
    """The end of a child is no event inside, and what this process does about one is afterwards what it was before.

    Torch's loader would have it raise an error wherever it is, in the middle of a step, or of the loader's own end. The
    loader notices, too, when it waits for the child's samples, which is where `read` can say what happened.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@dataclass(eq=False)
class DatasetSource:
    """Any map-style torch data set of (input, target) pairs, collated by torch's default.

    Worker processes read the samples of upcoming batches ahead, so that decoding and transforms cost no time while they
    take less of it than computing (`prefetch.py`). The data set's own transforms run for training and validation alike:
    give two data sets where they should differ. They may draw from the global generators of torch, numpy and Python:
    in training these are seeded from one number of torch's generator, in validation always the same, and so the samples
    do not depend on the number of processes, nor on what was read before.
    """

    dataset: Dataset[Any]
    device: torch.device = torch.device("cpu")
    workers: int | None = None
    """Processes that read ahead. None: as many as the run says (`loader_workers`), and outside of a run none."""
    ahead: int = 512
    """Samples, about, that are read before they are asked for; they take up memory."""
    mean: Tensor | None = None
    """Subtracted from the inputs on the device, so that bytes may travel as bytes; broadcast against one batch."""
    std: Tensor | None = None
    """The inputs are divided by it; broadcast against one batch."""
    _reader: Reader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise ConfigError(
                f"{type(self.dataset).__name__} is no map-style data set; expected one with __len__ and __getitem__, "
                f"whose samples can be read in any order"
            )
        pinned = self.device.type == "cuda"
        self._reader = Reader(self.dataset, workers=self.workers or 0, ahead=self.ahead, pin_memory=pinned)

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples; the data set decides what `train` means, but for its random numbers."""
        parts = self._reader.read(_request(indices, _draw() if train else 0))
        inputs, targets = (
            [part.to(self.device, non_blocking=True) for part in side] for side in zip(*parts, strict=True)
        )
        return standardised(_joined(inputs), self.mean, self.std), _joined(targets)

    def batches(self, many: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of a validation, one after the other; all of them are known, and are read ahead."""
        requests = [_request(indices, 0) for indices in many]
        with self._reader.following(lambda: iter(requests)):
            for indices in many:
                yield self.batch(indices, train=False)

    def follow(self, upcoming: Callable[[], Iterator[tuple[int, Indices]]]) -> None:
        """Read ahead what an engine says is upcoming: the seed of torch's generator and the samples of each batch."""
        generator = torch.Generator()
        self._reader.follow(
            lambda: (_request(indices, _draw(generator.manual_seed(seed))) for seed, indices in upcoming())
        )

    def with_loader_workers(self, workers: int) -> Self:
        """The same samples, read by so many processes, unless the source has its own number or holds tensors anyway."""
        if self.workers is not None or isinstance(self.dataset, TensorDataset):
            return self
        return replace(self, workers=workers)

    def close(self) -> None:
        """End the processes; the next batch starts them again."""
        self._reader.close()

    def to(self, device: torch.device) -> Self:
        """The same samples, each batch moved to the device when it is fetched."""
        mean, std = tensors_on(device, self.mean, self.std)
        return replace(self, device=device, mean=mean, std=std)


def _draw(generator: torch.Generator | None = None) -> int:
    """The number that a batch's transforms draw from; the engine that seeds torch's generator can foretell it."""
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))


def _request(indices: Indices, seed: int) -> Request:
    return Request(seed, tuple(indices.tolist()))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
