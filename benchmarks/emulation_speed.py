"""What emulating workers costs over plain large-batch training, and what fusing them gains over a loop.

On a GPU: ResNet-18 on 32x32 images, bfloat16, about 2,048 samples per step, samples and augmentation on the GPU. The
limit is plain training with one compiled batch of 2,048 and no workers at all. Everything else is a whole step of the
flow: samples fetched, chunks, batch norm of each worker, statistics and AdaScale where they are on, the optimizer.
On a CPU: digits-cnn, and shakespeare-gpt where a text is given; the loop is what the fused engine is compared with.

    python benchmarks/emulation_speed.py                               one CPU thread
    python benchmarks/emulation_speed.py --text tinyshakespeare.txt
    python benchmarks/emulation_speed.py --device cuda                 about eight minutes, most of it compiling
    python benchmarks/emulation_speed.py --device cuda --arms b=32     the limit, and those with "b=32" in their names
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ebbflow import workloads
from ebbflow.core.memory import keep_freed_memory
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import EmulatedEngine, FusedEngine, LoopEngine
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.optimizers import build_optimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.run.flow import Flow
from ebbflow.traces.availability import Trace
from ebbflow.workloads import cross_entropy
from ebbflow.workloads.models import resnet18
from ebbflow.workloads.sources import TensorSource, crop_and_flip

BATCH = 2048
EPOCH = 1 << 24  # samples in an epoch, so that no tail of one disturbs
SETTLING = 700  # steps of a changing plan until every shape has been compiled and captured
STATISTICS = {True: "adascale", False: "linear"}

Step = Callable[[], int]
"""Does a step and says how many samples it had."""


def images() -> Callable[[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Random images in the format of CIFAR, on the GPU, cropped and flipped as they are fetched."""
    count = 50_000
    generator = torch.Generator().manual_seed(0)
    source = TensorSource(
        torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(10, (count,), generator=generator),
        augment=crop_and_flip,
        mean=torch.full((3, 1, 1), 120.0),
        std=torch.full((3, 1, 1), 60.0),
    ).to(torch.device("cuda"))
    return lambda indices: source.batch(np.asarray(indices) % count, train=True)


def changing_plan(local_batch: int) -> BatchPlan:
    """Another number of workers at every step, from half of what makes 2,048 samples to one and a half times that."""
    middle = BATCH // local_batch
    steps = 4 * SETTLING  # more than the warm-up and the timed turns together
    workers = np.random.default_rng(0).integers(middle // 2, middle * 3 // 2, steps, endpoint=True)
    trace = Trace.parse(" ".join(f"{time}s:{count}" for time, count in enumerate(workers)) + f" {steps}s")
    return BatchPlan.from_trace(trace, Follow(local_batch), "1s")


def plain() -> Step:
    torch.manual_seed(0)
    model = resnet18(classes=10).cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fetch, start = images(), 0

    @torch.compile
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    def step() -> int:
        nonlocal start
        x, y = fetch(np.arange(start, start + BATCH))
        start += BATCH
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = loss(x.contiguous(memory_format=torch.channels_last), y)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH

    return step


def emulated(
    kind: type[EmulatedEngine], local_batch: int, *, measured: bool, changing: bool = False, **settings: Any
) -> Step:
    torch.manual_seed(0)
    model = resnet18(classes=10).cuda()
    plan = changing_plan(local_batch) if changing else BatchPlan.constant(BATCH // local_batch, BATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = ElasticOptimizer(inner, STATISTICS[measured], base_batch=256, epoch_samples=EPOCH)
    engine = kind(
        model, images(), cross_entropy, plan, samples=EPOCH, needs=optimizer.rule.needs, precision="bf16", **settings
    )
    return step_of(Flow(engine, optimizer, Ledger(samples=EPOCH)))


def step_of(flow: Flow) -> Step:
    def step() -> int:
        row = flow.run_step()
        assert row is not None
        return row.batch

    return step


def gpu_arms() -> dict[str, Callable[[], Step]]:
    arms: dict[str, Callable[[], Step]] = {LIMIT: plain}
    arms[LOOP] = lambda: emulated(LoopEngine, 32, measured=True)
    arms["fused, b=32, statistics, not compiled"] = lambda: emulated(FusedEngine, 32, measured=True)
    for b in (32, 16, 128):
        for measured in (True, False):
            arms[f"fused, b={b}{', statistics' if measured else ''}"] = lambda b=b, measured=measured: emulated(
                FusedEngine, b, measured=measured, compile=True
            )
    arms["fused, b=32, statistics, changing workers"] = lambda: emulated(
        FusedEngine, 32, measured=True, changing=True, compile=True
    )
    return arms


LIMIT = "plain large batch, compiled"
LOOP = "loop, b=32, statistics"


def warm_up(step: Step, steps: int) -> float:
    """Seconds that the slow steps, those with compiling in them, took; few where nothing is slow."""
    slow = 0.0
    for _ in range(steps):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if (took := time.perf_counter() - began) > 2:
            slow += took
        elif took > 0.3:
            return slow  # the eager loop: nothing to wait for
    return slow


def rate(step: Step, *, seconds: float = 1.5, turns: int = 3) -> float:
    """Samples a second, the best of a few turns."""
    best = 0.0
    for _ in range(turns):
        torch.cuda.synchronize()
        began, samples = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            samples += step()
        torch.cuda.synchronize()
        best = max(best, samples / (time.perf_counter() - began))
    return best


def on_gpu(wanted: str) -> None:
    print(
        f"ResNet-18, 32x32, bf16, {BATCH} samples per step, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    rates: dict[str, float] = {}
    print(f"{'':44s} {'images/s':>9s} {'of the limit':>12s} {'of the loop':>11s} {'compiling':>9s}")
    for name, make in gpu_arms().items():
        if name != LIMIT and wanted not in name:
            continue
        step = make()
        compiling = warm_up(step, SETTLING if "changing" in name else 25)
        rates[name] = rate(step)
        limit, loop = rates[LIMIT], rates.get(LOOP)
        over = f"{rates[name] / loop:10.1f}x" if loop else ""
        print(f"{name:44s} {rates[name]:9,.0f} {rates[name] / limit:12.2f} {over:>11s} {compiling:8.0f}s", flush=True)


def on_cpu(text: str | None) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()  # as `ebbflow train` does
    print(f"{'':42s} {'loop':>10s} {'fused':>10s} {'fused/loop':>10s}")
    for name, turns in (("digits-mlp", 40), ("digits-cnn", 40), ("shakespeare-gpt", 9)):
        if name == "shakespeare-gpt" and text is None:
            continue
        data = text if name == "shakespeare-gpt" else None
        for workers in (1, 2, 8, 16):
            for measured in (False, True):
                steps = [cpu_step(kind, name, data, workers, measured) for kind in (LoopEngine, FusedEngine)]
                times: list[list[float]] = [[], []]
                for _ in range(turns):  # in turns, so that a busy machine disturbs both alike
                    for step, taken in zip(steps, times, strict=True):
                        began = time.perf_counter()
                        step()
                        taken.append(time.perf_counter() - began)
                ratio = statistics.median(fused / loop for loop, fused in zip(*times, strict=True))
                loop, fused = (statistics.median(taken) * 1e3 for taken in times)
                title = f"{name}, {workers} workers{', statistics' if measured else ''}"
                print(f"{title:42s} {loop:7.2f} ms {fused:7.2f} ms {ratio:10.2f}", flush=True)


def cpu_step(kind: type[EmulatedEngine], name: str, data: str | None, workers: int, measured: bool) -> Step:
    task = workloads.build(name, data=data)
    recipe, samples = task.recipe, len(task.train)
    inner = build_optimizer(recipe.optimizer, task.model, lr=recipe.lr)
    optimizer = ElasticOptimizer(inner, STATISTICS[measured], base_batch=recipe.ref_batch, epoch_samples=samples)
    plan = BatchPlan.constant(workers, workers * recipe.local_batch)
    engine = kind(
        task.model,
        lambda indices: task.train.batch(indices, train=True),
        task.loss,
        plan,
        samples=samples,
        needs=optimizer.rule.needs,
        parameters=optimizer.layers,
    )
    return step_of(Flow(engine, optimizer, Ledger(samples=samples)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--arms", default="", metavar="TEXT", help="on a GPU: only those with TEXT in their names")
    parser.add_argument("--text", help="a plain text file for shakespeare-gpt")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        on_gpu(arguments.arms)
    else:
        on_cpu(arguments.text)


if __name__ == "__main__":
    main()
