"""Start, resume, memory and speed of the sampler, beside torch's DistributedSampler and torchdata's StatefulDataLoader.

Each sampler runs in a process of its own, so that memory is its own. *Start* is from nothing to the first batch,
*resume* from a state in the middle of the epoch to the next batch (DistributedSampler has no state: half of the epoch
is skipped), *memory* the growth of the process during both, *index* what one index of an epoch costs in batches of 256,
the start included (DistributedSampler makes all of them there). Peers run at 10^7 samples; `--full` takes 10^8, which
needs 10 GB and some minutes; `--samples N` takes any other size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

BATCH = 256
READ = 1 << 20

Batches = Iterator[list[int]]
Subject = Callable[[int], tuple[Callable[[], Batches], Callable[[], Batches]]]
"""Samples -> (start, resume); each call gives batches that follow its first one, which has been read."""


def ebbflow(n: int) -> tuple[Callable[[], Batches], Callable[[], Batches]]:
    from ebbflow.data.sampler import ElasticSampler

    def make() -> ElasticSampler:
        return ElasticSampler(n, 8, local_batch=BATCH)

    state = {**make().state_dict(), "position": n // 2, "step": n // 2 // (8 * BATCH)}

    def start() -> Batches:
        return after_first(iter(make()))

    def resume() -> Batches:
        sampler = make()
        sampler.load_state_dict(state)
        return after_first(iter(sampler))

    return start, resume


def distributed_sampler(n: int) -> tuple[Callable[[], Batches], Callable[[], Batches]]:
    from torch.utils.data import BatchSampler, DistributedSampler

    def indices() -> Iterator[int]:
        return iter(DistributedSampler(range(n), num_replicas=1, rank=0))  # type: ignore[arg-type]

    def start() -> Batches:
        return after_first(iter(BatchSampler(indices(), BATCH, drop_last=False)))

    def resume() -> Batches:
        rest = itertools.islice(indices(), n // 2, None)
        return after_first(iter(BatchSampler(rest, BATCH, drop_last=False)))

    return start, resume


def stateful_dataloader(n: int) -> tuple[Callable[[], Batches], Callable[[], Batches]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Rows:
        """A data set that costs nothing: a row is its index."""

        def __len__(self) -> int:
            return n

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    def make() -> Any:
        return StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True, collate_fn=list)  # type: ignore[arg-type]

    states: list[Any] = []

    def start() -> Batches:
        return after_first(iter(make()))

    def resume() -> Batches:
        loader = make()
        loader.load_state_dict(states[0])
        return after_first(iter(loader))

    def save() -> None:
        loader = make()
        for _ in itertools.islice(loader, n // 2 // BATCH):
            pass
        states.append(loader.state_dict())

    resume.before = save  # type: ignore[attr-defined]
    return start, resume


def after_first(batches: Batches) -> Batches:
    next(batches)
    return batches


SUBJECTS: dict[str, Subject] = {
    "ebbflow": ebbflow,
    "DistributedSampler": distributed_sampler,
    "StatefulDataLoader": stateful_dataloader,
}


def measure(name: str, n: int) -> dict[str, float]:
    """All figures of one sampler; runs in a fresh process."""
    ours = name == "ebbflow"
    for call in SUBJECTS[name](10_000):  # imports, and everything that happens once a process
        getattr(call, "before", lambda: None)()
        call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, resume = SUBJECTS[name](n)
    repeats = 20 if ours else 1
    start_s = min(seconds(start) for _ in range(repeats))
    reading_s = reading(start(), min(READ, n // 4))
    getattr(resume, "before", lambda: None)()
    resume_s = min(seconds(resume) for _ in range(repeats))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if ours:  # so little that the import of torch may have needed more before: count the allocations, too
        tracemalloc.start()
        start(), resume()
        memory = max(memory, tracemalloc.get_traced_memory()[1])
    return {"start": start_s, "resume": resume_s, "memory": memory, "index": start_s / n + reading_s}


def reading(batches: Batches, indices: int) -> float:
    """Seconds an index, after the start."""

    def read() -> None:
        for _ in itertools.islice(batches, indices // BATCH):
            pass

    return min(seconds(read) for _ in range(3)) / indices


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def in_own_process(name: str, n: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, "--samples", str(n)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def in_blocks(n: int) -> float:
    """Seconds an index of the bare permutation, read in blocks of 2^15 from the middle on."""
    from ebbflow.data.permutation import Permutation

    order = Permutation(n, seed=0, epoch=0)

    def read() -> None:
        for start in range(n // 2, n // 2 + READ, 1 << 15):
            order.indices(start, start + (1 << 15))

    return min(seconds(read) for _ in range(20)) / READ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=lambda text: int(float(text)), default=10**7, help="size for the peers")
    parser.add_argument("--full", action="store_true", help="peers at 10^8")
    parser.add_argument("--one", choices=list(SUBJECTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.samples)))
        return
    n = 10**8 if options.full else options.samples
    units = {"start": (1e3, "ms"), "resume": (1e3, "ms"), "memory": (2**-20, "MB"), "index": (1e9, "ns")}
    print(f"{'samples':>8}  {'sampler':<19}" + "".join(f"{key:>14} {'ratio':>8}" for key in units))
    for size in sorted({n, 10**8, 10**9}):
        ours: dict[str, float] = {}
        for name in SUBJECTS if size == n else ("ebbflow",):
            found = in_own_process(name, size)
            ours = ours or found
            cells = (
                f"{found[key] * factor:>11,.2f} {unit} {found[key] / ours[key]:>8,.3g}"
                for key, (factor, unit) in units.items()
            )
            print(f"{size:>8.0e}  {name:<19}" + "".join(cells), flush=True)
    limit_ns = 25
    for size in (10**8, 10**9):
        ns = in_blocks(size) * 1e9
        print(
            f"{size:>8.0e}  permutation in blocks: {ns:.1f} ns an index, {ns / limit_ns:.2f} of the {limit_ns} allowed"
        )


if __name__ == "__main__":
    main()
