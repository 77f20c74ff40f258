"""A step of one live replica against DDP with the same micro-batches, on a GPU if there is one.

ResNet-18 for 32 x 32 images, a step of two micro-batches, bf16. Both train in one process and take turns, so that other
load on the machine affects both alike; the ratio is the median over the turns. DDP is a group of one process that keeps
its gradients to itself in all but the last micro-batch (`no_sync`), as a user would write it. The live replica also
asks the lighthouse before every step, adds up what batch norm saw, and writes its record; with AdaScale it measures the
noise of the gradient. Without a GPU the model is a tiny one, so that what is seen is what every step costs beside the
model.

    python benchmarks/live_step.py --compile --profile trace.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

LIMIT = 1.05
STEPS = 20


def measure(
    rule: str, *, turns: int, micro_batch: int, compiled: bool, profile: str | None, warm_up: int
) -> tuple[float, float, float]:
    """Median seconds of a DDP step and of a live step, and the median of their ratios."""
    os.environ.setdefault("RUST_LOG", "error")  # before torchft is loaded
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import ebbflow.live
    from ebbflow.live.processes import LighthouseOptions, listen
    from ebbflow.workloads.models import resnet18
    from ebbflow.workloads.sources import TensorSource

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    batch = 2 * micro_batch
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    size = 32 if on_gpu else 8
    x = torch.randn(50_000 if on_gpu else 5_000, 3, size, size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.randint(10, (len(x),), device=device)

    def make_model() -> torch.nn.Module:
        model = (
            resnet18(classes=10)
            if on_gpu
            else torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * size**2, 10))
        )
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def half() -> Any:
        return torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()

    def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(inputs), targets)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        plain = DistributedDataParallel(make_model())
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
        ddp_loss = torch.compile(loss_of) if compiled else loss_of
        position = 0

        def ddp_step() -> None:
            nonlocal position
            plain_optimizer.zero_grad()
            for last in (False, True):
                indices = torch.arange(position, position + micro_batch, device=device) % len(x)
                position += micro_batch
                with nullcontext() if last else plain.no_sync(), half():
                    loss = ddp_loss(plain, x[indices], y[indices]) / 2
                with nullcontext() if last else plain.no_sync():
                    loss.backward()
            plain_optimizer.step()

        lighthouse = listen(LighthouseOptions())
        stack.callback(lighthouse.shutdown)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        fleet = stack.enter_context(
            ebbflow.live.join(
                model, optimizer, TensorSource(x, y), loss=loss_of, epochs=1_000, local_batch=batch,
                micro_batch=micro_batch, base_batch=batch, rule=rule, precision="bf16" if on_gpu else "fp32",
                compile=compiled or None, checkpoint_every_s=1e9, replica="r0", folder=f"{folder}/job",
                lighthouse=f"127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
            )
        )  # fmt: skip
        steps = iter(fleet)
        next(steps)

        def seconds(what: Callable[[], object]) -> float:
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                what()
            if on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / STEPS

        def live_step() -> None:
            next(steps)

        for _ in range(warm_up):
            seconds(ddp_step), seconds(live_step)
        taken = []
        for turn in range(turns):
            order = (ddp_step, live_step) if turn % 2 else (live_step, ddp_step)
            found = {what: seconds(what) for what in order}
            taken.append((found[ddp_step], found[live_step]))
        if profile is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
            with torch.profiler.profile(activities=activities) as profiled:
                seconds(live_step)
            profiled.export_chrome_trace(profile)
            print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        stack.callback(steps.close)  # type: ignore[attr-defined]
    ddp, live = (statistics.median(column) for column in zip(*taken, strict=True))
    return ddp, live, statistics.median(ours / theirs for theirs, ours in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--rules", nargs="+", default=["linear", "adascale"])
    parser.add_argument("--compile", action="store_true", help="compile the forward pass of both")
    parser.add_argument("--profile", metavar="FILE", help="profile some live steps, too: a table, and a Chrome trace")
    arguments = parser.parse_args()
    print(f"{'rule':10}{'DDP':>10}{'live':>10}{'ratio':>8}{'limit':>8}")
    for rule in arguments.rules:
        ddp, live, ratio = measure(
            rule, turns=arguments.turns, micro_batch=arguments.micro_batch, compiled=arguments.compile,
            profile=arguments.profile, warm_up=3,
        )  # fmt: skip
        print(f"{rule:10}{ddp * 1e3:8.2f}ms{live * 1e3:8.2f}ms{ratio:8.3f}{LIMIT:8.2f}", flush=True)


if __name__ == "__main__":
    main()
