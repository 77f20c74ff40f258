"""What torchrun runs in test_torchrun.py: `torchrun ... torchrun_script.py FOLDER UPDATES`.

Every case is trained up to a number of updates, from where the launch before it stopped, and saved.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler
from ebbflow.core.signals import StopSignal
from ebbflow.errors import ConfigError
from ebbflow.rules.rule import Rule, Scaling, State, StepContext
from optim.small_regression import SAMPLES, data, model, weights

EPOCHS = 3
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    policy: str
    settings: dict[str, Any]
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    tokens: bool = False
    """Whether micro-batches count by something else than their samples."""
    dcp: bool = True
    ddp: bool = True
    local_batch: int = 8


CASES = {
    "adascale": Case("fixed(24)", {"rule": "adascale", "measure_every": 2, "memory_steps": 5}),
    "ramp": Case("fixed(24)", {"rule": "linear+ramp", "clip": 0.5}, dcp=False, ddp=False),
    "tokens": Case("fixed(24)", {"rule": "adascale"}, tokens=True, local_batch=5),
    "adam": Case(
        "fixed(24)", {"rule": "sqrt", "schedule": "warmup(1ep)+cosine"}, inner=torch.optim.Adam, local_batch=6
    ),
    "layers": Case("fixed(24)", {"rule": "lena"}, dcp=False),
    "follow": Case("follow(8)", {"rule": "adascale"}),
    "slopes": Case("fixed(24)", {"rule": "auto(limit=1)"}),
}


@dataclass
class Run:
    """What one process sees of the training of a case."""

    net: nn.Module
    sampler: ElasticSampler
    optimizer: ElasticOptimizer

    @classmethod
    def of(cls, case: Case, plan: str | BatchPlan, *, ddp: bool) -> Run:
        net = model()
        sampler = ElasticSampler(SAMPLES, plan, local_batch=case.local_batch)
        wrapped = DistributedDataParallel(net) if ddp else net
        inner = case.inner(net.parameters(), lr=0.02, **({"momentum": 0.9} if case.inner is torch.optim.SGD else {}))
        optimizer = ElasticOptimizer(
            inner, base_batch=8, sampler=sampler, model=wrapped, epochs=EPOCHS, **case.settings
        )
        return cls(wrapped, sampler, optimizer)

    def train(self, case: Case, updates: int) -> dict[str, Any]:
        """Train up to a number of updates; the samples that counted, and what each update did."""
        seen: list[tuple[int, int]] = []
        rows: list[list[float]] = []
        while self.optimizer.updates < updates and not self.optimizer.finished:
            for x, y, index in DataLoader(TensorDataset(*data(), torch.arange(SAMPLES)), batch_sampler=self.sampler):
                losses = nn.functional.mse_loss(self.net(x), y, reduction="none").flatten()
                tokens = 1.0 + index % 5 if case.tokens else torch.ones(len(x))
                ((losses * tokens).sum() / tokens.sum()).backward()
                self.optimizer.step(weight=float(tokens.sum()) if case.tokens else None)
                self.optimizer.zero_grad()
                took = self.optimizer.micro_batch
                assert took is not None
                seen += [(took.epoch, i) for i in index.tolist()[: took.size]]
                if self.optimizer.updated and self.optimizer.last is not None:
                    last = self.optimizer.last
                    moments = [last.moments.noise, last.moments.signal] if last.moments is not None else []
                    slopes = [value for name, value in last.stats.items() if name == "slope_left"]
                    rows.append([self.optimizer.updates, last.lr_base, last.lr, *moments, *slopes])
                if took.last and self.optimizer.updates == updates:
                    break
        return {"seen": seen, "rows": rows, "weights": weights(self.net).tolist()}


# What is checked once, with three ranks -------------------------------------------------------------------------------


def small(net: nn.Module, **settings: Any) -> tuple[ElasticSampler, ElasticOptimizer]:
    sampler = settings.pop("sampler", None) or ElasticSampler(SAMPLES, "fixed(24)", local_batch=8)
    inner = torch.optim.SGD(net.parameters(), lr=0.02)
    return sampler, ElasticOptimizer(inner, **{"rule": "linear", "base_batch": 8, "sampler": sampler} | settings)


def steps(
    net: nn.Module, sampler: ElasticSampler, optimizer: ElasticOptimizer, updates: int, scale: Any = None
) -> None:
    x, y = data()
    for indices in sampler:
        loss = nn.functional.mse_loss(net(x[indices]), y[indices])
        (loss if scale is None else scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.updates == updates:
            return


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except ConfigError as error:
        return str(error)
    return "no error"


def forgotten_model(views: bool) -> str:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=views)
    return error_of(lambda: steps(net, *small(net), 1))


def different_positions() -> str:
    net = model()
    sampler, optimizer = small(net)
    if dist.get_rank() == 1:
        sampler.load_state_dict(sampler.state_dict() | {"step": 7})
    return error_of(lambda: steps(net, sampler, optimizer, 1))


def other_ranks() -> str:
    return error_of(lambda: small(model(), sampler=ElasticSampler(SAMPLES, "fixed(24)", rank=0, world_size=2)))


def other_seeds() -> str:
    rank = dist.get_rank()
    return error_of(lambda: small(model(), sampler=ElasticSampler(SAMPLES, "fixed(24)", local_batch=8, seed=rank)))


def other_rates() -> str:
    net = model()
    sampler = ElasticSampler(SAMPLES, "fixed(24)", local_batch=8)
    inner = torch.optim.SGD(net.parameters(), lr=0.01 * (1 + dist.get_rank()))
    return error_of(lambda: ElasticOptimizer(inner, rule="linear", base_batch=8, sampler=sampler))


class OwnRule(Rule):
    """A rule that is no dataclass, so that its text has the address at which it lies."""

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        return Scaling(lr=context.ratio), state


def own_rules() -> str:
    return error_of(lambda: small(model(), rule=OwnRule()))


def static_graph() -> str:
    net = DistributedDataParallel(model(), static_graph=True)
    return error_of(lambda: small(net, model=net))


def replaced(parallel: bool) -> list[float]:
    """The weights after steps of an optimizer, and of another one that takes its place."""
    net = model()
    wrapped = DistributedDataParallel(net) if parallel else net
    sampler, optimizer = small(net, model=wrapped)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # it keeps the optimizer until garbage is collected
    steps(wrapped, sampler, optimizer, 2)
    _, optimizer = small(net, model=wrapped, sampler=sampler)
    for updates in (5, 9):  # thoroughly watched until then, and not any more
        steps(wrapped, sampler, optimizer, updates)
        gc.collect()
    return weights(net).tolist()


def accumulating() -> str:
    return error_of(lambda: small(model(), accumulation=2))


def stop_at() -> list[int]:
    """The updates after which each rank knows that rank 2 was asked to stop, after its first update."""
    net, stop = model(), StopSignal()
    sampler, optimizer = small(net, stop=stop)
    known = []
    for update in range(1, 4):
        steps(net, sampler, optimizer, update)
        stop.requested = dist.get_rank() == 2
        known += [update] if optimizer.stop_requested else []
    return known


def buffers() -> list[float]:
    """The running mean of batch norm after three steps; rank 0 has seen other samples than the others."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights are given to all
    net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double())
    steps(net, *small(net, model=net), 3)
    return [*net.module[1].running_mean.tolist(), *weights(net).tolist()]


def scaled(initial: float | None) -> list[float]:
    """Noise, signal and weights with a loss scale."""
    net = model()
    scaler = None if initial is None else torch.amp.GradScaler("cpu", init_scale=initial)
    sampler, optimizer = small(net, rule="adascale", scaler=scaler)
    steps(net, sampler, optimizer, 3, scaler.scale if scaler is not None else None)
    assert optimizer.last is not None and optimizer.last.moments is not None
    return [optimizer.last.moments.noise, optimizer.last.moments.signal, *weights(net).tolist()]


def overflow() -> list[float]:
    """A gradient of rank 1 is not finite: no rank takes the step, and all lower the loss scale."""
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    sampler, optimizer = small(net, scaler=scaler)
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    steps(net, sampler, optimizer, 1, lambda loss: scaler.scale(loss) * bad)
    return [scaler.get_scale(), float(optimizer.updated), *(weights(net) - weights(model())).tolist()]


def left_out() -> list[float]:
    """Rank 2 leaves its micro-batch out: the step is the mean over the samples of the other two."""
    net = model()
    x, y = data()
    sampler, optimizer = small(net)
    indices = next(iter(sampler))
    if dist.get_rank() == 2:
        optimizer.skip()
    else:
        nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
        optimizer.step()
    return weights(net).tolist()


def left_out_first() -> list[float]:
    """Rank 2 leaves out the first micro-batches of each step, and the only one of the first, while the scale grows."""
    net, scaler = model(), torch.amp.GradScaler("cpu", growth_interval=1)
    x, y = data()
    sampler = ElasticSampler(SAMPLES, "fixed(24)", local_batch=4)
    sampler, optimizer = small(net, rule="adascale", sampler=sampler, scaler=scaler)
    for number, indices in enumerate(sampler):
        if dist.get_rank() == 2 and (number < 2 or number % 2 == 0):
            optimizer.skip()
            continue
        scaler.scale(nn.functional.mse_loss(net(x[indices]), y[indices])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net).tolist()


def branches() -> list[float]:
    """The weights of a model with a branch that only some samples take, after steps with repeated micro-batches."""
    net, branch = model(), nn.Linear(6, 1).double()
    nn.init.constant_(branch.weight, 0.1)
    nn.init.constant_(branch.bias, 0.1)
    sampler = ElasticSampler(SAMPLES, "fixed(24)", local_batch=4)
    inner = torch.optim.SGD([*net.parameters(), *branch.parameters()], lr=0.02, weight_decay=0.1)
    optimizer = ElasticOptimizer(inner, rule="linear", base_batch=8, sampler=sampler)
    x, y = data()
    for _ in range(2):
        for indices in sampler:
            found = net(x[indices]) + (branch(x[indices]) if indices[0] % 3 == 0 else 0)
            nn.functional.mse_loss(found, y[indices]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*weights(net).tolist(), *weights(branch).tolist()]


class Around(nn.Module):
    """A model of several parts, each of them in DistributedDataParallel."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        parts = [DistributedDataParallel(part) if [*part.parameters()] else part for part in net]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def parallel_within(wrap: Callable[[Any], Any]) -> list[float]:
    """The weights after two steps of a model that has DistributedDataParallel somewhere in it."""
    net = model()
    wrapped = wrap(net)
    steps(wrapped, *small(net, model=wrapped), 2)
    return weights(net).tolist()


CHECKS: dict[str, Callable[[], Any]] = {
    "forgotten model": lambda: forgotten_model(False),
    "forgotten model with views": lambda: forgotten_model(True),
    "different positions": different_positions,
    "other ranks": other_ranks,
    "accumulating": accumulating,
    "other seeds": other_seeds,
    "other rates": other_rates,
    "own rules": own_rules,
    "static graph": static_graph,
    "replaced": lambda: replaced(True),
    "replaced without": lambda: replaced(False),
    "stop": stop_at,
    "buffers": buffers,
    "unscaled": lambda: scaled(None),
    "scaled": lambda: scaled(64.0),
    "overflow": overflow,
    "left out": left_out,
    "left out first": left_out_first,
    "branches": branches,
    "parallel parts": lambda: parallel_within(Around),
    "compiled": lambda: parallel_within(lambda net: torch.compile(DistributedDataParallel(net), backend="eager")),
    "not parallel": lambda: parallel_within(lambda net: net),
}


def run_example(name: str, out: Path, *arguments: object) -> None:
    """Run the main function of an example; what it prints goes into a file."""
    script = plain_script() if name == "plain" else (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": name}
    exec(compile(script, name, "exec"), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names["main"](*map(str, arguments))
    if dist.get_rank() == 0:
        out.write_text(printed.getvalue())


def plain_script() -> str:
    """The script that the diff of docs/torchrun.md changes into the example."""
    script = re.sub(
        r" *# elastic.*$", "", (EXAMPLES / "ddp_torchrun.py").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    page = (EXAMPLES.parent / "docs" / "torchrun.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        after = "".join(f"{text}\n" for sign, text in lines if sign != "-")
        before = "".join(f"{text}\n" for sign, text in lines if sign != "+")
        assert script.count(after) == 1, f"not in examples/ddp_torchrun.py:\n{after}"
        script = script.replace(after, before)
    return script


def run_examples(folder: Path, launch: int) -> None:
    """The example, stopped by a notice in the first two launches, and the plain script in the last one.

    The loop like torchtitan's is stopped after 5 and 11 steps; in the first launch it also runs to its end once."""
    (folder / "stop").touch()
    notice = [f"file({folder / 'stop'})"] if launch < 2 else []
    run_example("ddp_torchrun", folder / f"ddp-{launch}.txt", folder / "ddp", *notice)
    run_example("torchtitan_loop", folder / f"titan-{launch}.txt", folder / "titan", (5, 11, 10**6)[launch])
    if launch == 0:
        run_example("torchtitan_loop", folder / "titan-alone.txt", folder / "titan-alone")
    if launch == 2:
        run_example("plain", folder / "plain.txt", folder / "plain")


def main(folder: Path, updates: int) -> None:
    run_examples(folder, {1: 0, 3: 1, 2: 2}[dist.get_world_size()])
    if dist.get_world_size() == 3:
        found = {name: check() for name, check in CHECKS.items()}
        (folder / f"checks-{dist.get_rank()}.json").write_text(json.dumps(found))
    for name, case in CASES.items():
        run = Run.of(case, case.policy, ddp=case.ddp)
        state = {"model": run.net, "optimizer": run.optimizer}
        before = sorted(folder.glob(f"{name}-*.saved"))
        if before and case.dcp:
            dcp.load(state, checkpoint_id=before[-1])
        elif before:
            saved = torch.load(before[-1], weights_only=True)
            for key, part in state.items():
                part.load_state_dict(saved[key])
        result = run.train(case, updates)
        after = folder / f"{name}-{run.optimizer.updates:03}.saved"
        if case.dcp:
            dcp.save(state, checkpoint_id=after)
        elif dist.get_rank() == 0:
            torch.save({key: part.state_dict() for key, part in state.items()}, after)
        dist.barrier()
        out = folder / f"{name}-{updates}-{dist.get_rank()}.json"
        out.write_text(json.dumps({**result, "world": dist.get_world_size()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), int(sys.argv[2]))
    # A DistributedDataParallel that outlives its group can deadlock with gloo, or abort with "terminate called" (torch
    # 2.13): those that only refer to each other are freed first, and the group ends here.
    gc.collect()
    dist.destroy_process_group()
