"""A user's own loop: what it may do, and what is refused because the training would be silently wrong."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import ConfigError, InputError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from optim.small_regression import SAMPLES, data, model, weights


def elastic(net: nn.Module, *, workers: int = 3, **settings: Any) -> tuple[ElasticOptimizer, ElasticSampler]:
    sampler = settings.pop("sampler", None) or ElasticSampler(SAMPLES, workers, local_batch=8)
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return ElasticOptimizer(inner, **{"rule": "linear", "base_batch": 16, "sampler": sampler} | settings), sampler


def loader_of(sampler: ElasticSampler, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_sampler=sampler, **settings)


def loss_of(net: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1], reduction=reduction)


def trained(epochs: int = 1, **settings: Any) -> torch.Tensor:
    """Weights after the loop of the README."""
    net = model()
    optimizer, sampler = elastic(net, **settings)
    for batch in itertools.chain.from_iterable(loader_of(sampler) for _ in range(epochs)):
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


# Gradients that are not what a step needs ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_clipping_every_micro_batch_is_refused(rule: str) -> None:
    net = model()
    optimizer, sampler = elastic(net, rule=rule)
    batch = next(iter(loader_of(sampler)))
    loss_of(net, batch).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    with pytest.raises(ConfigError, match=r"gradients were changed between backward\(\) and step\(\).*Give clip="):
        optimizer.step()


def test_clipping_that_changes_nothing_is_allowed_and_refused_when_it_clips() -> None:
    """transformers' Trainer clips at an infinite norm, with max_grad_norm=0, in order to log the norm."""
    net = model()
    optimizer, sampler = elastic(net)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), trained(), rtol=1e-12, atol=1e-14)
    loss_of(net, next(iter(loader_of(sampler)))).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
    with pytest.raises(ConfigError, match="gradients were changed"):
        optimizer.step()


def test_a_gradient_that_is_not_finite_is_skipped_although_its_norm_was_logged() -> None:
    net = model()
    optimizer, sampler = elastic(net, on_nonfinite="skip")
    before = weights(net)
    for number, batch in enumerate(itertools.islice(loader_of(sampler), 3)):
        (loss_of(net, batch) * (float("inf") if number == 1 else 1.0)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.updates == 1 and not optimizer.updated
    assert torch.equal(weights(net), before)


def test_clipping_a_step_of_one_micro_batch_is_right_and_allowed() -> None:
    net = model()
    optimizer, sampler = elastic(net, workers=1)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), trained(workers=1, clip=0.01), rtol=1e-6, atol=1e-8)


def test_a_gradient_that_was_replaced_is_noticed() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    loss_of(net, next(iter(loader_of(sampler)))).backward()
    for parameter in net.parameters():
        parameter.grad = parameter.grad * 2 if parameter.grad is not None else None
    with pytest.raises(ConfigError, match="gradients were changed"):
        optimizer.step()


def test_a_step_without_a_gradient_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    batch = next(iter(loader_of(sampler)))
    loss_of(net, batch).backward()
    net.zero_grad()
    with pytest.raises(ConfigError, match="there is no gradient: call backward"):
        optimizer.step()


def test_two_losses_of_a_micro_batch_add_up() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    for batch in loader_of(sampler):
        (loss_of(net, batch) / 4).backward()
        (loss_of(net, batch) * 3 / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), trained(), rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_a_sum_trains_the_same() -> None:
    for rule in ("linear", "adascale"):
        net = model()
        optimizer, sampler = elastic(net, rule=rule, reduction="sum")
        for batch in loader_of(sampler):
            loss_of(net, batch, "sum").backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(weights(net), trained(rule=rule), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_a_mean_over_tokens_weighs_micro_batches_by_their_tokens(rule: str) -> None:
    """Sample i has i % 5 + 1 tokens: the update is that of one backward pass over the tokens of the whole step."""
    tokens = torch.arange(SAMPLES) % 5 + 1
    x, y = data()

    def mean_over_tokens(net: nn.Module, indices: list[int]) -> torch.Tensor:
        count = tokens[indices].double()
        return ((net(x[indices]) - y[indices]).square().flatten() * count).sum() / count.sum()

    net, whole = model(), model()
    optimizer, sampler = elastic(net, rule=rule)
    reference = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    step: list[int] = []
    for indices in sampler:
        mean_over_tokens(net, indices).backward()
        optimizer.step(weight=int(tokens[indices].sum()))
        optimizer.zero_grad()
        step += indices
        if optimizer.updated:
            assert optimizer.last is not None
            reference.param_groups[0]["lr"] = optimizer.last.lr
            mean_over_tokens(whole, step).backward()
            reference.step()
            reference.zero_grad()
            torch.testing.assert_close(weights(net), weights(whole), rtol=1e-9, atol=1e-11)
            step = []
    with pytest.raises(ConfigError, match=r"step\(weight=nan\)"):
        optimizer.step(weight=float("nan"))


# Loops that take other micro-batches than they count ----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
@pytest.mark.parametrize("every", [2, 4])
def test_accumulation_that_the_optimizer_does_not_know_of_is_refused(every: int, workers: int) -> None:
    net = model()
    optimizer, sampler = elastic(net)

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler, num_workers=workers), start=1):
            loss_of(net, batch).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ConfigError, match=f"the loop took {every} micro-batches since the last step"):
        run()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
@pytest.mark.parametrize("bad", [1, 5, 12])
def test_a_micro_batch_that_is_passed_over_is_noticed_at_the_next_step(bad: int, workers: int) -> None:
    """Also at the end of an epoch, when the loader has read everything long before."""
    net = model()
    optimizer, sampler = elastic(net)

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler, num_workers=workers)):
            if number == bad:
                continue
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(sampler) == 14
    with pytest.raises(ConfigError, match="the loop took 2 micro-batches since the last step"):
        run()


def test_the_last_micro_batch_of_an_epoch_passed_over_is_a_warning() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    for number, batch in enumerate(loader_of(sampler)):
        if number < 13:
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.warns(UserWarning, match="gave out 14 micro-batches, of which 13 were trained on"):
        next(iter(loader_of(sampler)))


def test_a_micro_batch_is_left_out_by_skip() -> None:
    """The step is then the mean over its other micro-batches, and the samples count as seen."""
    net, other = model(), model()
    x, y = data()
    optimizer, sampler = elastic(net)
    order = list(ElasticSampler(SAMPLES, 3, local_batch=8))
    for number, batch in enumerate(itertools.islice(loader_of(sampler), 6)):
        if number in (1, 3, 4, 5):
            optimizer.skip()
            assert not optimizer.updated
            continue
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = order[0] + order[2]
    reference = torch.optim.SGD(other.parameters(), lr=0.05 * len(kept) / 16, momentum=0.9)
    loss_of(other, (x[kept], y[kept])).backward()
    reference.step()
    torch.testing.assert_close(weights(net), weights(other), rtol=1e-12, atol=1e-14)
    assert (optimizer.updates, optimizer.progress) == (2, 48.0)
    assert optimizer.last is not None and not optimizer.last.applied


@pytest.mark.parametrize("rule", ["linear", "adascale"])
@pytest.mark.parametrize("left_out", [0, 1])
def test_any_micro_batch_of_a_step_may_be_left_out_with_a_scaler(rule: str, left_out: int) -> None:
    """The first one, too, before which the scale has grown."""

    def run(scaler: torch.amp.GradScaler | None) -> tuple[torch.Tensor, ElasticOptimizer]:
        net = model()
        optimizer, sampler = elastic(net, rule=rule, scaler=scaler)
        for number, batch in enumerate(itertools.islice(loader_of(sampler), 12)):
            if number % 3 == left_out:
                optimizer.skip()
                continue
            loss = loss_of(net, batch)
            (scaler.scale(loss) if scaler is not None else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(net), optimizer

    (plain, reference), (found, optimizer) = run(None), run(torch.amp.GradScaler("cpu", growth_interval=1))
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)
    assert reference.last is not None and optimizer.last is not None
    if reference.last.moments is not None and optimizer.last.moments is not None:
        assert optimizer.last.moments.noise == pytest.approx(reference.last.moments.noise)
    assert optimizer.updates == 4


def test_a_last_micro_batch_without_weight_gives_no_parameter_a_gradient() -> None:
    """Not even one that has none in the others."""
    net, branch = model(), nn.Linear(6, 1).double()
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    inner = torch.optim.SGD([*net.parameters(), *branch.parameters()], lr=0.05, weight_decay=0.1)
    optimizer = ElasticOptimizer(inner, rule="linear", base_batch=16, sampler=sampler)
    before, (x, y) = weights(branch).clone(), data()
    for number, indices in enumerate(itertools.islice(sampler, 3)):
        found = net(x[indices]) + (branch(x[indices]) if number == 2 else 0)
        nn.functional.mse_loss(found, y[indices]).backward()
        optimizer.step(weight=float(number < 2))
    assert optimizer.updated and torch.equal(weights(branch), before)


def test_a_gradient_that_was_left_out_says_nothing_about_the_next_one() -> None:
    """The last tensor has none in the micro-batch after it."""
    net = nn.Sequential(nn.Linear(6, 2), nn.Linear(6, 2)).double()
    optimizer, sampler = elastic(net)
    x, _ = data()
    for number, indices in enumerate(itertools.islice(sampler, 6)):
        part = net[0] if number == 1 else net
        sum(one(x[indices]).sum() for one in (net if part is net else [part])).backward()
        optimizer.skip() if number == 0 else optimizer.step()
    assert optimizer.updates == 2


def test_a_gradient_of_a_step_of_one_micro_batch_says_nothing_about_the_next_one() -> None:
    """Steps of two, one and two micro-batches; the last tensor has a gradient in the second step only."""
    net = nn.Sequential(nn.Linear(6, 2), nn.Linear(6, 2)).double()
    sampler = ElasticSampler(6, 2, local_batch=2)
    optimizer = ElasticOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), "sqrt", base_batch=2, sampler=sampler)
    x, _ = data()
    for number, indices in enumerate(itertools.chain(sampler, sampler)):
        net[int(number == 2)](x[indices]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.updates == 4


def test_a_step_too_many_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    loss_of(net, next(iter(loader_of(sampler)))).backward()
    optimizer.step()
    loss_of(net, data()).backward()
    with pytest.raises(ConfigError, match="called 2 times in this iteration, but only 1 micro-batches were given out"):
        optimizer.step()


def test_own_accumulation_is_supported() -> None:
    """Two micro-batches per call of step(), with losses divided by two, as Lightning and transformers do."""
    net = model()
    sampler = ElasticSampler(96, BatchPlan.constant(3, 48), local_batch=8)  # 3 workers with 2 * 8 samples each
    optimizer, _ = elastic(net, sampler=sampler, accumulation=2)
    for number, indices in enumerate(sampler, start=1):
        x, y = data()
        (loss_of(net, (x[indices], y[indices])) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.updates == 2
    plain = model()
    other = ElasticSampler(96, BatchPlan.constant(3, 48), local_batch=8)
    reference, _ = elastic(plain, sampler=other)
    for indices in other:
        x, y = data()
        loss_of(plain, (x[indices], y[indices])).backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(weights(net), weights(plain), rtol=1e-12, atol=1e-14)


def test_accumulation_that_does_not_fit_into_the_steps_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net, accumulation=2)  # steps of three micro-batches

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler), start=1):
            (loss_of(net, batch) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ConfigError, match="a step of the plan has 3, which is no multiple"):
        run()
    with pytest.raises(ConfigError, match="adascale measures every micro-batch"):
        elastic(net, rule="adascale", accumulation=2)


def test_two_optimizers_share_a_sampler() -> None:
    """As in a GAN: the position is that of the slower one, and both see every micro-batch."""
    nets = model(), model()
    first, sampler = elastic(nets[0])
    second, _ = elastic(nets[1], sampler=sampler)
    for batch in loader_of(sampler):
        for net, optimizer in zip(nets, (first, second), strict=True):
            loss_of(net, batch).backward()
            assert sampler.epoch == 0
            optimizer.step()
            optimizer.zero_grad()
    assert sampler.epoch == 1
    assert torch.equal(weights(nets[0]), trained())
    assert torch.equal(weights(nets[1]), trained())
    with pytest.raises(ConfigError, match=r"leave consume\(\) to its step\(\)"):
        sampler.consume()


def test_an_optimizer_that_is_not_stepped_with_the_others_is_named() -> None:
    nets = model(), model()
    first, sampler = elastic(nets[0])
    second, _ = elastic(nets[1], sampler=sampler)

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler)):
            for net, optimizer in zip(nets, (first, second), strict=True):
                if number % 5 == 0 or optimizer is first:
                    loss_of(net, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(
        ConfigError, match="an optimizer that is not stepped with the others, do not give it the sampler"
    ):
        run()


def test_a_new_optimizer_of_the_same_parameters_takes_the_place_of_the_old_one() -> None:
    """As after parameters were unfrozen; the old one, which somebody still has, does not hold the position."""
    net = model()
    old, sampler = elastic(net)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        old.step()
    new, _ = elastic(net, sampler=sampler)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        new.step()
    assert (sampler.epoch, new.state_dict()["sampler"]["epoch"]) == (2, 2)
    loss_of(net, data()).backward()
    with pytest.raises(ConfigError, match="a later optimizer of the same parameters took the place of this one"):
        old.step()


def test_optimizers_with_parameters_in_common_are_all_stepped_for_every_micro_batch() -> None:
    """As in an InfoGAN, whose third optimizer has the parameters of the other two."""
    nets = model(), model()
    first, sampler = elastic(nets[0])
    second, _ = elastic(nets[1], sampler=sampler)
    both = ElasticOptimizer(
        torch.optim.SGD([*nets[0].parameters(), *nets[1].parameters()], lr=0.01),
        rule="linear", base_batch=16, sampler=sampler,
    )  # fmt: skip
    for epoch in (1, 2):
        for batch in loader_of(sampler):
            for optimizer, trained in ((second, nets[1:]), (first, nets[:1]), (both, nets)):
                optimizer.zero_grad()
                sum(loss_of(net, batch) for net in trained).backward()
                optimizer.step()
        assert sampler.epoch == epoch
    assert first.updates == second.updates == both.updates > 2


def test_an_optimizer_is_stepped_again_if_the_one_that_took_its_place_is_dropped() -> None:
    net = model()
    kept, sampler = elastic(net)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        kept.step()
    other, _ = elastic(net, sampler=sampler)
    del other
    gc.collect()
    assert sampler.epoch == 1
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        kept.step()
    assert sampler.epoch == 2


def test_an_optimizer_that_is_never_stepped_again_is_noticed_in_the_second_step_without_it() -> None:
    nets = model(), model()
    kept, sampler = elastic(nets[0])
    for batch in loader_of(sampler):
        loss_of(nets[0], batch).backward()
        kept.step()
    other, _ = elastic(nets[1], sampler=sampler)

    def run() -> None:
        for batch in loader_of(sampler):
            loss_of(nets[1], batch).backward()
            other.step()

    with pytest.raises(ConfigError, match="2 optimizers share the sampler, and not all of them were stepped"):
        run()
    assert other.updates == 1 and kept.updates > 1


def test_an_optimizer_that_nobody_has_any_more_does_not_hold_the_position() -> None:
    nets = model(), model()
    optimizer, sampler = elastic(nets[0])
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # it refers to the optimizer, which refers to itself then
    other, _ = elastic(nets[1], sampler=sampler)
    del optimizer
    for batch in loader_of(sampler):
        loss_of(nets[1], batch).backward()
        other.step()
    assert sampler.epoch == 1


# Updates, not micro-batches -----------------------------------------------------------------------------------------


def test_a_scheduler_stepped_for_every_micro_batch_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def run() -> None:
        for batch in loader_of(sampler):
            loss_of(net, batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigError, match=r"changed from 0.05 to 0.045 in the middle of a step.*if optimizer.updated"):
        run()


def test_schedulers_that_follow_updates_end_with_the_run() -> None:
    """OneCycleLR raises if it is stepped more often than total_steps."""
    for plan in (BatchPlan.constant(3, 24), BatchPlan.constant(8, 32)):
        net = model()
        sampler = ElasticSampler(SAMPLES, plan, local_batch=8)
        optimizer, _ = elastic(net, sampler=sampler)
        total = sampler.total_updates(3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        for batch in itertools.chain.from_iterable(loader_of(sampler) for _ in range(3)):
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.updated and optimizer.updates < total:
                scheduler.step()
        assert optimizer.updates == total == scheduler.last_epoch + 1


def test_a_schedule_beside_a_scheduler_of_torch_is_refused() -> None:
    net = model()
    optimizer, sampler = elastic(net, workers=1, schedule="cosine", epochs=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def run() -> None:
        for batch in loader_of(sampler):
            loss_of(net, batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigError, match="use either schedule= or a scheduler of torch"):
        run()


def test_a_constant_scheduler_beside_a_schedule_changes_nothing() -> None:
    """transformers' Trainer always has a scheduler; a constant one sets the initial rate again and again."""
    nets = model(), model()
    for net, constant in zip(nets, (True, False), strict=True):
        optimizer, sampler = elastic(net, schedule="cosine", epochs=1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for batch in loader_of(sampler):
            loss_of(net, batch).backward()
            optimizer.step()
            if constant:
                scheduler.step()
            optimizer.zero_grad()
    assert torch.equal(weights(nets[0]), weights(nets[1]))


def test_the_length_of_a_loader_stays_the_same_while_it_is_read() -> None:
    net = model()
    optimizer, sampler = elastic(net)
    loader = loader_of(sampler)
    lengths = []
    for batch in loader:
        lengths.append(len(loader))
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lengths == [14] * 14


def test_a_closure_is_called_once_and_its_result_returned() -> None:
    """Lightning passes one that clears the gradients before the backward pass."""
    net = model()
    optimizer, sampler = elastic(net)
    for batch in loader_of(sampler):

        def closure(batch: Any = batch) -> torch.Tensor:
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            return loss

        with torch.no_grad():
            assert optimizer.step(closure).item() > 0
    assert torch.equal(weights(net), trained())


# Loaders ------------------------------------------------------------------------------------------------------------


def test_a_sampler_given_as_sampler_is_refused() -> None:
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    with pytest.raises(ConfigError, match=r"passed to a DataLoader as sampler=.*pass it as batch_sampler="):
        next(iter(DataLoader(TensorDataset(*data()), sampler=sampler, batch_size=4)))


def test_a_loader_that_skips_batches_to_resume_is_refused() -> None:
    class SkipBatchSampler(BatchSampler):
        """As accelerate's, which transformers' Trainer uses."""

        def __init__(self, batch_sampler: Any, skip_batches: int) -> None:
            self.batch_sampler = batch_sampler
            self.skip_batches = skip_batches

        def __iter__(self) -> Iterator[list[int]]:
            yield from itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    loader = DataLoader(TensorDataset(*data()), batch_sampler=SkipBatchSampler(sampler, 4))
    with pytest.raises(ConfigError, match=r"SkipBatchSampler skips 4 batches.*ignore_data_skip=True"):
        next(iter(loader))


def test_an_epoch_that_comes_again_because_nobody_consumes_it_is_a_warning() -> None:
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    for _ in loader_of(sampler):
        pass
    with pytest.warns(UserWarning, match=r"of which 0 were trained on.*Pass sampler= to ElasticOptimizer"):
        next(iter(loader_of(sampler)))


@pytest.mark.parametrize("end", ["break", "whole", "set_epoch first"])
def test_set_epoch_in_the_middle_of_an_epoch_warns(end: str) -> None:
    net = model()
    optimizer, sampler = elastic(net)
    for number, batch in enumerate(loader_of(sampler)):
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if end == "break" and number == 3:
            break
    if end == "break":
        with pytest.warns(UserWarning, match=r"set_epoch\(1\) in the middle of epoch 0 leaves out 85 of its 109"):
            sampler.set_epoch(1)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1 if end == "whole" else 2)


def test_set_epoch_that_goes_back_is_refused() -> None:
    """accelerate's loaders call it with a count of their own, which a loop that was left early does not raise."""
    net = model()
    optimizer, sampler = elastic(net)
    for batch in loader_of(sampler):
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"set_epoch\(0\) would leave epoch 1.*create a new sampler"):
        sampler.set_epoch(0)


@pytest.mark.parametrize("epoch", [0, 2])
def test_another_epoch_than_the_restored_one_is_refused(epoch: int) -> None:
    """Frameworks count epochs themselves, and wrongly after a resume: it would be repeated or left out."""
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    sampler.set_epoch(1)
    resumed = ElasticSampler(SAMPLES, 3, local_batch=8)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match=rf"set_epoch\({epoch}\) would leave epoch 1.*sampler.epoch"):
        resumed.set_epoch(epoch)
    resumed.set_epoch(1)
    list(resumed)
    resumed.set_epoch(2)


def test_a_state_of_the_start_leaves_the_epoch_open() -> None:
    """accelerate saves and loads the state of every optimizer that it prepares."""
    sampler = ElasticSampler(SAMPLES, 3, local_batch=8)
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(5)
    assert sampler.epoch == 5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ElasticSampler(10, "constant(workers=3)"), "unknown policy 'constant'"),
        (lambda: ElasticSampler(10, 3.5), "plan is 3.5; expected a BatchPlan.*a policy"),
        (lambda: ElasticSampler(_Stream(), 3, local_batch=8), "expected a map-style data set"),
    ],
)
def test_what_is_no_plan_or_no_data_set_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()


class _Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))
