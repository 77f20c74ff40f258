from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.optimizers import OPTIMIZERS, build_optimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.rules.rule import Rule, Scaling, State, StepContext
from optim.small_regression import SAMPLES, data, model, weights


def train_elastic(
    net: nn.Module, optimizer: ElasticOptimizer, sampler: ElasticSampler, *, micro_batches: int = 10**9
) -> int:
    """The user's loop; stops after the given number of micro-batches."""
    x, y = data()
    done = 0
    for indices in sampler:
        nn.functional.mse_loss(net(x[indices]), y[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == micro_batches:
            break
    return done


def elastic(net: nn.Module, **settings: Any) -> tuple[ElasticOptimizer, ElasticSampler]:
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return ElasticOptimizer(inner, **{"rule": "linear", "base_batch": 16, "sampler": sampler} | settings), sampler


def test_micro_batches_of_any_sizes_equal_one_large_batch() -> None:
    """Steps of 24 (and a tail of 13, in micro-batches of 7 and 6) equal plain SGD on whole batches, at the scaled
    rate."""
    net = model()
    optimizer, sampler = elastic(net)
    train_elastic(net, optimizer, sampler)

    plain = model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    x, y = data()
    order = [i for micro_batch in ElasticSampler(SAMPLES, 3, local_batch=8) for i in micro_batch]
    for start in range(0, SAMPLES, 24):
        batch = order[start : start + 24]
        reference.param_groups[0]["lr"] = 0.05 * len(batch) / 16
        reference.zero_grad()
        nn.functional.mse_loss(plain(x[batch]), y[batch]).backward()
        reference.step()
    torch.testing.assert_close(weights(net), weights(plain), rtol=1e-12, atol=1e-13)


def test_the_groups_hold_the_base_rate_before_and_after_every_step() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    seen: list[float] = []
    optimizer.inner.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    train_elastic(net, optimizer, sampler)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen[0] == pytest.approx(0.05 * 24 / 16)
    assert seen[-1] == pytest.approx(0.05 * 13 / 16)  # the tail of 109 = 4 * 24 + 13


def test_the_rate_is_put_back_when_the_inner_step_raises() -> None:
    net = model()
    optimizer, _ = elastic(net, sampler=None)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    optimizer.inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step(samples=64)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_clearing_the_gradients_of_the_model_between_micro_batches_loses_nothing() -> None:
    """As transformers' Trainer does; also before the backward pass, as many loops do."""
    nets = model(), model()
    for net, clear in zip(nets, (lambda net: None, lambda net: net.zero_grad()), strict=True):
        optimizer, sampler = elastic(net)
        x, y = data()
        for indices in sampler:
            clear(net)
            loss = nn.functional.mse_loss(net(x[indices]), y[indices])
            clear(net)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clear(net)
    assert torch.equal(weights(nets[0]), weights(nets[1]))


def test_it_is_an_optimizer_of_torch_with_hooks_and_defaults_of_its_own() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train_elastic(net, optimizer, sampler, micro_batches=5)
    assert calls == ["before", "after"]  # once per update, not per micro-batch
    assert optimizer.defaults["momentum"] == 0.9
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state


def test_a_scheduler_of_torch_sees_the_base_rate() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    train_elastic(net, optimizer, sampler)
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.005)
    assert scheduler.get_last_lr() == [pytest.approx(0.005)]


def test_a_schedule_counts_samples_not_steps() -> None:
    net = model()
    optimizer, sampler = elastic(net, schedule="multistep(1ep, factor=0.5)", epochs=2)
    for _ in range(2):
        train_elastic(net, optimizer, sampler)
    update = optimizer.update(
        StepContext(step=99, batch=16, ref_batch=16, samples=SAMPLES, epoch_samples=SAMPLES, total_samples=2 * SAMPLES)
    )
    assert (update.lr_base, update.lr, update.multiplier) == (0.025, 0.025, 1.0)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_at_the_reference_batch_every_optimizer_is_itself_bit_for_bit(name: str) -> None:
    x, y = data()
    nets = model(), model()
    plain = build_optimizer(name, nets[0].parameters(), lr=0.01)
    wrapped = ElasticOptimizer(build_optimizer(name, nets[1].parameters(), lr=0.01), "sqrt", base_batch=SAMPLES)
    for _ in range(5):
        for net in nets:
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
        plain.step()
        wrapped.step(samples=SAMPLES)
    assert torch.equal(weights(nets[0]), weights(nets[1]))


@pytest.mark.parametrize("rule", ["linear+warmup(1ep)", "auto(limit=1)"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 13, 14, 20])
def test_a_resumed_run_equals_an_uninterrupted_one(micro_batches: int, rule: str) -> None:
    """Also when the checkpoint is taken in the middle of a step: the step is then repeated as a whole."""
    whole = model()
    optimizer, sampler = elastic(whole, rule=rule, schedule="cosine", epochs=2)
    for _ in range(2):
        train_elastic(whole, optimizer, sampler)

    first = model()
    optimizer, sampler = elastic(first, rule=rule, schedule="cosine", epochs=2)
    left = micro_batches
    while left:
        left -= train_elastic(first, optimizer, sampler, micro_batches=left)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = model()
    optimizer, sampler = elastic(second, rule=rule, schedule="cosine", epochs=2)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    while sampler.epoch < 2:
        train_elastic(second, optimizer, sampler)
    assert torch.equal(weights(second), weights(whole))


def test_a_state_of_another_rule_or_batch_is_refused() -> None:
    optimizer, _ = elastic(model())
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="saved with rule 'linear', this optimizer has 'sqrt'"):
        elastic(model(), rule="sqrt")[0].load_state_dict(state)
    with pytest.raises(CheckpointError, match="base_batch 16"):
        elastic(model(), base_batch=32)[0].load_state_dict(state)


def test_a_state_of_another_kind_of_optimizer_or_of_other_groups_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    torch.optim.lr_scheduler.ConstantLR(optimizer.inner)  # leaves a note in the groups, which makes no other kind
    train_elastic(net, optimizer, sampler)
    state = copy.deepcopy(optimizer.state_dict())
    sampler, net = ElasticSampler(SAMPLES, 3, local_batch=8), model()
    settings = {"rule": "linear", "base_batch": 16, "sampler": sampler}
    adam = torch.optim.Adam(net.parameters())
    with pytest.raises(CheckpointError, match=r"has dampening, momentum, nesterov, but Adam has amsgrad, .* instead"):
        ElasticOptimizer(adam, **settings).load_state_dict(state)
    groups = torch.optim.SGD([{"params": [parameter]} for parameter in net.parameters()], lr=0.1)
    with pytest.raises(CheckpointError, match=r"does not fit this SGD: .*groups.* with the same groups of parameters"):
        ElasticOptimizer(groups, **settings).load_state_dict(state)


def test_a_state_that_is_refused_changes_nothing_and_one_of_plain_torch_says_what_it_is() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    train_elastic(net, optimizer, sampler)
    state = optimizer.state_dict()
    optimizer, sampler = elastic(model())
    with pytest.raises(CheckpointError, match="saved with seed 7, this sampler has 0"):
        optimizer.load_state_dict({**state, "sampler": {**state["sampler"], "seed": 7}})
    assert (optimizer.updates, sampler.position) == (0, 0)
    with pytest.raises(CheckpointError, match="the state is that of an optimizer of torch, without a position"):
        optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())


def test_a_run_of_billions_of_samples_ends_with_its_last_sample() -> None:
    samples = 4 * 10**9
    optimizer, _ = elastic(model(), sampler=None, epochs=1, epoch_samples=samples)
    optimizer.update(StepContext(step=0, batch=16, ref_batch=16, samples=samples - 18))
    assert not optimizer.finished  # two are left
    optimizer.update(StepContext(step=1, batch=2, ref_batch=16, samples=samples - 2))
    assert optimizer.finished


def test_a_group_added_later_follows_the_rule_too() -> None:
    net, more = model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, _ = elastic(net, sampler=None, schedule="constant")
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    more.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step(samples=32)
    assert more.tolist() == [0.0, 0.0]  # 1 - 0.5 * (32/16) * 1


def test_misuse_says_what_to_do() -> None:
    net = model()
    optimizer, _ = elastic(net, sampler=None)
    with pytest.raises(ConfigError, match="or sampler= to ElasticOptimizer"):
        optimizer.step()
    for wrong in (0, math.nan, 1.5, True, "16"):
        with pytest.raises(ConfigError, match=f"base_batch, .* is {wrong!r}; expected a whole number from 1"):
            elastic(net, base_batch=wrong)
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        ElasticOptimizer(torch.optim.LBFGS(net.parameters()), base_batch=16)
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        elastic(net, sampler=ElasticSampler(SAMPLES, 3, local_batch=8, rank=1, world_size=2))


def test_the_public_names_are_the_ones_the_readme_uses() -> None:
    assert ebbflow.ElasticOptimizer is ElasticOptimizer
    assert ebbflow.ElasticSampler is ElasticSampler
    assert ebbflow.BatchPlan is BatchPlan


def test_what_only_micro_batches_have_is_refused_without_a_sampler() -> None:
    """Each of these would otherwise have no effect: a summed loss of 8 samples would be a rate of 8 times the base."""
    net = model()
    for setting in ({"reduction": "sum"}, {"accumulation": 4}):
        with pytest.raises(ConfigError, match="takes the mean gradient of a whole step; divide the loss"):
            elastic(net, sampler=None, **setting)
    optimizer, _ = elastic(net, sampler=None, schedule="constant")
    with pytest.raises(ConfigError, match=r"step\(weight=0\.5\): without a sampler every call is a whole step"):
        optimizer.step(samples=8, weight=0.5)


@pytest.mark.parametrize("samples", [0, -8])
def test_a_step_of_no_samples_is_refused(samples: int) -> None:
    """The linear rule would make a rate of nothing of it, or a negative one."""
    net = model()
    optimizer, _ = elastic(net, sampler=None, schedule="constant")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net(torch.ones(2, next(net.parameters()).shape[1], dtype=torch.float64)).sum().backward()
    with pytest.raises(ConfigError, match=rf"step\(samples={samples}\): pass the step's samples"):
        optimizer.step(samples=samples)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_an_own_rule_is_tried_before_training() -> None:
    class Backwards(Rule):
        def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
            return Scaling(lr=-context.ratio), state

    class Bare(Rule):
        def scale(self, context: StepContext, state: State) -> Any:
            return Scaling()

    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ConfigError, match="returned the multiplier -2; expected 0 or more"):
        ElasticOptimizer(inner, rule=Backwards(), base_batch=8)
    with pytest.raises(ConfigError, match=r"scale\(\) returned Scaling\(.*; expected a pair"):
        ElasticOptimizer(inner, rule=Bare(), base_batch=8)


class Returns(Rule):
    """A rule that returns the same in every step."""

    def __init__(self, scaling: Scaling, state: State = None) -> None:
        self.scaling, self.state = scaling, state

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        return self.scaling, self.state


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        (Scaling(lr=math.nan), "the multiplier nan; expected a finite number, 0 or more"),
        (Scaling(gradient=np.float32(np.inf)), "the multiplier inf; expected a finite number, 0 or more"),
        (Scaling(lr=np.ones(2)), r"a Scaling with lr=array\(\[1., 1.\]\) .*; expected numbers, or a tuple"),
        (Scaling(weight_decay=-1.0), "a Scaling with weight_decay=-1.0; expected a finite number, 0 or more"),
        (Scaling(progress=math.nan), "a Scaling with progress=nan; expected a finite number, 0 or more"),
        (Scaling(stats={"gain": "much"}), "gain='much' among its stats; expected a number"),  # type: ignore[dict-item]
    ],
)
def test_what_a_rule_of_ones_own_returns_is_named_if_it_cannot_be_used(scaling: Scaling, said: str) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ConfigError, match=f"the rule .*Returns.* returned {said}"):
        ElasticOptimizer(inner, rule=Returns(scaling), base_batch=8)


def test_a_rule_may_return_numbers_of_numpy_and_keep_them() -> None:
    scaling = Scaling(lr=np.float32(0.5), gradient=np.int64(2), stats={"gain": np.float64(3)})
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = ElasticOptimizer(torch.optim.SGD([weight], lr=0.1), rule=Returns(scaling, [np.int64(7)]), base_batch=8)
    weight.sum().backward()
    optimizer.step(samples=8)
    assert weight.item() == pytest.approx(0.9)
    assert optimizer.last is not None
    assert [type(value) for value in (optimizer.last.multiplier, optimizer.last.stats["gain"])] == [float, float]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["rule_state"] == [7]


def test_a_state_of_a_rule_that_is_not_read_back_is_refused() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ConfigError, match=r"returned a state with a numpy.ndarray, .* x.tolist\(\) of an array"):
        ElasticOptimizer(inner, rule=Returns(Scaling(), {"past": np.ones(2)}), base_batch=8)


def test_a_scaled_gradient_that_was_unscaled_already_is_refused_in_a_step_of_one_micro_batch() -> None:
    """As in torch's recipe for clipping with a scaler: the step would unscale it once more, and stand still."""
    net = model()
    sampler = ElasticSampler(SAMPLES, 1, local_batch=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer, _ = elastic(net, sampler=sampler, scaler=scaler)
    inputs = torch.ones(8, next(net.parameters()).shape[1], dtype=torch.float64)
    scaler.scale(net(inputs).square().mean()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ConfigError, match=r"the gradients were changed .* as clip_grad_norm_ and unscale_ do"):
        optimizer.step()


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_rate_that_a_step_hook_changes_is_refused_since_it_would_be_put_back(register: str) -> None:
    net = model()
    optimizer, _ = elastic(net, sampler=None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    getattr(optimizer, register)(lambda *_: scheduler.step())
    net(torch.ones(8, next(net.parameters()).shape[1], dtype=torch.float64)).sum().backward()
    with pytest.raises(ConfigError, match=r"rate was changed from .* while the optimizer stepped, by a step hook"):
        optimizer.step(samples=32)


def test_a_sum_that_is_weighted_by_tokens_is_the_mean_over_the_tokens() -> None:
    """Against one backward pass over the whole step: two micro-batches of 3 samples with 4 and 10 tokens."""
    tokens = torch.tensor([1.0, 1.0, 2.0, 5.0, 4.0, 1.0], dtype=torch.float64)
    inputs = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    net, reference = (nn.Linear(1, 1).double() for _ in range(2))
    reference.load_state_dict(net.state_dict())
    sampler = ElasticSampler(6, 2, local_batch=3, shuffle=False)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), "constant", base_batch=6, sampler=sampler, reduction="sum"
    )
    for rows in sampler:
        (tokens[rows] * net(inputs[rows])[:, 0].square()).sum().backward()
        optimizer.step(weight=float(tokens[rows].sum()))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    ((tokens * reference(inputs)[:, 0].square()).sum() / tokens.sum()).backward()
    plain.step()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_optimizer_that_begins_elsewhere_than_its_sampler_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """A script that saves the inner optimizer and the sampler trains all epochs again, with its schedule from 0."""
    net = model()
    sampler = ElasticSampler(SAMPLES, 1, local_batch=8)
    for _ in range(3):
        sampler.consume()
    optimizer, _ = elastic(net, sampler=sampler)
    inputs = torch.ones(8, next(net.parameters()).shape[1], dtype=torch.float64)
    for _ in range(2):
        net(inputs).square().mean().backward()
        optimizer.step()
    said = [
        text for text in caplog.messages if "the sampler is at sample 24 of the training and this optimizer" in text
    ]
    assert len(said) == 1 and "load the state of the ElasticOptimizer" in said[0]
