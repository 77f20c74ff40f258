"""Replicas that are not the same: noticed before they compute together, or by their weights."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from ebbflow.live.accounting import read_fleet
from ebbflow.live.agreement import UNKNOWN, agree
from ebbflow.live.equality import different_ranks, sample_digest, structure_digest, weights_number
from ebbflow.live.membership_events import Handshake, ReplicaState
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.sources import TensorSource
from live import rank_replicas
from live.harness import eventually, run_ranks

# The structure of a model ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model whose activation is a function, and with a buffer that no peer sends."""

    def __init__(self, act: Any = F.relu, scale: float = 1.0) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.act = act
        self.register_buffer("scale", torch.tensor([scale]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x)) * self.scale


class OtherForward(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x)) * self.scale


OtherForward.__qualname__ = Net.__qualname__


class Scaled(nn.Module):
    """A model with settings that it does not print, and a counter."""

    LIMITS = ("low", "high")

    def __init__(
        self, scale: float = 1.0, mode: str = "sum", sizes: tuple[int, ...] = (3,), device_id: int = 0
    ) -> None:
        super().__init__()
        self.scale, self.mode, self.sizes, self.device_id = scale, mode, sizes, device_id
        self.calls = 0

    @property
    def factor(self) -> float:
        return self.scale * 2.0

    def limited(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=5.0) if self.mode in {"sum", "mean", "max", "min"} else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.limited(x) * self.factor


def scaled(**methods: Any) -> nn.Module:
    """A model of the same name, with other methods."""
    for name, method in methods.items():
        getattr(method, "fget", method).__qualname__ = f"Scaled.{name}"
    return type("Scaled", (Scaled,), {"__qualname__": Scaled.__qualname__, **methods})()


def bounded(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.clamp(max=limit)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.Tanh())),
        (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.2)),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (Net, lambda: Net(F.gelu)),
        (Net, lambda: Net(torch.tanh)),
        (Net, lambda: Net(scale=2.0)),
        (Net, OtherForward),
        (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False)),
        (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 2, dropout=0.1)),
        (lambda: Net(lambda x: x.relu()), lambda: Net(lambda x: x.tanh())),
        (lambda: Net(lambda x: x * 2.0), lambda: Net(lambda x: x * 3.0)),
        (lambda: Net(lambda x, by=2.0: x * by), lambda: Net(lambda x, by=3.0: x * by)),
        (lambda: Net(bounded(1.0)), lambda: Net(bounded(2.0))),
        (
            lambda: Net(partial(F.leaky_relu, negative_slope=0.1)),
            lambda: Net(partial(F.leaky_relu, negative_slope=0.2)),
        ),
        (lambda: Net(partial(F.leaky_relu)), lambda: Net(partial(F.elu))),
        (lambda: Net(partial(bounded(1.0))), lambda: Net(partial(bounded(2.0)))),
        (Scaled, lambda: Scaled(2.0)),
        (Scaled, lambda: Scaled(mode="mean")),
        (Scaled, lambda: Scaled(sizes=(3, 3))),
        (Scaled, lambda: scaled(forward=lambda self, x: self.limited(x) * self.scale)),
        (Scaled, lambda: scaled(limited=lambda self, x: x.clamp(max=6.0))),
        (Scaled, lambda: scaled(factor=property(lambda self: self.scale * 3.0))),
    ],
)
def test_models_that_compute_something_else_have_another_digest(one: Any, other: Any) -> None:
    assert structure_digest(one()) == structure_digest(one()) != structure_digest(other())


def test_weights_and_statistics_do_not_belong_to_the_structure() -> None:
    one, other = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    other(torch.randn(5, 2))
    assert structure_digest(one) == structure_digest(other)


def test_what_a_process_has_of_its_own_does_not_belong_to_the_structure() -> None:
    one, other = Scaled(), Scaled(device_id=3)
    other(torch.ones(2))
    other.started = "10:15"
    assert structure_digest(one) == structure_digest(other)
    one, other = Scaled(mode="/data/a"), Scaled(mode="/data/b")
    assert structure_digest(one) == structure_digest(other)


def test_methods_that_forward_does_not_use_and_functions_that_call_themselves_may_be_there() -> None:
    assert structure_digest(scaled(report=lambda self: 1)) == structure_digest(Scaled())

    def halved(x: torch.Tensor) -> torch.Tensor:
        return x if x.abs().max() < 1 else halved(x / 2)

    assert structure_digest(Net(halved)) == structure_digest(Net(halved)) != structure_digest(Net())


@pytest.mark.process
def test_the_digest_is_the_same_in_every_process() -> None:
    """Sets of texts have another order, and objects other addresses, in each."""
    script = (
        "from live.test_equality import *\n"
        "nets = Net(partial(bounded(2.0), limit=3)), Net(Scaled().limited), Scaled(), nn.Transformer(4, 2, 1, 1, 8)\n"
        "print(structure_digest(nn.ModuleList(nets)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, text=True,
            stdout=subprocess.PIPE, timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(said) == 1


# The data -------------------------------------------------------------------------------------------------------------


def changed(x: torch.Tensor, y: torch.Tensor, sample: int) -> TensorSource:
    other = x.clone()
    other[sample] = 0
    return TensorSource(other, y)


def test_data_of_other_content_have_another_digest() -> None:
    x, y = torch.randn(20, 3), torch.arange(20)
    whole = sample_digest(TensorSource(x, y))
    assert whole == sample_digest(TensorSource(x.clone(), y)) != sample_digest(TensorSource(x, y.flip(0)))
    # 8 of 20 samples are looked at, 19/7 = 2.7 apart: 0, 2, 5, 8, 10, 13, 16 and 19
    assert [i for i in range(20) if sample_digest(changed(x, y, i)) != whole] == [0, 2, 5, 8, 10, 13, 16, 19]


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return self.read(number)


def test_transforms_that_draw_from_global_generators_do_not_matter_and_the_generators_stay() -> None:
    source = DatasetSource(Samples(lambda i: (torch.rand(2) + np.random.rand() + random.random(), i)))
    before = torch.get_rng_state(), random.getstate()
    first = sample_digest(source)
    assert first == sample_digest(source) != UNKNOWN
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_data_that_cannot_be_compared_agree_with_everything() -> None:
    own = np.random.default_rng()
    assert sample_digest(DatasetSource(Samples(lambda i: (own.random(3), i)))) == UNKNOWN

    def missing(number: int) -> Any:
        raise FileNotFoundError("no such image")

    assert sample_digest(DatasetSource(Samples(missing))) == UNKNOWN

    def says(data: str, lr: str = "1") -> Handshake:
        return Handshake(name=data, store="", state=ReplicaState(step=0, lineage=1), job={"lr": lr, "data": data})

    assert agree([says("a"), says(UNKNOWN), says("a")]).incompatible == frozenset()
    assert agree([says("a"), says(UNKNOWN, lr="2"), says("b"), says("a")]).incompatible == {1, 2}


# The weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_changed_weight_gives_another_number(dtype: torch.dtype) -> None:
    one = [torch.ones(4, 3, dtype=dtype).t(), torch.zeros(2, dtype=dtype)]
    other = [tensor.clone() for tensor in one]
    assert weights_number(one, 5) == weights_number(other, 5) != weights_number(one, 6)
    other[0][2, 1] *= 1 + 2**-7  # the last bit of a bfloat16
    assert weights_number(one, 5) != weights_number(other, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_weights_in_other_places_give_another_number(dtype: torch.dtype) -> None:
    w = torch.arange(-10.0, 10.0).reshape(5, 4).to(dtype)
    signs = w.clone()
    signs[0, :2] *= -1  # -10 and -9 become 10 and 9
    signs[4, 2:] *= -1  # 8 and 9 become -8 and -9: two bits are set elsewhere
    others = {"rows": w.flip(0), "columns": w[:, [1, 0, 2, 3]], "signs": signs, "shifted": w.roll(1)}
    numbers = {name: weights_number([other.contiguous()], 5) for name, other in others.items()}
    assert weights_number([w], 5) not in numbers.values() and len({*numbers.values()}) == len(others)
    assert weights_number([w, w + 1], 5) != weights_number([w + 1, w], 5)


def test_how_weights_lie_in_memory_does_not_matter() -> None:
    w = torch.randn(3, 4, 5, 2)
    assert weights_number([w], 5) == weights_number([w.to(memory_format=torch.channels_last)], 5)


def test_long_tensors_are_looked_at_piece_by_piece() -> None:
    piece = 1 << 20
    w = torch.arange(2 * piece + 3, dtype=torch.int32).view(torch.float32)
    number = weights_number([w], 5)
    assert number == weights_number([w.clone()], 5)
    for one, other in ((piece - 1, piece), (0, piece), (piece + 1, 2 * piece + 1), (0, 2 * piece + 2)):
        changed = w.clone()
        changed[[one, other]] = w[[other, one]]
        assert weights_number([changed], 5) != number, (one, other)


def test_most_replicas_are_right_and_of_two_the_first() -> None:
    assert different_ranks([4, 4, 5]) == [2] and different_ranks([5, 4, 4, None]) == [0]
    assert different_ranks([5, 4]) == [1] and different_ranks([1, 2, 3]) == [1, 2]
    assert different_ranks([4, 4]) == different_ranks([None, None]) == []


# Real fleets ----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_replicas_that_differ_in_rate_momentum_activation_data_python_memory_or_least_number_are_refused(
    fleet: Any, tmp_path: Path
) -> None:
    group = fleet(all=["r0", "r1"], hold=3)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=4)
    odd = {
        "rate": ({"lr": 0.2}, "optimizer.lr is '0.2' here and '0.1' in the fleet"),
        "momentum": ({"momentum": 0.8}, "optimizer.momentum is '0.8' here"),
        "activation": ({"change": "activation"}, "structure of the model is"),
        "data": ({"change": "data"}, "data is"),
        "python": ({"change": "python"}, "python is '2.7' here"),
        "memory": ({"change": "memory"}, "memory formats is"),
        "alone": ({"environment": {"EBBFLOW_MIN_REPLICAS": "2"}}, "min_replicas is '2' here and '1' in the fleet"),
    }
    for name, (settings, _) in odd.items():
        group.start(name, **settings)
    group.wait(*odd)
    for name, (_, said) in odd.items():
        status = group.status(name)
        assert status["state"] == "refused" and said in status["reason"], name
    group.stop_holding()
    assert group.wait("r0", "r1") == {"r0": 0, "r1": 0}
    for name in odd:
        (tmp_path / "replicas" / name / "record.jsonl").unlink()
    account, _ = read_fleet(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES


@pytest.mark.process
def test_a_replica_whose_weights_are_changed_is_named_and_receives_those_of_the_others(
    fleet: Any, tmp_path: Path
) -> None:
    # r0 changes its weights after its step 5. They are compared in step 8, and step 9 finds whose they are.
    group = fleet(all=["r0", "r1", "r2"], check_every=4)
    group.start("r1", "r2")
    group.start("r0", tamper=5)
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = read_fleet(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1
    received = {}
    for run in runs:
        texts = [event.text for event in run.events if event.what == "lost"]
        assert [text for text in texts if text.startswith("the weights of r0:") and "differ" in text], texts
        received[run.path.parent.name] = [event.step for event in run.events if event.what == "received"]
    assert received == {"r0": [9], "r1": [], "r2": []}


NOT_ALONE = {"EBBFLOW_MIN_REPLICAS": "2"}
"""On a busy machine a heartbeat may be late, and one that goes on alone needs no backend."""


@pytest.mark.process
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_the_weights_of_every_rank_belong_to_the_number_of_a_replica(tmp_path: Path, inside: str) -> None:
    answers = run_ranks(rank_replicas.numbers_of_weights, 2, tmp_path / "r", inside)
    assert answers[0][1:] == answers[1][1:], "the ranks of a replica have one number"
    _, first, trained, first_rank, second_rank, healed = answers[0]
    assert len({first, trained, first_rank, second_rank}) == 4 and healed == trained


@pytest.mark.process
def test_a_replica_is_healed_of_which_one_rank_changed_its_copy_of_the_weights(open_fleet: Any, tmp_path: Path) -> None:
    # Rank 1 of r1 changes its copy after its step 5; compared in step 8, named in step 9. Of two, the first is right.
    settings = {"all": ("r0", "r1"), "inside": "ddp", "check_every": 4, "max_steps": 20, "save_weights": True}
    group = open_fleet(rank_replicas.sharded, settings)
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, tamper=(1, 5))
    assert set(group.wait().values()) == {0}
    account, runs = read_fleet(tmp_path)
    assert account.mistakes == () and len(account.steps) == 20
    received = {run.path.parent.name: [e.step for e in run.events if e.what == "received"] for run in runs}
    assert received == {"r0": [], "r1": [9]}
    saved = [torch.load(tmp_path / f"r{replica}.{rank}.pt") for replica in range(2) for rank in range(2)]
    for other in saved[1:]:
        assert all(torch.equal(other[name], value) for name, value in saved[0].items())


@pytest.mark.process
def test_a_backend_that_fails_for_ever_ends_the_fleet_with_what_it_said(fleet: Any) -> None:
    lines = (
        "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.27.5",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "Last error:",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000",
    )
    group = fleet(all=["r0", "r1"], backend_says="\n".join(lines), environment=NOT_ALONE)
    group.start("r0", "r1")
    codes = group.wait()
    assert set(codes.values()) == {1}
    for name in codes:
        status = group.status(name)
        assert status["state"] == "refused" and "Duplicate GPU detected" in status["reason"]
        assert "no replica was lost" in status["reason"]
        assert "--transport gloo" in status["reason"] and "firewall" not in status["reason"]


@pytest.mark.process
def test_a_failure_that_sounds_like_a_lost_connection_is_shown_and_ends_the_fleet_if_it_stays(fleet: Any) -> None:
    said = (
        "Connection timed out on the way to rank 1. This is typically caused by a remote worker crashing. Check the "
        "logs of the remote worker before reporting an error. GLHF! Once that is done, look here"
    )
    group = fleet(all=["r0", "r1"], backend_says=said, failing_s=6.0, environment=NOT_ALONE)
    group.start("r0", "r1")

    def shown() -> bool:
        status = [group.status(name) for name in ("r0", "r1")]
        return all(one.get("state") == "waiting" and "timed out on the way" in one.get("reason", "") for one in status)

    eventually(shown, "a status with what the backend said")
    assert set(group.wait().values()) == {1}
    for name in ("r0", "r1"):
        status = group.status(name)
        assert status["state"] == "refused" and "timed out on the way to rank 1" in status["reason"]
        assert "no replica was lost" in status["reason"] and "firewall" in status["reason"]
        assert status["reason"].endswith("(--bind, EBBFLOW_BIND)"), "the advice is not cut off"
