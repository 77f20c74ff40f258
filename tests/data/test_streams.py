"""Streams whose order can be restarted have samples with numbers; others are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ebbflow.data.sampler import ElasticSampler
from ebbflow.data.streams import StreamDataset
from ebbflow.errors import ConfigError, DataError


class Counting(IterableDataset[torch.Tensor]):
    """The numbers from 0 on, and how many were read."""

    def __init__(self, count: int = 50) -> None:
        self.count = count
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.count):
            self.read += 1
            yield torch.tensor(i)


class Skipping(Counting):
    """One that starts anywhere, as the streams of Hugging Face do."""

    def __init__(self, count: int = 50, start: int = 0) -> None:
        super().__init__(count)
        self.start = start

    def skip(self, n: int) -> Skipping:
        return Skipping(self.count, self.start + n)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(i) for i in range(self.start, self.count))


class Shuffled(Counting):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(random.random()) for _ in range(self.count)])


class Divided(Counting):
    """One that gives each worker process other elements, as the documentation of torch advises."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return iter([torch.tensor(i) for i in range(first, self.count, step)])


@pytest.mark.parametrize("stream", [Counting(), Skipping(), range(50)], ids=["counting", "skipping", "range"])
def test_any_ranks_and_resumes_read_every_sample_once(stream: Any) -> None:
    seen: list[int] = []
    state = None
    for world, stop in ((1, 3), (3, 7), (2, 100)):
        samplers = [
            ElasticSampler(
                StreamDataset(stream, 50), "fixed(6)", local_batch=2, shuffle=False, rank=rank, world_size=world
            )
            for rank in range(world)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            for batch in DataLoader(StreamDataset(stream, 50), batch_sampler=sampler):
                micro_batch = sampler.consume()
                seen += [int(i) for i in batch[: micro_batch.size]]
                if micro_batch.last and micro_batch.step + 1 == stop:
                    break
        state = samplers[0].state_dict()
    assert sorted(seen) == list(range(50))
    assert state is not None and state["epoch"] == 1


@pytest.mark.process
def test_worker_processes_read_the_same_stream() -> None:
    data = StreamDataset(Counting(), 50)
    sampler = ElasticSampler(data, "fixed(6)", local_batch=2, shuffle=False)
    seen = [int(i) for batch in DataLoader(data, batch_sampler=sampler, num_workers=2) for i in batch]
    assert seen == list(range(50))


@pytest.mark.process
def test_a_stream_that_divides_itself_among_processes_is_refused() -> None:
    data = StreamDataset(Divided(), 50)
    sampler = ElasticSampler(data, "fixed(6)", local_batch=2, shuffle=False)
    with pytest.raises(DataError, match="do not divide it among worker processes"):
        list(DataLoader(data, batch_sampler=sampler, num_workers=2))


def test_resuming_skips_where_the_stream_can() -> None:
    reading = Counting(10_000)
    data = StreamDataset(reading, 10_000)
    before = reading.read
    assert data[9_000].item() == 9_000
    assert reading.read - before == 9_001
    assert StreamDataset(Skipping(1 << 40), 1 << 40)[1 << 39].item() == 1 << 39  # reading would never end


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: StreamDataset(i for i in range(3)), ConfigError, "is a generator, which can be read only once"),
        (lambda: StreamDataset(iter([1, 2])), ConfigError, "is a list_iterator, which can be read only once"),
        (lambda: StreamDataset(Counting()), ConfigError, "does not say how many samples"),
        (lambda: StreamDataset(Shuffled(), 50), DataError, "begin with different samples"),
        (lambda: StreamDataset([], 1), DataError, "ended after 0 samples"),
        (lambda: StreamDataset(Counting(5), 9)[7], DataError, "ended after 5 samples, but its length was said to be 9"),
        (lambda: ElasticSampler(StreamDataset(range(9)), 2, local_batch=2), ConfigError, "give shuffle=False"),
        (lambda: ElasticSampler(Counting(), 2, local_batch=2), ConfigError, "StreamDataset makes one"),
    ],
)
def test_what_cannot_be_restarted_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_shuffled_order_is_refused_after_a_few_samples() -> None:
    data = StreamDataset(range(1000))
    with pytest.raises(ConfigError, match="asked for in another order"):
        [data[i] for i in range(999, 0, -1)]
