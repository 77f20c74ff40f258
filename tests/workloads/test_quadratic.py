"""The noisy quadratic model: hand-derived values, the exact recursion, and the whole flow compared with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from subprocess import run as run_process

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbflow import workloads
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.nqm import NoisyQuadratic, SecondMoments, best_rate, expected_run
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.optimizers import build_optimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.flow import Flow
from ebbflow.traces import Trace
from ebbflow.workloads import Recipe
from ebbflow.workloads.quadratic import quadratic_task

ONE = NoisyQuadratic.power_law(dim=1)
"""h = c = 1."""
RECIPE = Recipe(
    ref_batch=8, local_batch=8, lr=0.2, optimizer="sgd", schedule="constant", epochs=1, metric="loss",
    higher_is_better=False,
)  # fmt: skip


# ---- the recursion, by hand: one coordinate from w = 1 at rate 0.5, a step of 4 samples and a step of 1 ----


def two_steps(*, momentum: float = 0.0, gradient: float = 1.0) -> SecondMoments:
    first = SecondMoments.at(1.0, 1).stepped(ONE, batch=4, lr=0.5, momentum=momentum)
    return first.stepped(ONE, batch=1, lr=0.5, momentum=momentum, gradient=gradient)


def test_two_steps_without_momentum() -> None:
    # w1 = 1/2 - e1/2 with var(e1) = 1/4; w2 = w1/2 - e2/2 = 1/4 - e1/4 - e2/2 with var(e2) = 1:
    # E[w2^2] = 1/16 + (1/16)(1/4) + 1/4 = 0.328125
    second = two_steps()
    assert second.ww[0] == pytest.approx(0.328125, rel=1e-15)
    assert ONE.loss(second.ww) == pytest.approx(0.1640625, rel=1e-15)


def test_two_steps_with_momentum() -> None:
    # u1 = 1 + e1, w1 = 1/2 - e1/2; u2 = u1/2 + w1 + e2 = 1 + e2; w2 = w1 - u2/2 = -e1/2 - e2/2:
    # E[w2^2] = (1/4)(1/4) + 1/4 = 0.3125, E[w2 u2] = -1/2, E[u2^2] = 2
    second = two_steps(momentum=0.5)
    assert (second.ww[0], second.wu[0], second.uu[0]) == pytest.approx((0.3125, -0.5, 2.0), rel=1e-15)


def test_a_multiplier_inside_the_momentum_leaves_the_older_gradients_as_they_were() -> None:
    # u2 = u1/2 + 2 (w1 + e2) = 3/2 - e1/2 + 2 e2; w2 = w1 - u2/2 = -1/4 - e1/4 - e2:
    # E[w2^2] = 1/16 + (1/16)(1/4) + 1 = 1.078125
    assert two_steps(momentum=0.5, gradient=2.0).ww[0] == pytest.approx(1.078125, rel=1e-15)


def test_weight_decay_is_coupled_and_multiplied_with_the_gradient() -> None:
    # w1 = 1 - (1/2)(1 + 1/2 + e) = 1/4 - e/2 with var(e) = 1/4: E[w1^2] = 1/16 + 1/16
    start = SecondMoments.at(1.0, 1)
    assert start.stepped(ONE, batch=4, lr=0.5, weight_decay=0.5).ww[0] == pytest.approx(0.125, rel=1e-15)
    # Without momentum, inside and outside are the same.
    inside = start.stepped(ONE, batch=4, lr=0.25, weight_decay=0.5, gradient=2.0)
    assert inside.ww[0] == pytest.approx(0.125, rel=1e-15)


def test_noise_and_signal_are_known() -> None:
    model = NoisyQuadratic.power_law(dim=3, alpha=1.0, noise=2.0, layers=2)
    squares = np.array([1.0, 4.0, 9.0])
    # c = (2, 1, 2/3); h^2 w^2 = (1, 4/4, 9/9); the first layer holds two coordinates.
    assert model.total_noise == pytest.approx(11 / 3)
    assert model.signal(squares) == pytest.approx(3.0)
    moments = model.moments(squares)
    assert (moments.layer_noise, moments.layer_signal) == (pytest.approx((3.0, 2 / 3)), pytest.approx((2.0, 1.0)))
    assert (moments.noise, moments.signal) == (pytest.approx(11 / 3), pytest.approx(3.0))


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 0.5)), max_size=30), st.floats(0.0, 0.95))
def test_second_moments_stay_second_moments(steps: list[tuple[int, float]], momentum: float) -> None:
    model = NoisyQuadratic.power_law(dim=5)
    second = SecondMoments.at(1.0, 5)
    for batch, lr in steps:
        second = second.stepped(model, batch=batch, lr=lr, momentum=momentum)
        bound = second.ww * second.uu
        assert np.all(second.ww >= 0)
        assert np.all(second.wu**2 <= bound * (1 + 1e-9) + 1e-12)  # Cauchy and Schwarz


def test_without_noise_the_recursion_is_torch_s_own_optimizer() -> None:
    model = NoisyQuadratic.power_law(dim=6, noise=0.0)
    w = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.01)
    second, h = SecondMoments.at(1.0, 6), torch.tensor(model.curvature)
    for lr in np.linspace(0.05, 0.4, 40):
        optimizer.param_groups[0]["lr"] = float(lr)
        w.grad = h * w.detach()
        optimizer.step()
        second = second.stepped(model, batch=1, lr=float(lr), momentum=0.9, weight_decay=0.01)
    np.testing.assert_allclose(second.ww, w.detach().numpy() ** 2, rtol=1e-9, atol=1e-15)


# ---- the flow: what rules do to the sampled model is what the recursion says ----


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of this size are slower with more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


COPIES, DIM = 3000, 4
CHANGING = "0s:1 12s:4 20s:2 24s:1 32s"
"""Workers of eight samples each, one step per second: 12 steps of 8, 8 of 32, 4 of 16, 8 of 8."""


def small_model() -> NoisyQuadratic:
    return NoisyQuadratic.power_law(dim=DIM, alpha=1.0, noise=4.0)


def copies_of(model: NoisyQuadratic, copies: int) -> NoisyQuadratic:
    """Coordinates are independent of each other, so many copies in one run are equivalent to many independent runs."""
    return NoisyQuadratic(np.tile(model.curvature, copies), np.tile(model.noise, copies), (model.noise.size * copies,))


def flow_on(model: NoisyQuadratic, rule: str, optimizer: str, *, schedule: str = "constant", seed: int = 0) -> Flow:
    plan = BatchPlan.from_trace(Trace.parse(CHANGING), "follow(8)", "1s")
    samples = 12 * 8 + 8 * 32 + 4 * 16 + 8 * 8
    task = quadratic_task(model, RECIPE, samples=samples)
    elastic = ElasticOptimizer(
        build_optimizer(optimizer, task.model, lr=RECIPE.lr),
        rule,
        base_batch=RECIPE.ref_batch,
        schedule=schedule,
        epochs=1,
        epoch_samples=samples,
    )
    engine = LoopEngine(
        task.model,
        lambda indices: task.train.batch(indices, train=True),
        task.loss,
        plan,
        samples=samples,
        seed=seed,
        micro_batch=4,  # two micro-batches or more in every step, so that noise can be told from signal
        needs=elastic.rule.needs,
        parameters=elastic.layers,  # type: ignore[arg-type]
    )
    return Flow(engine, elastic, Ledger(samples=samples), total_samples=samples)


def losses_of_copies(flow: Flow, model: NoisyQuadratic) -> np.ndarray:
    weights = torch.cat([p.detach() for p in flow.engine.model.parameters()]).double().numpy()  # type: ignore[attr-defined]
    return weights.reshape(-1, DIM) ** 2 @ model.curvature / 2


@pytest.mark.parametrize("rule", ["constant", "sqrt", "linear", "linear+inside", "linear+ramp"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.8, 0.1)])
def test_the_mean_of_sampled_runs_is_the_expected_loss(rule: str, momentum: float, decay: float) -> None:
    model = small_model()
    optimizer = f"sgd(momentum={momentum}, weight_decay={decay})"
    flow = flow_on(copies_of(model, COPIES), rule, optimizer, schedule="cosine")
    batches, seen = [], {}
    while flow.ledger.total < flow.total_samples:
        row = flow.run_step()
        assert row is not None
        batches.append(row.batch)
        if flow.step in (5, 12, 14, 20, 24, 32):
            seen[flow.step] = losses_of_copies(flow, model)
    assert batches == [8] * 12 + [32] * 8 + [16] * 4 + [8] * 8
    expected = expected_run(
        model, rule, batches, lr=RECIPE.lr, ref_batch=8, momentum=momentum, weight_decay=decay, schedule="cosine"
    )
    for step, losses in seen.items():
        error = losses.std(ddof=1) / math.sqrt(COPIES)
        assert abs(losses.mean() - expected.loss[step]) < 3 * error, f"step {step}"
        assert error < 0.05 * expected.loss[step], "too noisy to prove anything"


def test_adascale_measures_the_true_noise_and_signal_and_scales_accordingly() -> None:
    # The copies share one measurement, whose errors shrink with their number: the rule sees the true noise and signal.
    model = small_model()
    flow = flow_on(copies_of(model, COPIES), "adascale", "sgd(momentum=0.9)", schedule="cosine")
    rows = []
    while flow.ledger.total < flow.total_samples:
        rows.append(flow.run_step())
    batches = [row.batch for row in rows if row is not None]
    options = {"lr": RECIPE.lr, "ref_batch": 8, "momentum": 0.9}
    expected = expected_run(model, "adascale", batches, schedule="cosine", memory=1000 * 8, **options)  # type: ignore[arg-type]
    for row, scaling in zip(rows, expected.scalings, strict=True):
        assert row is not None
        assert row.stats["noise"] / COPIES == pytest.approx(scaling.stats["noise"], rel=0.05)
        assert row.stats["signal"] / COPIES == pytest.approx(scaling.stats["signal"], rel=0.1)
        assert row.multiplier == pytest.approx(scaling.multiplier, rel=0.03)
    losses = losses_of_copies(flow, model)
    error = losses.std(ddof=1) / math.sqrt(COPIES)
    assert abs(losses.mean() - expected.loss[-1]) < 3 * error
    # The gain at the large batches lies strictly between the constant rule's and the linear rule's.
    assert 1.2 < expected.scalings[15].multiplier < 3.8


def test_the_check_tells_rules_apart() -> None:
    model = small_model()
    ends = {rule: expected_run(model, rule, [8] * 12 + [32] * 8, lr=0.2, ref_batch=8) for rule in ("sqrt", "linear")}
    assert ends["linear"].loss[-1] > 1.2 * ends["sqrt"].loss[-1]


def test_seeds_are_independent_runs_of_the_same_model() -> None:
    model = small_model()
    ends = []
    for seed in range(64):
        flow = flow_on(model, "linear", "sgd(momentum=0.9)", seed=seed)
        for _ in range(20):
            flow.run_step()
        ends.append(losses_of_copies(flow, model)[0])
    expected = expected_run(model, "linear", [8] * 12 + [32] * 8, lr=0.2, ref_batch=8, momentum=0.9).loss[-1]
    assert len(set(ends)) == 64
    assert abs(np.mean(ends) - expected) < 3 * np.std(ends, ddof=1) / 8


def test_noise_is_fresh_in_every_epoch_and_the_same_when_repeated() -> None:
    source = workloads.build("quadratic(dim=3, layers=1)").train
    index = np.arange(4)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return source.batch(index, train=True)[0]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not source.batch(index, train=False)[0].any()


def test_the_noise_of_a_whole_epoch_does_not_cancel() -> None:
    # Rows of a finite set would: the mean over all of them is the same in every epoch. Draws have variance c/n.
    source = workloads.build("quadratic(dim=2, noise=9, layers=2)").train
    torch.manual_seed(0)
    means = torch.stack([source.batch(np.arange(50), train=True)[0].mean(0) for _ in range(2000)])
    # Var = 9 (1, 1/2)/50; the variance of 2000 draws has the relative error sqrt(2/2000) = 0.032.
    torch.testing.assert_close(means.var(0), torch.tensor([0.18, 0.09]), rtol=0.1, atol=0.0)


def test_measured_noise_and_signal_are_the_true_ones() -> None:
    task = workloads.build("quadratic(dim=16, layers=1)")
    model = NoisyQuadratic.power_law(dim=16)
    torch.manual_seed(0)
    estimates = []
    for _ in range(1500):
        micro_batches = []
        for size in (2, 5, 9):  # uneven on purpose
            loss = task.loss(task.model, *task.train.batch(np.arange(size), train=True))
            (gradient,) = torch.autograd.grad(loss, list(task.model.parameters()))
            micro_batches.append((size, gradient))
        mean = sum(size / 16 * gradient for size, gradient in micro_batches)
        assert isinstance(mean, torch.Tensor)
        a = sum(size / 16 * float(gradient @ gradient) for size, gradient in micro_batches)
        measured = Measurement(batch=16, micro_batches=3, mean_sq=(a,), sq_mean=(float(mean @ mean),))
        noise, signal = measured.estimate()
        estimates.append((noise[0], signal[0]))
    found = np.array(estimates)
    error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    true = np.array([model.total_noise, model.signal(np.ones(16))])
    assert np.all(np.abs(found.mean(axis=0) - true) < 3 * error)
    assert np.all(error < 0.05 * true)


# ---- the workload ----


def test_the_validation_loss_is_exact_and_training_lowers_it() -> None:
    task = workloads.build("quadratic(dim=4, alpha=1, noise=1)")
    # 1/2 (1 + 1/2 + 1/3 + 1/4) at w = 1
    assert task.evaluate(task.model) == {"loss": pytest.approx(25 / 24)}
    assert len(list(task.model.parameters())) == 4
    assert task.describe()["parameters"] == 4


def test_the_rate_of_the_recipe_is_the_best_of_the_recursion() -> None:
    recipe = workloads.recipe("quadratic")
    task = workloads.build("quadratic")
    best = best_rate(
        NoisyQuadratic.power_law(), ref_batch=recipe.ref_batch, samples=recipe.epochs * len(task.train),
        momentum=0.9, schedule=recipe.schedule, rates=np.array([0.02, 0.025, 0.03, 0.036, 0.043]),
    )  # fmt: skip
    assert best == recipe.lr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quadratic(dim=0)", "dim is 0"),
        ("quadratic(dim=4, layers=5)", "layers is 5; expected 1 <= layers <= dim"),
        ("quadratic(noise=-1)", "noise is -1"),
        ("quadratic(alpha=-1)", "alpha is -1"),
        ("quadratic(samples=0)", "samples is 0"),
    ],
)
def test_impossible_models_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        workloads.build(text)


def test_a_rate_that_is_too_large_gives_an_infinite_loss_and_no_warning() -> None:
    run = expected_run(NoisyQuadratic.power_law(dim=2), "constant", [8] * 2000, lr=5.0, ref_batch=8)
    assert not math.isfinite(run.loss[-1])


def test_each_layer_moves_by_its_own_rate() -> None:
    class Layered(type(_rule("constant"))):  # type: ignore[misc]
        """The first layer stands still."""

        def scale(self, context, state):  # type: ignore[no-untyped-def]
            scaling, state = super().scale(context, state)
            return type(scaling)(lr=(0.0, 1.0)), state

    chain = _rule("constant")
    layered = Layered(chain.rule, chain.modifiers, chain.text)
    model = NoisyQuadratic.power_law(dim=4, layers=2)
    run = expected_run(model, layered, [8] * 5, lr=0.1, ref_batch=8)
    plain = expected_run(model, "constant", [8] * 5, lr=0.1, ref_batch=8)
    assert run.end.ww[:2].tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(run.end.ww[2:], plain.end.ww[2:])


def _rule(text: str):  # type: ignore[no-untyped-def]
    from ebbflow.rules.rule import make_rule

    return make_rule(text)


@pytest.mark.process
def test_the_recursion_does_not_import_torch() -> None:
    code = "import sys, ebbflow.nqm; sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code], check=False).returncode == 0
