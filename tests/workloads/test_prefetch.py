"""Prefetching: whatever was predicted, a request gets its own samples, the same from any number of processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from drawing_examples import examples
from ebbflow.engines.batches import DeviceCopy, missing_samples
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads import DatasetSource
from ebbflow.workloads.prefetch import MAX_SUB_REQUEST, Request, SampleReader, seeded
from workloads.drawing import SAMPLES, Broken, Drawing, Ragged, Watched

Pair = tuple[torch.Tensor, torch.Tensor]


def joined(parts: list[Pair]) -> Pair:
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def equal(one: Pair, other: Pair) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


EARLIER: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _as_if_alone() -> Iterator[None]:
    """Other tests may have left processes running, and torch's handler of SIGCHLD installed."""
    EARLIER.clear()
    EARLIER.update(psutil.Process().children())
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def children() -> list[psutil.Process]:
    """Return the processes that this test has started and that are alive."""
    found = [child for child in psutil.Process().children() if child not in EARLIER]
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def read_all(reader: SampleReader, requests: list[Request]) -> None:
    for one in requests:
        reader.read(one)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def request(indices: list[int], seed: int = 1) -> Request:
    return Request(seed, tuple(indices))


# ---- the same samples in every case ----


REQUESTS = st.lists(
    st.builds(
        Request,
        st.integers(0, 3),
        st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=3 * MAX_SUB_REQUEST).map(tuple),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.process
def test_any_history_of_right_and_wrong_predictions_gives_each_request_its_own_samples():
    # All examples share these, with whatever state earlier examples left in them.
    readers = {workers: SampleReader(Drawing(), loader_workers=workers, prefetch=100) for workers in (0, 1, 2)}

    @given(asked=REQUESTS, others=REQUESTS, wrong=st.sets(st.integers(0, 5)), workers=st.lists(st.sampled_from([1, 2])))
    @examples(40)
    def check(asked: list[Request], others: list[Request], wrong: set[int], workers: list[int]) -> None:
        # The prediction: the real requests, with some of them replaced by others.
        predicted = [others[i % len(others)] if i in wrong else one for i, one in enumerate(asked)]
        now = 0
        for reader in readers.values():
            reader.prefetch_from(lambda: iter(predicted[now:]))
        for now, one in enumerate(asked):
            used = readers[workers[now] if now < len(workers) else 2]  # as a run that continues with other processes
            assert equal(joined(used.read(one)), joined(readers[0].read(one)))

    check()
    for reader in readers.values():
        reader.close()


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_what_transforms_draw_depends_on_the_seed_and_the_position_in_the_batch_only(workers):
    source = DatasetSource(Drawing(), loader_workers=workers)
    indices = np.arange(40)
    torch.manual_seed(3)
    first, state = source.batch(indices, train=True)[0], torch.get_rng_state()
    random.random(), np.random.rand(), source.batch(indices[:5], train=True)
    torch.manual_seed(3)
    assert torch.equal(source.batch(indices, train=True)[0], first)
    assert torch.equal(torch.get_rng_state(), state)  # dropout continues from the same state
    assert not torch.equal(source.batch(indices, train=True)[0], first)
    noise = first[:, 1:4]
    assert len(noise.unique()) == noise.numel()  # samples and generators are independent of each other
    source.close()


@pytest.mark.process
def test_batches_are_the_same_for_any_number_of_processes():
    made = []
    for workers in (0, 1, 2):
        source = DatasetSource(Drawing(), loader_workers=workers, prefetch=1)
        torch.manual_seed(7)
        batches = [source.batch(np.arange(start, start + 33), train=True) for start in (0, 50, 10)]
        made.append((batches, torch.get_rng_state()))
        source.close()
    for batches, state in made[1:]:
        assert all(equal(one, other) for one, other in zip(batches, made[0][0], strict=True))
        assert torch.equal(state, made[0][1])


def test_the_generators_of_the_caller_do_not_change():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with seeded(5):
        torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.process
def test_a_validation_draws_the_same_numbers_every_time_and_none_from_the_run_s_generator():
    source = DatasetSource(Drawing(), loader_workers=1)
    every = torch.split(torch.arange(SAMPLES), 60)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (list(source.validation_batches(every)) for _ in range(2))
    assert [len(targets) for _, targets in first] == [60, 60, 60, 23]
    assert all(equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    source.close()


# ---- prefetching ----


@pytest.mark.process
def test_predicted_samples_are_read_by_other_processes_before_they_are_requested(tmp_path):
    data = Watched(tmp_path)
    reader = SampleReader(data, loader_workers=2, prefetch=64)
    requests = [request([*range(start, start + 10)]) for start in range(0, 200, 10)]
    asked = []

    def upcoming() -> Iterator[Request]:
        asked.append(1)
        return iter(requests)

    reader.prefetch_from(upcoming)
    reader.read(requests[0])
    wait_until(lambda: len(data.read()) >= 50)
    # Two processes hold two sub-requests each, here of 10 samples, besides the one that was returned.
    assert data.read() == set(range(50))
    assert os.getpid() not in data.readers()
    for one in requests[1:]:
        reader.read(one)
    assert data.read() == set(range(200))
    assert len(asked) == 1  # every request was as predicted
    reader.close()


@pytest.mark.process
def test_requests_that_were_not_predicted_are_read_and_nothing_else_is(tmp_path):
    data = Watched(tmp_path)
    reader = SampleReader(data, loader_workers=2, prefetch=64)
    reader.prefetch_from(lambda: iter([request([1]), request([2])]))  # always wrong
    for indices in ([5, 6], [7], [5, 6]):
        assert joined(reader.read(request(indices)))[0][:, 0].tolist() == indices
    reader.close()
    assert data.read() == {5, 6, 7}


def test_tensors_in_memory_are_not_read_by_other_processes_unless_the_user_says_so():
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    assert DatasetSource(data).with_loader_workers(3).loader_workers is None
    assert DatasetSource(data, loader_workers=1).with_loader_workers(3).loader_workers == 1
    assert DatasetSource(Drawing()).with_loader_workers(3).loader_workers == 3
    assert DatasetSource(Drawing(), loader_workers=0).with_loader_workers(3).loader_workers == 0


@pytest.mark.parametrize("wrong", [{"loader_workers": -1}, {"prefetch": 0}])
def test_an_impossible_number_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
        DatasetSource(Drawing(), **wrong)


# ---- failures ----


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_sample_that_cannot_be_read(workers):
    source = DatasetSource(Broken(), loader_workers=workers)
    with pytest.raises(
        DataError, match=r"sample 70 of Broken cannot be read: OSError: cannot identify .*cat\.jpg"
    ) as e:
        source.batch(np.arange(60, 160), train=True)
    assert "drawing.py" in e.value.__notes__[0]  # where it happened
    assert len(source.batch(np.arange(60), train=True)[1]) == 60
    source.close()


class Together(Drawing):
    """A data set that reads several samples at once, as those of Hugging Face do; `asked` are the numbers."""

    def __init__(self, broken: str = "") -> None:
        self.asked: list[list[int]] = []
        self.broken = broken

    def __getitem__(self, index):
        if self.broken == "one" and index == 70:
            raise OSError("cannot identify it")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        self.asked.append(indices)
        samples = [self[index] for index in indices]
        if self.broken == "all":
            raise KeyError("a column")
        return samples[1:] if self.broken == "short" else samples


def test_a_data_set_that_reads_several_samples_at_once_is_asked_for_them_together():
    together, indices = Together(), np.arange(40, 110)
    found = DatasetSource(together, loader_workers=0).batch(indices, train=False)
    assert together.asked == [[*range(40, 72)], [*range(72, 104)], [*range(104, 110)]]
    assert equal(found, DatasetSource(Drawing(), loader_workers=0).batch(indices, train=False))


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("one", "sample 70 of Together cannot be read: OSError: cannot identify it; repair it"),
        ("all", "sample 60 of Together cannot be read: __getitems__ raised KeyError: 'a column'; it was asked for 32"),
        ("short", "sample 60 of Together cannot be read: __getitems__ returned 31 samples for 32 numbers"),
    ],
)
def test_samples_that_cannot_be_read_together_are_an_error_that_says_which(broken, expected):
    with pytest.raises(DataError, match=re.escape(expected)):
        DatasetSource(Together(broken), loader_workers=0).batch(np.arange(60, 100), train=True)


@pytest.mark.process
def test_a_broken_sample_that_was_only_prefetched_is_no_error():
    reader = SampleReader(Broken(), loader_workers=1, prefetch=64)
    reader.prefetch_from(lambda: iter([request([1]), request([70]), request([2])]))
    reader.read(request([1]))
    assert joined(reader.read(request([2])))[0][0, 0] == 2
    reader.close()


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("indices", [[69, 70], [*range(39, 71)]])
def test_samples_of_different_shapes_are_refused(workers, indices):
    source = DatasetSource(Ragged(), loader_workers=workers)
    with pytest.raises(ConfigError, match=r"samples of Ragged cannot be collated: .* equal shapes"):
        source.batch(np.array(indices), train=True)
    source.close()


class Slow(Drawing):
    """Samples after the first ten take longer than any test waits."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(600 if index > 9 else 0)
        return super().__getitem__(index)


@pytest.mark.process
@pytest.mark.parametrize("slow", [False, True], ids=["with samples ready", "in the middle of a sample"])
def test_a_killed_process_is_an_error_and_no_hang_and_reading_can_continue(slow, tmp_path):
    data = Slow() if slow else Watched(tmp_path)
    reader = SampleReader(data, loader_workers=2, prefetch=64)
    upcoming = [request([i]) for i in range(100)]
    handler = signal.getsignal(signal.SIGCHLD)
    reader.prefetch_from(lambda: iter(upcoming))
    read_all(reader, upcoming[:10])
    assert signal.getsignal(signal.SIGCHLD) == handler
    if isinstance(data, Watched):
        wait_until(lambda: len(data.read()) == 14)  # two processes with two samples each
        time.sleep(0.2)  # until their samples are sent
    children()[1].kill()  # the other one is alive, and must end, too
    with pytest.raises(DataError, match=r"prefetching samples of \w+ failed: .*loader_workers") as failed:
        read_all(reader, upcoming[10:])  # some samples may have arrived
    assert children() == [], failed.value
    reader.prefetch_from(lambda: iter(()))
    assert joined(reader.read(upcoming[3]))[0][0, 0] == 3
    reader.close()


@pytest.mark.process
def test_a_handler_of_sigchld_is_not_called_while_a_reader_is_closed():
    """A DataLoader of the user installs torch's handler, which would raise an error in `close`."""
    signals = []
    reader = SampleReader(Drawing(), loader_workers=2, prefetch=64)
    read_all(reader, [request([1])])
    signal.signal(signal.SIGCHLD, lambda number, frame: signals.append(number))
    children()[1].kill()
    wait_until(lambda: bool(signals))
    signals.clear()
    reader.close()  # the other process ends
    assert (children(), signals) == ([], [])


@pytest.mark.process
def test_no_process_is_left_when_a_source_is_closed_or_deleted():
    source = DatasetSource(Drawing(), loader_workers=2)
    source.batch(np.arange(5), train=True)
    assert len(children()) == 2
    source.close()
    assert children() == []
    source.batch(np.arange(5), train=True)
    assert len(children()) == 2
    del source
    gc.collect()
    assert children() == []


class Interrupting(Drawing):
    """Simulates Ctrl-C: the process that reads interrupts its parent."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)
        return super().__getitem__(index)


@pytest.mark.process
def test_after_an_interrupt_between_two_sub_requests_the_next_request_gets_its_own_samples():
    reader = SampleReader(Interrupting(), loader_workers=1, prefetch=64)
    with pytest.raises(KeyboardInterrupt):
        reader.read(request([*range(64)]))
    assert children() == []
    assert joined(reader.read(request([1, 2])))[0][:, 0].tolist() == [1, 2]
    reader.close()


def _read_as_a_daemon(results) -> None:
    results.put(joined(SampleReader(Drawing(), loader_workers=2, prefetch=64).read(request([3, 4])))[0][:, 0].tolist())


@pytest.mark.process
def test_a_process_that_may_have_no_children_reads_in_itself():
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_read_as_a_daemon, args=(results,), daemon=True)
    process.start()
    process.join(timeout=150)
    assert process.exitcode == 0
    assert results.get() == [3, 4]


class Named(Drawing):
    """Samples by name."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": super().__getitem__(index)[0]}


def test_batches_that_are_no_pairs_are_refused_with_what_takes_them():
    with pytest.raises(
        ConfigError, match=r"Named gives dict; expected \(input, target\).* give a collate_fn= .*default_c"
    ):
        DatasetSource(Named()).batch(np.arange(2), train=False)
    batch = DatasetSource(Named(), collate_fn=default_collate).batch(np.arange(2), train=False)
    assert {name: tensor.shape for name, tensor in batch.items()} == {"x": (2, 5)}


def test_a_loader_without_batches_is_refused_as_such():
    loader = DataLoader(Drawing(), batch_size=None)
    with pytest.raises(ConfigError, match=r"has batch_size=None, .* or give the data set"):
        DatasetSource.from_loader(loader, torch.device("cpu"))


# Samples on their way from the processes that read them --------------------------------------------------------------


class Parts(Drawing):
    """Samples of many tensors."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        parts = {name: torch.tensor(float(number)) for number, name in enumerate("abcdef")}
        return {**parts, "trained": torch.ones(2, requires_grad=True)} if index < 2 else parts  # which torch sends


@pytest.mark.process
def test_samples_of_many_tensors_do_not_need_a_file_descriptor_for_each_of_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 150, hard))
    try:
        source = DatasetSource(Parts(), loader_workers=1, collate_fn=default_collate)
        batch = source.batch(np.arange(2, 66), train=False)  # 64 samples of six tensors
        assert [float(batch[name].mean()) for name in "abcdef"] == [0, 1, 2, 3, 4, 5]
        assert source.batch(np.arange(2), train=False)["trained"].sum() == 4
        source.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Unpicklable(Drawing):
    def __getitem__(self, index: int) -> Callable[[], int]:  # type: ignore[override]
        return lambda: index


def numbers_of(samples: list[Callable[[], int]]) -> torch.Tensor:
    return torch.tensor([sample() for sample in samples])


@pytest.mark.process
def test_samples_that_cannot_be_pickled_are_an_error_and_no_hang():
    reader = SampleReader(Unpicklable(), loader_workers=1, prefetch=32, collate_fn=numbers_of)
    with pytest.raises(ConfigError, match=r"samples of Unpicklable cannot be sent .*pickle.* loader_workers=0"):
        reader.read(Request(0, (3, 4)))
    reader.close()
    here = SampleReader(Unpicklable(), loader_workers=0, prefetch=32, collate_fn=numbers_of)
    assert here.read(Request(0, (3, 4)))[0].tolist() == [3, 4]


# Pinned memory and the copy to a device -------------------------------------------------------------------------------


@dataclass
class OwnBatch:
    """A batch as a `collate_fn` of the user's own may make it."""

    numbers: list[float]
    pinned: bool = False

    def pin_memory(self) -> OwnBatch:
        return replace(self, pinned=True)


def own_batch(samples: list[Pair]) -> tuple[OwnBatch, dict[str, list[OwnBatch]], int]:
    numbers = [float(x.sum()) for x, _ in samples]
    return OwnBatch(numbers), {"each": [OwnBatch([number]) for number in numbers]}, len(samples)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # there is no GPU
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_what_the_users_collation_makes_is_pinned_also_after_a_wrong_prediction(workers: int) -> None:
    data = TensorDataset(torch.arange(200.0), torch.zeros(200))
    reader = SampleReader(data, loader_workers=workers, prefetch=64, pin_memory=True, collate_fn=own_batch)
    asked = [Request(0, tuple(range(first, first + 40))) for first in (0, 40, 120, 160, 80)]  # predicted: 0, 40, 80
    reader.prefetch_from(lambda: iter(Request(0, tuple(range(first, first + 40))) for first in (0, 40, 80, 120)))
    for one in asked:
        ((whole, parts, count),) = reader.read(one)
        assert whole == OwnBatch([float(index) for index in one.indices], pinned=True)
        assert parts == {"each": [OwnBatch([float(index)], pinned=True) for index in one.indices]} and count == 40
    reader.close()


def test_nothing_is_pinned_for_a_cpu() -> None:
    source = DatasetSource(TensorDataset(torch.arange(4.0), torch.zeros(4)), collate_fn=own_batch)
    whole, _, _ = source.batch(np.arange(4), train=True)
    assert whole == OwnBatch([0.0, 1.0, 2.0, 3.0])


def test_copies_are_made_on_a_stream_of_their_own_for_which_the_current_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if name == "current" else "copies"

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            done.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            done.append("back")

    class Moved:
        """An object that moves its tensors itself, on the current stream."""

        def to(self, device: Any) -> Moved:
            done.append("moved")
            return self

    def move(tensor: torch.Tensor, *_: Any, non_blocking: bool = False) -> torch.Tensor:
        done.append(f"copied {tensor.item():g}" if non_blocking else "waited")
        return tensor

    current = Stream("current")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: done.append(f"used on {stream.name}"))
    copy = DeviceCopy(torch.device("cuda"))
    batch = copy._copy_aside([torch.tensor(1.0), {"x": torch.tensor(2.0)}, Moved(), 3])
    expected = ["on copies", "copied 1", "used on current", "copied 2", "used on current", "back"]
    assert done == [*expected, "current waits for copies"]
    done.clear()
    copy.move(batch[2:])
    assert done == ["on copies", "back", "current waits for copies", "moved"]


class SomeBad(Dataset[Any]):
    """Images with labels; every fourth sample is bad."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return (torch.full((3, 8, 8), float(index)), index) if index % 4 else None


def without_bad(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def without_bad_in_place(samples: list[Any]) -> Any:
    samples[:] = [sample for sample in samples if sample is not None]
    return {"image": default_collate([image for image, _ in samples]), "label": [label for _, label in samples]}


def lists_without_bad(samples: list[Any]) -> Any:
    return tuple(zip(*(sample for sample in samples if sample is not None), strict=True))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.process)])
@pytest.mark.parametrize("collate", [without_bad, without_bad_in_place, lists_without_bad])
def test_a_collation_that_returns_fewer_samples_than_it_was_given_is_refused(
    collate: Callable[[list[Any]], Any], workers: int
) -> None:
    """Samples 0, 4, ... are bad: 8 of 32."""
    source = DatasetSource(SomeBad(), loader_workers=workers, collate_fn=collate)
    try:
        expected = "collate_fn for SomeBad was given 32 samples and returned a batch of 24, .*leave bad samples out"
        with pytest.raises(ConfigError, match=expected):
            source.batch(np.arange(32), train=True)
        assert len(source.batch(np.array([1, 2, 3]), train=True)) == 2
    finally:
        source.close()


@pytest.mark.parametrize(
    ("batch", "missing"),
    [
        ((torch.zeros(31, 32), torch.zeros(31)), 31),  # 32 features are no samples
        ((torch.zeros(32, 7), torch.zeros(32)), None),
        ((torch.zeros(9, 32), torch.zeros(9, 32)), None),  # time, samples
        ((torch.zeros(9, 32, 5), torch.zeros(32)), None),
        ({"ids": torch.zeros(1, 500), "labels": torch.zeros(1, 500)}, None),  # all in one row
        ((torch.zeros(1, 500), torch.zeros(1)), 1),  # one of 32
        ((torch.zeros(0, 5), torch.zeros(0)), 0),
        (None, 0),
        ((torch.zeros(64, 5), torch.zeros(64)), None),  # two views of each
        ([[torch.zeros(32), torch.zeros(32)], torch.zeros(32)], None),  # an input of two fields
        ([[torch.zeros(31), torch.zeros(31)], torch.zeros(31)], 31),
        (torch.tensor(1.0), None),
        (({"words": ["a"] * 30}, torch.zeros(30)), 30),
        ({"rows": torch.zeros(4, 99), "lengths": torch.zeros(32)}, None),
    ],
)
def test_the_samples_of_a_batch_are_counted_by_the_length_that_all_its_parts_have(
    batch: Any, missing: int | None
) -> None:
    assert missing_samples(batch, 32) == missing


def test_a_loader_that_drops_the_last_batch_is_told_that_none_is_dropped() -> None:
    data = TensorDataset(torch.arange(10.0), torch.zeros(10))
    with pytest.warns(UserWarning, match=r"^drop_last=True of the DataLoader has no effect here: every sample counts"):
        source = DatasetSource.from_loader(DataLoader(data, batch_size=4, drop_last=True), torch.device("cpu"))
    assert len(source) == 10
