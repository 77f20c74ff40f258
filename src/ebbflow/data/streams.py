"""`StreamDataset`: a data set that can only be iterated over, as one whose samples have numbers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from ebbflow.core.units import whole_number
from ebbflow.errors import ConfigError, DataError

__all__ = ["StreamDataset"]

_FEW = 3  # restarts in a row that each gave out one sample or none: the order of the requests is not that of the stream


def _bytes_of(value: Any) -> Iterator[bytes]:
    """The content of a sample; tensors by their numbers, since pickles of equal ones differ."""
    if isinstance(value, torch.Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield from (repr(key).encode(), *_bytes_of(value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _bytes_of(item)
    else:
        yield pickle.dumps(value)


class StreamDataset(Dataset[Any]):
    """A map-style data set over an IterableDataset, or any iterable, whose order can be restarted.

        data = StreamDataset(stream, length=1_000_000)
        sampler = ElasticSampler(data, "fixed(256)", local_batch=32, shuffle=False)

    Sample i is the i-th element of an iteration. Every process reads the stream from its beginning and passes over what
    other ranks and worker processes train on, so that samples count once for any number of them; a stream with a method
    `skip(n)`, as that of Hugging Face has, starts there instead. Resuming costs the time to read, or skip, up to the
    position. The order is the same in every epoch.

    Refused, since samples would be lost or repeated: iterators and generators, which cannot be restarted; a stream
    whose first element differs from one iteration, or from one process, to another, because its order is random or
    because it divides itself among worker processes; a stream that ends before `length`; and requests in another order
    than that of the stream (an ElasticSampler that shuffles). Only first elements are compared: a random order behind
    the same first element is not noticed.
    """

    in_order = True
    """Samplers must ask for the samples in their order."""

    def __init__(self, stream: Iterable[Any], length: int | None = None) -> None:
        """`length` is the number of samples in an epoch; by default `len(stream)`."""
        if iter(stream) is stream:
            raise ConfigError(
                f"the stream is a {type(stream).__name__}, which can be read only once, so that a stopped run could "
                f"not go on; give an object whose __iter__ begins anew, such as an IterableDataset, or write the "
                f"samples into files"
            )
        if length is None and not isinstance(stream, Sized):
            raise ConfigError(
                f"{type(stream).__name__} does not say how many samples an epoch has; give length=, at most as many as "
                f"an iteration has"
            )
        self.stream = stream
        self.length = whole_number(len(stream) if length is None else length, "length", error=DataError)  # type: ignore[arg-type]
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._served = 0
        self._restarts = 0
        self._first: str | None = None
        self._restart(0)
        self._read()  # remembers the first element
        self._restart(0)
        self._read()  # compares it
        self._iterator = None

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        """Leave the iterator behind: another process begins its own."""
        return {**self.__dict__, "_iterator": None, "_next": 0}

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        if self._iterator is None or index < self._next:
            self._check_order()
            self._restart(index)
        while self._next < index:
            self._read()
        self._served += 1
        return self._read()

    def _check_order(self) -> None:
        self._restarts = self._restarts + 1 if self._served < 2 else 0
        self._served = 0
        if self._restarts > _FEW:
            raise ConfigError(
                "samples of a stream are asked for in another order than its own, so that it is read again from the "
                "beginning for each of them; use ElasticSampler(..., shuffle=False)"
            )

    def _restart(self, index: int) -> None:
        """Begin an iteration, at the sample if the stream can skip to it."""
        skip = getattr(self.stream, "skip", None)
        start = index if callable(skip) else 0
        self._iterator = iter(skip(index) if callable(skip) and index else self.stream)
        self._next = start

    def _read(self) -> Any:
        assert self._iterator is not None
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise DataError(
                f"the stream ended after {self._next} samples, but its length was said to be {self.length}; give the "
                f"length of the shortest iteration"
            ) from None
        if self._next == 0:
            self._compare(sample)
        self._next += 1
        return sample

    def _compare(self, sample: Any) -> None:
        try:
            found = hashlib.sha256(b"".join(_bytes_of(sample))).hexdigest()
        except Exception:  # whatever cannot be pickled cannot be compared
            return
        if self._first is None:
            self._first = found
        elif found != self._first:
            raise DataError(
                f"two iterations over {type(self.stream).__name__} begin with different samples, so that a stopped run "
                f"could not go on where it was; fix its seed, and do not divide it among worker processes "
                f"(get_worker_info) or ranks: StreamDataset does that"
            )
