"""What gradient statistics and AdaScale cost over plain accumulation of the same micro-batches, beside fairscale and
adaptdl.

A step is four micro-batches, each one forward and backward pass, and one step of SGD with momentum. Ours adds the
squared norms of the micro-batches and of their mean, the averages and the gain: `ours` as it ships, which in the long
run measures one step in four here, `ours_at_every_step` as it is in the first 1000 reference steps or with
measure_every=1. The methods take turns of a few steps, so that a busy machine disturbs all of them alike; the ratio is
the median over the turns of the time against that of plain accumulation in the same turn.

    python benchmarks/statistics_overhead.py                  one CPU thread
    python benchmarks/statistics_overhead.py --device cuda    ResNet-18 on 32x32 images, micro-batches of 512, bfloat16
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import time
import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ebbflow.moments.estimate import Averages
from ebbflow.moments.meters import HookMeter, meter_for
from ebbflow.rules.rule import StepContext, make_rule

PIECES = 4
SPAN = 4
"""Steps of which ours measures one; a turn has a multiple of them."""
Step = Callable[[], None]
Pieces = list[tuple[torch.Tensor, torch.Tensor]]


def backward(model: nn.Module, micro_batches: Pieces) -> None:
    for x, y in micro_batches:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=x.is_cuda):
            loss = F.cross_entropy(model(x), y) / PIECES
        loss.backward()


def plain(model: nn.Module, micro_batches: Pieces) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        backward(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(
    model: nn.Module, micro_batches: Pieces, *, layers: bool = False, hooks: bool = False, every: int = SPAN
) -> Step:
    """As an engine has it: without hooks on a GPU and for small models."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    parameters = [*model.parameters()]
    meter = HookMeter(parameters, layers=layers) if hooks else meter_for(parameters, layers=layers)
    rule = make_rule("adascale")
    size = len(micro_batches[0][0])
    memory = 1000.0 * size
    width = meter.width
    averages = Averages(1.0, (1.0,) * width, (1.0,) * width)  # old ones

    def step() -> None:
        nonlocal averages
        meter.on = averages.due(PIECES * size, memory=memory, every=every)
        meter.discard()
        for micro_batch in micro_batches:
            backward(model, [micro_batch])
            meter.close_micro_batch(size, 1 / PIECES)
        if meter.on:
            averages = averages.updated(meter.finish(PIECES * size), memory=memory)
        else:
            averages = averages.passed(PIECES * size)
        context = StepContext(step=0, batch=PIECES * size, ref_batch=size, samples=0, moments=averages.moments())
        scaling, _ = rule.scale(context, rule.init())
        assert isinstance(scaling.lr, float)
        optimizer.param_groups[0]["lr"] = 1e-3 * scaling.lr
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.zero_grad()

    return step


def ours_at_every_step(model: nn.Module, micro_batches: Pieces) -> Step:
    return ours(model, micro_batches, every=1)


def ours_by_layer(model: nn.Module, micro_batches: Pieces) -> Step:
    return ours(model, micro_batches, layers=True)


def ours_by_hooks(model: nn.Module, micro_batches: Pieces) -> Step:
    """As in a user's own loop."""
    return ours(model, micro_batches, hooks=True)


def fairscale(model: nn.Module, micro_batches: Pieces) -> Step:
    from fairscale.optim import AdaScale

    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = AdaScale(inner, world_size=1, num_gradients_to_accumulate=PIECES)

    def step() -> None:
        backward(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adaptdl(model: nn.Module, micro_batches: Pieces) -> Step:
    sys.modules.setdefault("pkg_resources", types.ModuleType("pkg_resources"))  # imported, but not used here
    from adaptdl.torch.gradient_noise_scale import GradientNoiseScale

    logging.getLogger().handlers.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapped = types.SimpleNamespace(require_backward_grad_sync=False)
    noise = GradientNoiseScale(wrapped, optimizer, num_replicas=1, accum_scale=1.0)

    def step() -> None:
        for number, micro_batch in enumerate(micro_batches):
            wrapped.require_backward_grad_sync = number == PIECES - 1
            backward(model, [micro_batch])
        optimizer.param_groups[0]["lr"] = 1e-3 * noise.gain(PIECES)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        noise.reset_accumulation()

    return step


def deep_mlp() -> nn.Module:
    """10.5M parameters."""
    hidden = [layer for _ in range(10) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        return F.relu(self.main(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """For 32x32 images, 11.2M parameters."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(before, after) for before, after in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def compare(
    name: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    turns: int,
    steps: int,
    target: float,
    device: str,
) -> None:
    """Print a table: milliseconds a step and the ratio to plain accumulation."""
    micro_batches = [
        (torch.randn(*shape, device=device), torch.randint(10, shape[:1], device=device)) for _ in range(PIECES)
    ]
    methods: dict[str, Step] = {}
    extra = (
        () if isinstance(meter_for([*make().to(device).parameters()], layers=False), HookMeter) else (ours_by_hooks,)
    )
    for method in (plain, ours, ours_at_every_step, ours_by_layer, *extra, fairscale, adaptdl):
        torch.manual_seed(0)
        model = make().to(device)
        if device == "cuda":
            model = model.to(memory_format=torch.channels_last)
            micro_batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in micro_batches]
        try:
            methods[method.__name__] = method(model, micro_batches)
        except ImportError as error:
            print(f"{method.__name__}: not measured, {error}")
    clock = time.perf_counter if device == "cuda" else time.process_time  # one thread: what others run does not count
    times: dict[str, list[float]] = {method: [] for method in methods}
    # On a CPU the methods alternate step by step; a GPU, which runs behind, is waited for only after a few.
    alternations, at_once = (steps, 1) if device == "cpu" else (1, steps)
    for turn in range(turns + 2):
        taken = dict.fromkeys(methods, 0.0)
        for _ in range(alternations):
            for method, step in methods.items():
                synchronize(device)
                began = clock()
                for _ in range(at_once):
                    step()
                synchronize(device)
                taken[method] += clock() - began
        if turn >= 2:  # the first two are for warming up
            for method, seconds in taken.items():
                times[method].append(seconds / steps)
    size = sum(parameter.numel() for parameter in make().parameters())
    print(f"\n{name}: {size / 1e6:.2f}M parameters, {PIECES} micro-batches of {shape[0]}, {device}")
    print(f"{'':24}{'ms per step':>12}{'over plain':>12}")
    for method, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["plain"], strict=True))
        print(f"{method:24}{statistics.median(own) * 1e3:>12.3f}{ratio:>12.3f}")
    print(f"to reach: {target} for ours")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--turns", type=int, default=0, help="0: enough for a steady median")
    options = parser.parse_args()
    if options.device == "cuda":
        compare(
            "ResNet-18", resnet18, (512, 3, 32, 32), turns=options.turns or 15, steps=SPAN, target=1.03, device="cuda"
        )
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    compare("MLP", deep_mlp, (32, 1024), turns=options.turns or 10, steps=SPAN, target=1.05, device="cpu")
    compare("MLP", deep_mlp, (128, 1024), turns=options.turns or 4, steps=SPAN, target=1.05, device="cpu")
    compare("small MLP", small_mlp, (32, 64), turns=10 * (options.turns or 20), steps=SPAN, target=1.2, device="cpu")


if __name__ == "__main__":
    main()
