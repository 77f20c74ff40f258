"""ElasticOptimizer in a user's own loop: rules that need measurements, mixed precision, clipping, failures."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.moments.estimate import Averages, Measurement
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.rules.rule import Rule, Scaling, StepContext
from ebbflow.traces.availability import Trace
from optim.small_regression import SAMPLES, data, model, weights


@dataclass(frozen=True)
class Fixed(Rule):
    """Always the same scaling."""

    scaling: Scaling

    def init(self) -> int:
        return 0

    def scale(self, context: StepContext, state: Any) -> tuple[Scaling, Any]:
        return self.scaling, state + 1


def changing_plan() -> BatchPlan:
    return BatchPlan.from_trace(Trace.parse("0s:3 2s:5 4s:2 6s:1 8s:4 200s"), Follow(4), "1s")


def elastic(net: nn.Module, rule: Any, **settings: Any) -> tuple[ElasticOptimizer, ElasticSampler]:
    sampler = ElasticSampler(SAMPLES, changing_plan(), local_batch=4)
    inner = settings.pop("inner", None) or torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return ElasticOptimizer(inner, rule, **{"base_batch": 8, "sampler": sampler} | settings), sampler


def train(net: nn.Module, optimizer: ElasticOptimizer, sampler: ElasticSampler, *, micro_batches: int = 10**9) -> int:
    x, y = data()
    for done, indices in enumerate(sampler, start=1):
        nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if done == micro_batches:
            break
    return done


def by_hand(net: nn.Module, indices: list[list[int]]) -> tuple[float, float]:
    """A and N of one step: the weighted mean of the micro-batches' squared norms, and the squared norm of the mean."""
    x, y = data()
    batch = sum(map(len, indices))
    mean, mean_sq = torch.zeros_like(weights(net)), 0.0
    for micro_batch in indices:
        net.zero_grad()
        nn.functional.mse_loss(net(x[micro_batch]), y[micro_batch]).backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        mean += gradient * len(micro_batch) / batch
        mean_sq += float(gradient @ gradient) * len(micro_batch) / batch
    net.zero_grad()
    return mean_sq, float(mean @ mean)


def test_adascale_in_a_plain_loop_has_the_gain_of_its_micro_batches() -> None:
    net = model()
    optimizer, sampler = elastic(net, "adascale")
    micro_batches = list(sampler)[:3]
    a, n = by_hand(copy.deepcopy(net), micro_batches)
    train(net, optimizer, sampler, micro_batches=3)
    # Three micro-batches of 4: V = 12 (A - N)/2, S = N - V/12; s2 = V/8, kappa = 12/8.
    noise, signal = 6 * (a - n), n - (a - n) / 2
    gain = (max(noise, 0) / 8 + max(signal, 0)) / (max(noise, 0) / 8 / 1.5 + max(signal, 0))
    assert optimizer.last is not None
    assert optimizer.last.multiplier == pytest.approx(gain, rel=1e-9)
    assert optimizer.last.stats["noise"] == pytest.approx(noise, rel=1e-9)
    assert optimizer.last.lr == pytest.approx(0.05 * gain, rel=1e-9)


def test_a_layer_that_is_unfrozen_later_is_measured_and_clipped_with_the_others() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer, sampler = elastic(net, "adascale", clip=1e-3)
    train(net, optimizer, sampler, micro_batches=3)
    net[0].requires_grad_(True)
    micro_batches = list(sampler)[:3]
    _, n = by_hand(copy.deepcopy(net), micro_batches)
    train(net, optimizer, sampler, micro_batches=3)
    assert optimizer.last is not None
    assert optimizer.last.stats["gradient_norm"] == pytest.approx(math.sqrt(n), rel=1e-9)
    assert optimizer.last.stats["clipped"] == 1.0


def test_a_layer_that_is_unfrozen_later_is_refused_by_a_rule_for_each_layer() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer, sampler = elastic(net, "lena")
    train(net, optimizer, sampler, micro_batches=3)
    before = weights(net)
    net[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="trained that was frozen when the optimizer was made; make a new optimizer"):
        train(net, optimizer, sampler, micro_batches=3)
    assert torch.equal(weights(net), before)


def test_frozen_parameters_that_cannot_be_measured_are_left_out() -> None:
    net = model()
    net.register_parameter("table", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    optimizer, sampler = elastic(net, "adascale")
    train(net, optimizer, sampler, micro_batches=3)
    assert optimizer.last is not None
    assert optimizer.last.stats["noise"] > 0


def test_lena_gives_each_tensor_its_own_rate() -> None:
    net = model()
    optimizer, sampler = elastic(net, "lena")
    seen: list[list[float]] = []
    optimizer.inner.register_step_pre_hook(lambda opt, *_: seen.append([g["lr"] for g in opt.param_groups]))
    train(net, optimizer, sampler)
    assert max(len(set(rates)) for rates in seen) >= 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


@pytest.mark.parametrize(
    "rule",
    ["adascale", "lena+statewarmup(0.5)", "linear+statewarmup(0.5)", "linear+ramp", "adascale(progress=gain)+ramp"],
)
@pytest.mark.parametrize("micro_batches", [3, 5, 20, 41])
def test_resuming_in_the_middle_of_averages_warm_up_and_ramp(rule: str, micro_batches: int) -> None:
    def fresh() -> tuple[nn.Module, ElasticOptimizer, ElasticSampler]:
        net = model()
        return net, *elastic(net, rule, schedule="cosine", epochs=3)

    whole, optimizer, sampler = fresh()
    while sampler.epoch < 2:
        train(whole, optimizer, sampler)

    first, optimizer, sampler = fresh()
    left = micro_batches
    while left:
        left -= train(first, optimizer, sampler, micro_batches=left)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, optimizer, sampler = fresh()
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    while sampler.epoch < 2:
        train(second, optimizer, sampler)
    assert torch.equal(weights(second), weights(whole))


def test_resuming_between_two_measurements() -> None:
    """A loop of the user's own, with averages that are old from the beginning: most steps are not measured."""

    def fresh() -> tuple[nn.Module, ElasticOptimizer, ElasticSampler]:
        net = model()
        optimizer, sampler = elastic(net, "adascale", memory_steps=1000)
        optimizer._averages = Averages(weight=0.9, noise=(2.0,), signal=(1.0,))
        return net, optimizer, sampler

    whole, optimizer, sampler = fresh()
    noises = []
    optimizer.inner.register_step_post_hook(lambda *_: noises.append(optimizer._averages.passed_steps))
    train(whole, optimizer, sampler)
    assert {0, 1, 2, 3} == set(noises), "up to three steps pass between two measurements"
    for micro_batches in (3, 8, 9, 10, 15):
        first, optimizer, sampler = fresh()
        train(first, optimizer, sampler, micro_batches=micro_batches)
        state = optimizer.state_dict()
        second, optimizer, sampler = fresh()
        second.load_state_dict(first.state_dict())
        optimizer.load_state_dict(state)
        train(second, optimizer, sampler)
        assert torch.equal(weights(second), weights(whole))


def test_an_old_state_is_refused() -> None:
    optimizer, _ = elastic(model(), "linear")
    with pytest.raises(CheckpointError, match=r"another version of ebbflow \(version 3 .* or start anew"):
        optimizer.load_state_dict(optimizer.state_dict() | {"version": 3})


def test_a_rule_that_measures_needs_a_sampler_in_a_plain_loop() -> None:
    net = model()
    optimizer = ElasticOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), "adascale", base_batch=8)
    with pytest.raises(ConfigError, match="measures the micro-batches of a step; pass the sampler"):
        optimizer.step(samples=16)


def test_unsuitable_optimizers_are_refused_when_the_optimizer_is_made() -> None:
    net = model()
    with pytest.raises(ConfigError, match="Rprop uses the rate for its first step only"):
        elastic(net, "lena", inner=torch.optim.Rprop(net.parameters()))
    with pytest.raises(ConfigError, match="LBFGS"):
        elastic(net, "linear", inner=torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ConfigError, match=r"adamsde changes the betas.*use adam, adamw or rmsprop"):
        elastic(net, "adamsde")
    with pytest.raises(ConfigError, match="clip is 0"):
        elastic(net, "linear", clip=0.0)
    with pytest.raises(ConfigError, match=r"clip is '1\.0'; expected a number above 0"):
        elastic(net, "linear", clip="1.0")
    with pytest.raises(ConfigError, match="did you mean 'skip'"):
        elastic(net, "linear", on_nonfinite="skipp")


def test_groups_are_not_added_to_a_layer_wise_rule_that_has_begun() -> None:
    net = model()
    optimizer, sampler = elastic(net, "lena")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(optimizer.layers) == 5
    train(net, optimizer, sampler, micro_batches=3)
    with pytest.raises(ConfigError, match="before the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


# Mixed precision ------------------------------------------------------------------------------------------------------


def train_scaled(
    net: nn.Module, optimizer: ElasticOptimizer, sampler: ElasticSampler, scaler: torch.amp.GradScaler, spoil: int = -1
) -> None:
    x, y = data()
    for number, indices in enumerate(sampler):
        loss = nn.functional.mse_loss(net(x[indices]), y[indices])
        scaler.scale(loss * (math.inf if number == spoil else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rule", ["linear", "adascale", "lena"])
def test_a_grad_scaler_changes_nothing_but_the_scale(rule: str) -> None:
    plain, scaled = model(), model()
    train(plain, *elastic(plain, rule))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    optimizer, sampler = elastic(scaled, rule, scaler=scaler)
    train_scaled(scaled, optimizer, sampler, scaler)
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-9, atol=1e-12)
    assert scaler.get_scale() == 1024.0 * 2 ** (optimizer._steps // 4)  # it grows after steps, not after micro-batches


def test_a_step_with_an_infinite_micro_batch_is_skipped_once_and_leaves_no_trace() -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, sampler = elastic(net, "adascale", scaler=scaler)
    updates = []
    advance = optimizer._advance

    def watched(context: Any, update: Any) -> Any:
        updates.append((update.applied, optimizer._averages.weight, weights(net)))
        return advance(context, update)

    optimizer._advance = watched  # type: ignore[method-assign]
    train_scaled(net, optimizer, sampler, scaler, spoil=4)  # the second of the second step's three micro-batches
    applied, averages, values = zip(*updates, strict=True)
    assert [number for number, was in enumerate(applied) if not was] == [1]
    assert averages[1] == averages[0]
    assert torch.equal(values[1], values[0])
    assert torch.isfinite(weights(net)).all()
    assert scaler.get_scale() == 512.0
    assert optimizer._samples == SAMPLES, "the samples of a skipped step are consumed"


def test_a_scaler_that_steps_by_itself_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net, "linear")
    scaler = torch.amp.GradScaler("cpu")
    x, y = data()
    indices = next(iter(sampler))
    scaler.scale(nn.functional.mse_loss(net(x[indices]), y[indices])).backward()
    with pytest.raises(ConfigError, match="pass scaler= to ElasticOptimizer"):
        scaler.step(optimizer)


# Clipping and accidents ---------------------------------------------------------------------------------------------


def one_parameter(rule: Any = "constant", **settings: Any) -> tuple[nn.Parameter, ElasticOptimizer]:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return p, ElasticOptimizer(torch.optim.SGD([p], lr=1.0), rule, base_batch=4, **settings)


@pytest.mark.parametrize("measured", [False, True])
def test_clipping_limits_the_norm_of_the_mean_gradient_and_says_so(measured: bool) -> None:
    p, optimizer = one_parameter(clip=1.0)
    context = StepContext(step=0, batch=4, ref_batch=4, samples=0)
    measurement = Measurement(batch=4, micro_batches=2, mean_sq=(30.0,), sq_mean=(25.0,)) if measured else None
    p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)  # norm 5
    update = optimizer.update(context, measurement)
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    assert (update.stats["clipped"], update.stats["gradient_norm"]) == (1.0, pytest.approx(5.0))
    p.grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    assert optimizer.update(replace(context, step=1)).stats["clipped"] == 0.0
    assert p.tolist() == pytest.approx([-0.9, -1.2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("measured", [False, True])
def test_a_gradient_that_is_not_finite_is_skipped_or_stops(value: float, measured: bool) -> None:
    context = StepContext(step=7, batch=4, ref_batch=4, samples=40)
    bad = Measurement(batch=4, micro_batches=2, mean_sq=(value,), sq_mean=(value,)) if measured else None
    p, optimizer = one_parameter(on_nonfinite="skip")
    p.grad = torch.tensor([1.0, value], dtype=torch.float64)
    update = optimizer.update(context, bad)
    assert (update.applied, update.stats["skipped"], update.multiplier) == (False, 1.0, 0.0)
    assert p.tolist() == [0.0, 0.0]
    assert (optimizer._samples, optimizer._steps) == (44, 8)
    p, optimizer = one_parameter(on_nonfinite="stop")
    p.grad = torch.tensor([1.0, value], dtype=torch.float64)
    with pytest.raises(Diverged, match="at step 7"):
        optimizer.update(context, bad)
    assert p.tolist() == [0.0, 0.0]


def test_a_skipped_step_leaves_rule_and_averages_alone() -> None:
    net = model()
    optimizer, sampler = elastic(net, "adascale+ramp", on_nonfinite="skip")
    train(net, optimizer, sampler, micro_batches=8)
    before = copy.deepcopy(optimizer.state_dict())
    x, y = data()
    spoilt = 0
    for indices in sampler:
        (nn.functional.mse_loss(net(x[indices]), y[indices]) * math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
        spoilt += 1
        assert not optimizer.updated
        if optimizer.updates > before["steps"]:
            break
    assert spoilt > 1
    after = optimizer.state_dict()
    for key in ("rule_state", "averages", "progress", "beta_steps"):
        assert after[key] == before[key]
    assert after["steps"] == before["steps"] + 1


def test_a_step_that_raises_leaves_rule_and_averages_alone() -> None:
    p, optimizer = one_parameter(Fixed(Scaling()))

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    hook = optimizer.inner.register_step_pre_hook(fail)
    p.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step(samples=4)
    assert (optimizer._rule_state, optimizer._steps) == (0, 0)
    hook.remove()
    optimizer.step(samples=4)
    assert (optimizer._rule_state, optimizer._steps) == (1, 1)


# Progress by gain -----------------------------------------------------------------------------------------------------


def test_the_schedule_and_the_end_follow_the_gain() -> None:
    # Each step of 8 samples is worth 1.5 reference steps of 4, that is 6 samples of progress; 24 in all: 4 steps.
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = ElasticOptimizer(
        torch.optim.SGD([p], lr=1.0), Fixed(Scaling(lr=1.5, progress=1.5)), base_batch=4,
        schedule="polynomial", epochs=2, epoch_samples=12,
    )  # fmt: skip
    assert optimizer.by_gain
    bases, done = [], []
    while not optimizer.finished:
        p.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step(samples=8)
        assert optimizer.last is not None
        bases.append(optimizer.last.lr_base)
        done.append(optimizer.last.stats["progress"])
    assert bases == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert done == pytest.approx([1.5, 3.0, 4.5, 6.0])
    assert optimizer.progress == pytest.approx(24.0)


def test_a_rule_of_a_scaled_gradient_reports_how_much_larger_the_step_was() -> None:
    p, optimizer = one_parameter(Fixed(Scaling(lr=2.0, gradient=3.0)))
    p.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step(samples=4)
    assert p.tolist() == [-6.0, -6.0]
    assert optimizer.last is not None
    assert (optimizer.last.lr_base, optimizer.last.lr, optimizer.last.multiplier) == (1.0, 2.0, 6.0)
