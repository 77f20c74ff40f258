"""Prefetching: worker processes read the samples of upcoming batches while the present batch is computed.

A *request* names the samples of one batch and a seed for their transforms. It is split into *sub-requests* of at most
32 samples, each of which one process reads at a time. Before a sub-request is read, the global generators of torch,
numpy and Python are seeded from the request's seed and the sub-request's position in it. So what a transform draws
depends neither on the number of processes nor on what was read before.

    read(request)  --- as predicted --->  take its samples from the loader, which has read them or is reading them
                   --- otherwise ------>  discard what was read, predict the upcoming requests again, start from here

The sampler of torch's DataLoader iterates over the predicted requests, and the loader takes a limited number of
sub-requests in advance (`prefetch_factor`). The prediction may be wrong: every request is compared with the one that
the loader has taken, so a wrong prediction costs time and never returns other samples.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ebbflow.engines.batches import DeviceCopy, as_pair, missing_samples, pin_batch
from ebbflow.engines.replica_step import micro_batch_seed
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.packed_samples import PackedSamples, pack_samples
from ebbflow.workloads.sources import Indices, move_all, standardise

__all__ = ["MAX_SUB_REQUEST", "DatasetSource", "Request", "SampleReader", "seeded"]

MAX_SUB_REQUEST = 32
"""Largest number of samples in a sub-request. Every result depends on it: with another value, transforms draw other
numbers from the same seed."""


@dataclass(frozen=True, slots=True)
class Request:
    """Indices of samples in the order of the batch, and the seed from which their transforms draw.

    >>> [len(sub_request.indices) for sub_request in Request(7, tuple(range(70))).split()]
    [32, 32, 6]
    """

    seed: int
    indices: tuple[int, ...]

    def split(self) -> list[Request]:
        """Return the sub-requests, each with a seed of its own."""
        return [
            Request(micro_batch_seed(self.seed, 0, start), self.indices[start : start + MAX_SUB_REQUEST])
            for start in range(0, len(self.indices), MAX_SUB_REQUEST)
        ]


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Why a sample could not be read. It can be sent between processes, which not every exception can."""

    index: int
    reason: str
    trace: str

    def error(self, dataset: Dataset[Any]) -> DataError:
        """Return the error to raise; its note is the traceback of the data set's own error."""
        error = DataError(f"sample {self.index} of {type(dataset).__name__} cannot be read: {self.reason}")
        if self.trace:
            error.add_note(self.trace)
        return error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and Python inside the `with` block; restore them afterwards."""
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


def _read_samples(dataset: Dataset[Any], sub_request: Request) -> list[Any] | ReadFailure:
    """Return the samples of a sub-request, or why the first unreadable one of them cannot be read.

    A data set that reads several at once, by `__getitems__` as torch's loader knows it, is asked for all of them.
    """
    if not (read_together := getattr(dataset, "__getitems__", None)):
        return _read_one_by_one(dataset, sub_request)
    indices = [*sub_request.indices]
    try:
        with seeded(sub_request.seed):
            samples = [*read_together(indices)]
        if len(samples) == len(indices):
            return samples
        reason, trace = f"__getitems__ returned {len(samples)} samples for {len(indices)} numbers", ""
    except Exception as error:  # whatever the data set's own code raises
        found = _read_one_by_one(dataset, sub_request)  # to name the sample that cannot be read
        if isinstance(found, ReadFailure):
            return found
        reason, trace = f"__getitems__ raised {type(error).__name__}: {error}", traceback.format_exc()
    return ReadFailure(indices[0], f"{reason}; it was asked for {len(indices)} from this one on", trace)


def _read_one_by_one(dataset: Dataset[Any], sub_request: Request) -> list[Any] | ReadFailure:
    samples = []
    with seeded(sub_request.seed):
        for index in sub_request.indices:
            try:
                samples.append(dataset[index])
            except DataError as error:  # of our own readers: it says what to do
                return ReadFailure(index, str(error), traceback.format_exc())
            except Exception as error:  # whatever the data set's own code raises
                reason = f"{type(error).__name__}: {error}; repair it, or remove it from the data set"
                return ReadFailure(index, reason, traceback.format_exc())
    return samples


def _collate_any(samples: list[Any], dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> Any:
    """Return the samples as a DataLoader would."""
    given = len(samples)  # before: a collation may take bad ones out of the list itself
    try:
        batch = collate_fn(samples)
    except Exception as error:  # whatever a user's collation raises
        raise ConfigError(
            f"samples of {type(dataset).__name__} cannot be collated: {type(error).__name__}: {error}; give a "
            f"DataLoader with a collate_fn that makes a batch of them"
        ) from error
    if (left := missing_samples(batch, given)) is not None:
        raise ConfigError(
            f"the collate_fn for {type(dataset).__name__} was given {given} samples and returned a batch of {left}, "
            f"but every sample counts once per epoch and in the mean of its step; leave bad samples out of the data "
            f"set instead (torch.utils.data.Subset). If the batch has all {given}, return something with one entry for "
            f"each in it, too, such as their lengths"
        )
    return batch


def _collate(samples: list[Any], dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Return (input, target) samples as one batch, made by torch's default collation."""
    try:
        pair = default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"samples of {type(dataset).__name__} cannot be collated: {error}; expected (input, target) pairs of equal "
            f"shapes"
        ) from error
    return _checked_pair(pair, dataset)


def _checked_pair(pair: Any, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Return a batch if it is a pair of tensors."""
    name = type(dataset).__name__
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(side, Tensor) for side in pair)):
        found = [type(side).__name__ for side in pair] if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise ConfigError(
            f"{name} gives {found}; expected (input, target), each a tensor or a number. For other batches give a "
            f"collate_fn= (DatasetSource and DataLoader take one), such as torch.utils.data.default_collate"
        )
    return pair[0], pair[1]


def _pack(samples: list[Any], dataset: Dataset[Any]) -> PackedSamples:
    """Return samples as they are sent to the training process, which collates them with those of other sub-requests."""
    try:
        return pack_samples(samples)
    except Exception as error:  # whatever the pickling of a user's classes raises
        raise _unsendable(dataset, error) from error


def _unpack(packed: PackedSamples, dataset: Dataset[Any]) -> list[Any]:
    try:
        return packed.unpack()
    except Exception as error:  # the same
        raise _unsendable(dataset, error) from error


def _unsendable(dataset: Dataset[Any], error: Exception) -> ConfigError:
    return ConfigError(
        f"samples of {type(dataset).__name__} cannot be sent by the process that reads them: {type(error).__name__}: "
        f"{error}; expected what can be pickled. With loader_workers=0 the training process reads them itself"
    )


Prediction = Callable[[], Iterator[Request]]
"""Returns an iterator over the requests that are expected, beginning with the present one. It may be wrong, and it may
end early."""

ReadResult = tuple[Tensor, Tensor] | PackedSamples | ReadFailure | ConfigError

_LOG = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


class _SubRequestDataset(Dataset[ReadResult]):
    """The data set as the loader's processes see it: its items are the batches of sub-requests."""

    def __init__(self, dataset: Dataset[Any], *, collates: bool) -> None:
        self.dataset = dataset
        self.collates = collates

    def __getitem__(self, sub_request: Request) -> ReadResult:
        samples = _read_samples(self.dataset, sub_request)
        if isinstance(samples, ReadFailure):
            return samples
        try:
            return _collate(samples, self.dataset) if self.collates else _pack(samples, self.dataset)
        except ConfigError as error:
            return ConfigError(str(error))  # without its cause, which perhaps cannot be sent between processes


class _PredictionSampler(Sampler[Request]):
    """Gives the loader the sub-requests of the predicted requests, and notes which requests the loader has taken."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())
        self.taken: deque[Request] = deque()
        """Requests of which the loader has taken a sub-request, and which `SampleReader` has not returned yet."""

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.taken.append(request)
            yield from request.split()


class SampleReader:
    """Reads requests of a data set with `loader_workers` processes, or in this process if there are none.

    Guarantees: `read` returns the samples of its request, whatever was predicted. They are the same for every number of
    processes, and so is the state of all random generators of this process afterwards. If a process dies, `read` raises
    an error within seconds. `close` ends all processes, and they also end with this process, however it ends.

    The processes are started by the first `read`. They are forked, so the data set need not be picklable. A process
    that may have no children (a daemon) reads everything itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        loader_workers: int,
        prefetch: int,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        """`prefetch` is the number of samples to read in advance; requests below 32 samples make it fewer.
        `pin_memory`: batches are in pinned memory, of which a GPU copies while it computes.

        `collate_fn` makes a batch of the samples of a request, in this process; by default they are pairs of tensors,
        and the processes collate them. `worker_init_fn` is called in each process with its number, as DataLoader
        does it.
        """
        for name, value, least in (("loader_workers", loader_workers, 0), ("prefetch", prefetch, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}; expected {least} or more")
        self.dataset = dataset
        self.loader_workers = loader_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.collate_fn = collate_fn
        self.worker_init_fn = worker_init_fn
        self._sampler = _PredictionSampler()
        self._loader: DataLoader[ReadResult] | None = None
        self._results: Iterator[ReadResult] = iter(())
        self._predictions: list[Prediction] = []

    @contextmanager
    def prefetching(self, prediction: Prediction) -> Iterator[None]:
        """Prefetch the requests of this prediction inside the `with` block."""
        self._predictions.append(prediction)
        try:
            yield
        finally:
            self._predictions.remove(prediction)

    def prefetch_from(self, prediction: Prediction) -> None:
        """Prefetch the requests of this prediction from now on."""
        self._predictions[:] = [prediction]

    def start(self) -> None:
        """Start the processes now, with nothing to read yet."""
        if self.loader_workers and not multiprocessing.current_process().daemon:
            self._restart(iter(()))

    def read(self, request: Request) -> list[Any]:
        """Return the samples of the request as batches, which are to be concatenated; with `collate_fn`, one batch."""
        if self.loader_workers == 0 or multiprocessing.current_process().daemon:
            return [self._pinned(self._read_in_this_process(request))]
        batches = []
        for result in self._read_with_loader(request):
            if isinstance(result, ReadFailure):
                raise result.error(self.dataset)
            if isinstance(result, ConfigError):
                raise result
            batches.append(result)
        if self.collate_fn is None:
            return batches  # pinned by the loader
        packed = [part for part in batches if isinstance(part, PackedSamples)]
        samples = [sample for part in packed for sample in _unpack(part, self.dataset)]
        return [self._pinned(_collate_any(samples, self.dataset, self.collate_fn))]

    def _pinned(self, batch: Any) -> Any:
        return pin_batch(batch) if self.pin_memory else batch

    def _read_with_loader(self, request: Request) -> list[ReadResult]:
        try:
            taken = self._sampler.taken
            if not taken or taken[0] != request:
                self._restart(self._predict_from(request))
            taken.popleft()
            return [next(self._results) for _ in request.split()]
        except (RuntimeError, OSError, EOFError) as error:  # a process died before or while it sent its samples
            failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except BaseException:  # interrupted between two sub-requests: the remaining ones would be taken for another's
            self.close()
            raise
        self.close()  # here, where the error no longer refers to the loader: so all processes end now
        raise DataError(
            f"prefetching samples of {type(self.dataset).__name__} failed: {failure}. If a process was killed for lack "
            f"of memory, or of shared memory in /dev/shm, use fewer processes (loader_workers)"
        )

    def _read_in_this_process(self, request: Request) -> Any:
        samples = []
        for sub_request in request.split():
            read = _read_samples(self.dataset, sub_request)
            if isinstance(read, ReadFailure):
                raise read.error(self.dataset)
            samples += read
        if self.collate_fn is not None:
            return _collate_any(samples, self.dataset, self.collate_fn)
        return _collate(samples, self.dataset)

    def _predict_from(self, request: Request) -> Iterator[Request]:
        """Return the request, followed by the predicted ones if the prediction begins with this request."""
        predicted = self._predictions[-1]() if self._predictions else iter(())
        later = predicted if next(predicted, None) == request else ()
        return itertools.chain([request], later)

    def _restart(self, requests: Iterator[Request]) -> None:
        """Read these requests from now on; the loader waits for what its processes are reading, and discards it."""
        if self._sampler.taken:
            _LOG.debug("%d prefetched requests are discarded", len(self._sampler.taken))
        self._sampler.taken.clear()
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = self._make_loader()
        with _default_sigchld():
            self._results = iter(self._loader)

    def _make_loader(self) -> DataLoader[ReadResult]:
        return DataLoader(
            _SubRequestDataset(self.dataset, collates=self.collate_fn is None),
            sampler=self._sampler,
            batch_size=None,
            num_workers=self.loader_workers,
            prefetch_factor=max(2, -(-self.prefetch // (MAX_SUB_REQUEST * self.loader_workers))),
            persistent_workers=True,
            pin_memory=self.pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=functools.partial(_init_loader_worker, os.getpid(), self.worker_init_fn),
            collate_fn=_identity,
            generator=torch.Generator(),  # the loader draws a number at each start, but not from the run's generator
        )

    def close(self) -> None:
        """End the processes; the next `read` starts them again."""
        self._sampler.taken.clear()
        self._sampler.requests = iter(())
        with _default_sigchld():
            self._results = iter(())
            self._loader = None  # its last reference: torch ends the processes and waits for them


def _identity(result: Any) -> Any:
    return result


def _init_loader_worker(parent: int, user_init: Callable[[int], None] | None, number: int) -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the training process decides, and may need samples."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # at once; torch's watchdog takes seconds
    if os.getppid() != parent:
        os._exit(1)  # the parent died while this process started; torch's watchdog would never notice
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if user_init is not None:
        user_init(number)


@contextmanager
def _default_sigchld() -> Iterator[None]:
    """Handle SIGCHLD by default inside the `with` block, and as before afterwards.

    Torch's loader installs a handler that raises an error wherever the training process is when a loader process dies,
    also in the middle of a step or while the loader is closed. The loader also notices a death while it waits for
    samples, and there `read` can report it.
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
    """A source for any map-style data set: of (input, target) pairs that torch's default collation makes batches of, or
    of whatever a `collate_fn` makes batches of.

    Worker processes read the samples of upcoming batches, so that decoding and transforms cost no time as long as they
    are faster than computing. A data set with `__getitems__`, such as one of Hugging Face, is asked for up to 32 at
    once. The data set's own transforms are applied in training and validation alike: use two data sets where they
    should differ. Transforms may draw from the global generators of torch, numpy and Python. These are seeded, in
    training from one number of torch's generator and in validation always equally, so that samples depend neither on
    the number of processes nor on what was read before.
    """

    dataset: Dataset[Any]
    device: torch.device = torch.device("cpu")
    loader_workers: int | None = None
    """Processes that prefetch. None means the `loader_workers` of the run, and no processes outside of a run."""
    prefetch: int = 512
    """Approximate number of samples to read in advance; they are held in memory."""
    mean: Tensor | None = None
    """Subtracted from the inputs on the device, so that bytes can be sent as bytes; broadcast against one batch."""
    std: Tensor | None = None
    """The inputs are divided by it on the device; broadcast against one batch."""
    pairs: bool = True
    """Whether samples must be (input, target) pairs; otherwise a batch is what `collate_fn` makes of them."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples, as that of a DataLoader; by default torch's default collation.

    Inputs and targets may be any nesting of containers with tensors, such as a list with the boxes of each sample.
    """
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each process with its number, as that of a DataLoader."""
    _reader: SampleReader = field(init=False, repr=False)
    _copy: DeviceCopy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise ConfigError(
                f"{type(self.dataset).__name__} is no map-style data set; expected one with __len__ and __getitem__, "
                f"whose samples can be read in any order; a stream can be trained on in its own order by an "
                f"ElasticSampler over a StreamDataset"
            )
        self._copy = DeviceCopy(self.device)
        self._reader = SampleReader(
            self.dataset,
            loader_workers=self.loader_workers or 0,
            prefetch=self.prefetch,
            pin_memory=self.device.type == "cuda",
            collate_fn=self.collate_fn or (None if self.pairs else default_collate),
            worker_init_fn=self.worker_init_fn,
        )

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def batch(self, indices: Indices, *, train: bool) -> Any:
        """Return the inputs and targets of the samples, or what `collate_fn` makes of them.

        `train` only decides how transforms are seeded.
        """
        batches = self._copy.move(self._reader.read(_make_request(indices, _draw_seed() if train else 0)))
        if self.collate_fn is not None or not self.pairs:
            inputs, targets = as_pair(batches[0], named=self.pairs)
        else:
            inputs, targets = (_concatenate(side) for side in zip(*batches, strict=True))
        if self.mean is not None or self.std is not None:
            inputs = standardise(inputs, self.mean, self.std)
        return inputs if targets is None else (inputs, targets)

    @classmethod
    def from_loader(cls, loader: DataLoader[Any], device: torch.device, *, pairs: bool = True) -> Self:
        """A source with the data set, `collate_fn`, `num_workers` and `worker_init_fn` of a DataLoader.

        What would change which samples are read, or how, and cannot be followed is refused.
        """
        if isinstance(loader.dataset, IterableDataset):
            return cls(loader.dataset, device)  # which refuses it
        if loader.batch_sampler is None:
            raise ConfigError(
                "the DataLoader has batch_size=None, so that its items are no batches; give it a batch_size, or give "
                "the data set, of which every item is one sample"
            )
        sampler = loader.sampler
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
        if loader.batch_size is None or not (shuffles or isinstance(sampler, SequentialSampler)):
            kind = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
            raise ConfigError(
                f"the DataLoader has a sampler of its own ({kind}), but here every sample counts once per epoch, in an "
                f"order that follows from the seed; give the data set, or a DataLoader with batch_size and shuffle only"
            )
        if loader.drop_last:
            warnings.warn(
                "drop_last=True of the DataLoader has no effect here: every sample counts once per epoch, so that the "
                "last step of an epoch takes the samples that are left; leave it out",
                stacklevel=2,
            )
        own = loader.collate_fn if loader.collate_fn is not default_collate else None
        return cls(
            loader.dataset, device, loader_workers=loader.num_workers or None, pairs=pairs, collate_fn=own,
            worker_init_fn=loader.worker_init_fn,
        )  # fmt: skip

    def validation_batches(self, batches: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over batches of validation samples; all of them are known, so they are prefetched."""
        requests = [_make_request(indices, 0) for indices in batches]
        with self._reader.prefetching(lambda: iter(requests)):
            for indices in batches:
                yield self.batch(indices, train=False)

    def prefetch_from(self, upcoming: Callable[[], Iterator[tuple[int, Indices]]]) -> None:
        """Prefetch the training batches that `upcoming()` predicts: (seed of torch's generator before it, indices).

        `upcoming` is called whenever prefetching restarts, and its first batch is the present one. A wrong prediction
        costs time; it changes no batch.
        """
        generator = torch.Generator()
        self._reader.prefetch_from(
            lambda: (_make_request(indices, _draw_seed(generator.manual_seed(seed))) for seed, indices in upcoming())
        )

    def with_loader_workers(self, loader_workers: int) -> Self:
        """Return a source of the same samples with this number of processes.

        A source that has a number of its own, or whose data set holds tensors, is returned as it is.
        """
        if self.loader_workers is not None or isinstance(self.dataset, TensorDataset):
            return self
        return replace(self, loader_workers=loader_workers)

    def start(self) -> None:
        """Start the processes now; otherwise the first batch does."""
        self._reader.start()

    def close(self) -> None:
        """End the processes; the next batch starts them again."""
        self._reader.close()

    def to(self, device: torch.device) -> Self:
        """Return a source of the same samples that moves each batch to the device."""
        mean, std = move_all(device, self.mean, self.std)
        return replace(self, device=device, mean=mean, std=std)


def _draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw the seed of a batch's transforms; it is known in advance if the seed of torch's generator is."""
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))


def _make_request(indices: Indices, seed: int) -> Request:
    return Request(seed, tuple(indices.tolist()))


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
