"""A step of one live replica against DDP with the same micro-batches, on a GPU if there is one.

ResNet-18 for 32 x 32 images, a step of two micro-batches, bf16. Both train in one process and take turns, so that other
load on the machine affects both alike; the ratio is the median over the turns. DDP is a group of one process that keeps
its gradients to itself in all but the last micro-batch (`no_sync`), as a user would write it. The live replica also
asks the lighthouse before every step, adds up what batch norm saw, and writes its record; with AdaScale it measures the
noise of the gradient.

Without a GPU the same ResNet-18 is computed with 4 channels instead of 64, on images of 8 x 8 pixels and in one thread:
its kernels are so small that the time is that of the host, as it is on a GPU if nothing is compiled. Gradients are then
measured and added up as on a GPU. What a step launches is counted, too: see `Launches`.

    python benchmarks/live_step.py --compile --profile trace.json
    python benchmarks/live_step.py --operators
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

os.environ.setdefault("RUST_LOG", "error")  # before torchft is loaded
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 1.05
STEPS = 20
COUNTED = 5
WAITS = "waits"
CUDA_CALLS = (
    "cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaStreamSync", "cudaDeviceSync",
    "cudaEventSync",
)  # fmt: skip
NO_KERNELS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "permute",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operators of this thread that a GPU would have to launch, backward passes included.

    Views and empty tensors are not counted. An operator over a list of tensors counts once, if the tensors at the same
    place of its lists have the same type and lie in memory in the same way: a GPU then has one kernel for all of them.
    Otherwise it counts once for each tensor. Under `WAITS` it counts how often the host reads numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name, _ = str(operator).split(".", 2)
        if name == "_local_scalar_dense":
            self.found[WAITS] += 1
        elif name not in NO_KERNELS and library in ("aten", "c10d"):
            self.found[str(operator)] += self._kernels(args) if name.startswith("_foreach") else 1
        return operator(*args, **(kwargs or {}))

    @staticmethod
    def _kernels(args: Sequence[Any]) -> int:
        lists = [one for one in args if isinstance(one, list | tuple) and isinstance(one[0], torch.Tensor)]
        alike = all(len({(t.dtype, t.stride()) for t in tensors}) == 1 for tensors in zip(*lists, strict=True))
        return 1 if alike else len(lists[0])


def count(what: Callable[[], object]) -> Counter[str]:
    """What a step launches, by operator; a mean over some steps."""
    what()
    launches, tolist = Launches(), torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        launches.found[WAITS] += 1
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted), launches:
        for _ in range(COUNTED):
            what()
    return Counter({name: number / COUNTED for name, number in launches.found.items()})


def calls_of_cuda(what: Callable[[], object]) -> Counter[str]:
    """How often a step calls CUDA to launch a kernel, to copy, or to wait; by the name of the function."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(COUNTED):
            what()
        torch.cuda.synchronize()
    calls = Counter(event.name for event in profiled.events() if event.name.startswith(CUDA_CALLS))
    return Counter({name: number / COUNTED for name, number in calls.items()})


def measure(
    rule: str, *, turns: int, micro_batch: int, compiled: bool, profile: str | None, warm_up: int, operators: bool
) -> tuple[float, float, float, float]:
    """Median seconds of a DDP step and of a live step, the median of their ratios, and that of the ratios of the time
    for which the training thread had a core: other load on the machine changes it least; waiting is no part of it."""
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import ebbflow.live
    from ebbflow.engines import replica_step
    from ebbflow.live.processes import LighthouseOptions, listen
    from ebbflow.moments.meters import FusedMeter
    from ebbflow.workloads.models import resnet18
    from ebbflow.workloads.sources import TensorSource

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
        micro_batch = min(micro_batch, 4)
    batch = 2 * micro_batch
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    size = 32 if on_gpu else 8
    x = torch.randn(50_000 if on_gpu else 5_000, 3, size, size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.randint(10, (len(x),), device=device)

    def make_model() -> torch.nn.Module:
        model = resnet18(classes=10, width=64 if on_gpu else 4)
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
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9, foreach=True)
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
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        if not on_gpu:  # measure and add up as on a GPU
            stack.enter_context(mock.patch.object(replica_step, "meter_for", FusedMeter))
            stack.enter_context(mock.patch.object(replica_step, "adds_at_once", return_value=True))
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

        def seconds(what: Callable[[], object]) -> tuple[float, float]:
            if on_gpu:
                torch.cuda.synchronize()
            began, began_computing = time.perf_counter(), time.thread_time()
            for _ in range(STEPS):
                what()
            computed = time.thread_time() - began_computing
            if on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / STEPS, computed / STEPS

        def live_step() -> None:
            next(steps)

        for _ in range(warm_up):
            seconds(ddp_step), seconds(live_step)
        taken = []
        for turn in range(turns):
            order = (ddp_step, live_step) if turn % 2 else (live_step, ddp_step)
            found = {what: seconds(what) for what in order}
            taken.append(found[ddp_step] + found[live_step])
        if on_gpu:
            tell_counts(calls_of_cuda(ddp_step), calls_of_cuda(live_step), operators=True)
        else:
            tell_counts(count(ddp_step), count(live_step), operators=operators)
        if profile is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
            with torch.profiler.profile(activities=activities) as profiled:
                seconds(live_step)
            profiled.export_chrome_trace(profile)
            print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        stack.callback(steps.close)  # type: ignore[attr-defined]
    ddp, _, live, _ = (statistics.median(column) for column in zip(*taken, strict=True))
    ratio = statistics.median(turn[2] / turn[0] for turn in taken)
    return ddp, live, ratio, statistics.median(turn[3] / turn[1] for turn in taken)


def tell_counts(ddp: Counter[str], live: Counter[str], *, operators: bool) -> None:
    """Print what a step launches; with `operators` each of those of which the two differ in number."""
    waits = [f"{found.pop(WAITS, 0):g}" for found in (ddp, live)]
    launched = [sum(found.values()) for found in (ddp, live)]
    print(f"launches per step: {launched[0]:g} of DDP, {launched[1]:g} live; waits: {waits[0]} and {waits[1]}")
    for name in sorted({*ddp, *live}, key=lambda name: ddp[name] - live[name]) if operators else ():
        if ddp[name] != live[name]:
            print(f"    {name:52}{ddp[name]:10g}{live[name]:10g}{live[name] - ddp[name]:+10g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--rules", nargs="+", default=["linear", "adascale"])
    parser.add_argument("--compile", action="store_true", help="compile the forward pass of both")
    parser.add_argument("--operators", action="store_true", help="name what the two launch unequally often")
    parser.add_argument("--profile", metavar="FILE", help="profile some live steps, too: a table, and a Chrome trace")
    arguments = parser.parse_args()
    print(f"{'rule':10}{'DDP':>10}{'live':>10}{'ratio':>8}{'limit':>8}{'of the thread':>16}")
    for rule in arguments.rules:
        ddp, live, ratio, of_thread = measure(
            rule, turns=arguments.turns, micro_batch=arguments.micro_batch, compiled=arguments.compile,
            profile=arguments.profile, warm_up=3, operators=arguments.operators,
        )  # fmt: skip
        print(f"{rule:10}{ddp * 1e3:8.2f}ms{live * 1e3:8.2f}ms{ratio:8.3f}{LIMIT:8.2f}{of_thread:16.3f}", flush=True)


if __name__ == "__main__":
    main()
