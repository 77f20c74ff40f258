"""One's own loop on the emulated engine: the same weights as `train`, exactly once, resumable."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import ebbflow
from contract.suite import SAMPLES, BackAndForth, make_data, make_model, weights_of
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.run.loop import Callbacks
from ebbflow.workloads import TensorSource, cross_entropy
from step_counter import Counter

SETTINGS: dict[str, Any] = {"trace": "0s:4 3s:2 7s:5 60s", "base_batch": 8, "local_batch": 4, "epochs": 2, "seed": 7}


def trained(**changes: Any) -> nn.Module:
    model = make_model(batch_norm=True)
    settings = {**SETTINGS, "loss": cross_entropy, **changes}
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **settings) as session:
        session.run()
        assert session.finished
        assert session.epoch == settings["epochs"]
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.Tensor.detach, r"does not depend on a trained parameter; leave out \.detach\(\)"),
        (lambda loss: 1j * loss, "is of type torch.complex128; expected a real number"),
        (lambda loss: None, "is of type NoneType; expected a tensor with one number"),
        (lambda loss: loss.detach().numpy(), "is of type ndarray; expected a tensor with one number"),
        (lambda loss: loss.expand(4), r"has the shape \(4,\); expected one number"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_with_what_was_expected(engine: str, change: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"the loss,? .*{said}"):
        trained(engine=engine, loss=lambda model, x, y: change(cross_entropy(model, x, y)))


@pytest.mark.parametrize("rule", ["linear", "adascale+warmup(1ep)"])
def test_an_own_loop_computes_what_the_session_computes_with_the_loss(rule: str) -> None:
    model, seen = make_model(batch_norm=True), []
    x, y = make_data()
    with ebbflow.Session(model, sgd(model), TensorDataset(x, y), rule=rule, **SETTINGS) as session:
        for step in session:
            for inputs, targets in step:
                seen.append(inputs)
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
    torch.testing.assert_close(weights_of(model), weights_of(trained(rule=rule, engine="loop")), rtol=1e-12, atol=1e-12)
    rows = torch.cat(seen).tolist()
    assert sorted(rows) == sorted(x.tolist() * 2), "every sample once per epoch"


def test_engines_agree_and_one_of_your_own_takes_part() -> None:
    from ebbflow.engines.base import EngineParts
    from ebbflow.engines.emulated import LoopEngine

    def own(parts: EngineParts) -> LoopEngine:
        assert parts.plan is not None
        return LoopEngine(parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed)

    reference = weights_of(trained(engine="loop", rule="linear"))
    for engine in ("auto", "fused", own):
        torch.testing.assert_close(weights_of(trained(engine=engine, rule="linear")), reference, rtol=1e-9, atol=1e-9)


def test_a_session_that_is_left_continues_where_it_was(tmp_path: Path) -> None:
    model = make_model(batch_norm=True)
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), out=tmp_path, **SETTINGS) as session:
        for step in session:
            for inputs, targets in step:
                step.backward(cross_entropy(model, inputs, targets))
            if session.step == 4:
                break
    again = make_model(batch_norm=True)
    with ebbflow.Session(again, sgd(again), TensorSource(*make_data()), out=tmp_path, **SETTINGS) as session:
        assert session.step == 4
        for step in session:
            for inputs, targets in step:
                step.backward(cross_entropy(again, inputs, targets))
        run = session.record
    torch.testing.assert_close(weights_of(again), weights_of(trained(engine="loop")), rtol=1e-12, atol=1e-12)
    assert run.status == "finished"
    assert [row.step for row in run.steps] == list(range(len(run.steps)))
    with (
        pytest.raises(ConfigError, match="holds the finished run of this session; give another out="),
        ebbflow.Session(again, sgd(again), TensorSource(*make_data()), out=tmp_path, **SETTINGS),
    ):
        pass


def test_the_record_is_there_inside_and_behind_the_with(tmp_path: Path) -> None:
    model = make_model()
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), out=tmp_path, **SETTINGS) as session:
        for step in session:
            for inputs, targets in step:
                step.backward(cross_entropy(model, inputs, targets))
            if session.step == 4:
                assert [row.step for row in session.record.steps] == [0, 1, 2, 3]
                break
    run = session.record
    assert (run.status, len(run.steps)) == ("interrupted", 4)
    with ebbflow.Session(
        model, sgd(model), TensorSource(*make_data()), loss=cross_entropy, out=tmp_path, **SETTINGS
    ) as session:
        session.run()
    run = session.record
    assert run.status == "finished"
    assert [row.step for row in run.steps] == list(range(session.step))


def test_another_setting_is_named_as_it_is_given(tmp_path: Path) -> None:
    model = make_model()
    for micro_batch in (None, 2):
        settings = {**SETTINGS, "micro_batch": micro_batch, "out": tmp_path}
        session = ebbflow.Session(model, sgd(model), TensorSource(*make_data()), loss=cross_entropy, **settings)
        if micro_batch is None:
            with session:
                next(iter(session))
        else:
            with pytest.raises(CheckpointError, match=r"other settings \(micro_batch is 2, was None\)"):
                session.__enter__()


def test_a_stopped_run_does_not_silently_go_on_with_its_old_rate(tmp_path: Path) -> None:
    """Torch restores the rate of an optimizer, whatever it was made with."""

    def session(lr: float) -> ebbflow.Session:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return ebbflow.Session(
            model, optimizer, TensorSource(*make_data()), loss=cross_entropy, out=tmp_path, rule="linear", **SETTINGS
        )

    with session(lr=0.1) as first:
        next(iter(first))
    expected = r"made with the learning rate 0\.1, this one was made with 0\.5; go on with that of the run"
    with pytest.raises(CheckpointError, match=expected):
        session(lr=0.5).__enter__()
    with session(lr=0.1) as again:
        again.run()
    assert ebbflow.read_record(tmp_path / "record.jsonl").status == "finished"


def test_a_run_that_diverged_has_ended_and_does_not_go_on_with_its_old_rates(tmp_path: Path) -> None:
    def train(lr: float) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = TensorSource(*make_data())
        with ebbflow.Session(model, optimizer, data, out=tmp_path, rule="linear", **SETTINGS) as session:
            for step in session:
                for inputs, targets in step:
                    step.backward(cross_entropy(model, inputs, targets) * (math.nan if session.step == 2 else 1.0))

    with pytest.raises(Diverged, match="the norm of the gradient is nan at step 2"):
        train(lr=0.1)
    run = ebbflow.read_record(tmp_path / "record.jsonl")
    assert run.status == "diverged"
    assert not (tmp_path / "checkpoint.pt").exists(), "nothing can go on from it"
    with pytest.raises(ConfigError, match="holds a diverged run of this session; give another out="):
        train(lr=0.01)


def test_a_loop_that_asks_whether_the_run_is_finished_ends_it(tmp_path: Path) -> None:
    """It never asks for the step after the last one."""
    model = make_model(batch_norm=True)
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), out=tmp_path, **SETTINGS) as session:
        while not session.finished:
            step = session.next_step()
            assert step is not None
            for inputs, targets in step:
                step.backward(cross_entropy(model, inputs, targets))
            if step.combine():
                step.apply()
    assert ebbflow.read_record(tmp_path / "record.jsonl").status == "finished"
    assert (tmp_path / "weights.pt").exists()
    assert not (tmp_path / "checkpoint.pt").exists()
    torch.testing.assert_close(weights_of(model), weights_of(trained(engine="loop")), rtol=1e-12, atol=1e-12)


def test_a_finished_session_that_is_asked_again_for_a_step_ends_once(tmp_path: Path) -> None:
    model = make_model()
    data = TensorSource(*make_data())
    with ebbflow.Session(model, sgd(model), data, loss=cross_entropy, out=tmp_path, **SETTINGS) as session:
        session.run()
        assert session.next_step() is None
    lines = (tmp_path / "record.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum('"kind":"end"' in line for line in lines) == 1


def test_callbacks_hear_where_a_session_begins_and_goes_on(tmp_path: Path) -> None:
    heard: list[Any] = []
    callbacks = Callbacks(
        on_start=lambda done, total: heard.append(("start", done, total)),
        on_resume=lambda step, epoch: heard.append(("resume", step)),
    )
    settings = {**SETTINGS, "rule": "linear", "out": tmp_path / "run", "callbacks": callbacks}
    for _ in range(2):
        model = make_model()
        with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), loss=cross_entropy, **settings) as session:
            for step in session:
                if step.number == 2:
                    break
            done = session.flow.ledger.total
    assert heard[0] == ("start", 0, 2 * SAMPLES)
    assert heard[1:] == [("resume", 2), ("start", done, 2 * SAMPLES)]


def test_a_session_whose_gain_is_too_small_ends_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without noise a step is worth one reference step, whatever its batch."""
    model = nn.Linear(1, 1)
    x = torch.ones(64, 1)
    settings: dict[str, Any] = {
        "trace": "constant(workers=8)", "base_batch": 1, "local_batch": 8, "epochs": 1, "out": tmp_path / "run",
        "rule": "adascale(progress=gain)", "loss": lambda model, x, y: nn.functional.mse_loss(model(x), y),
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ebbflow.Session(model, optimizer, TensorDataset(x, x), **settings) as session:
        session.run()
        assert session.finished and session.next_step() is None
    assert session.record.status == "failed" and session.epoch == 10
    assert "the run has failed: the gain is too small for the run ever to end" in caplog.text
    with (
        pytest.raises(ConfigError, match="holds a failed run of this session"),
        ebbflow.Session(model, optimizer, TensorDataset(x, x), **settings),
    ):
        pass


def test_plugins_of_a_configuration_are_loaded_before_its_rule_is_looked_up(
    tmp_path: Path, forget_plugins: None
) -> None:
    (tmp_path / "plug.py").write_text(
        "from dataclasses import dataclass\nfrom ebbflow.rules import Rule, Scaling, register_rule\n"
        "@register_rule('cube-root', cite='test')\n@dataclass(frozen=True)\nclass CubeRoot(Rule):\n"
        "    def scale(self, context, state):\n        return Scaling(lr=context.ratio ** (1 / 3)), state\n"
    )
    model = make_model()
    names = {"trace": "constant(workers=2)", "ref_batch": 8, "local_batch": 4, "epochs": 1}
    config = ebbflow.RunConfig(workload="mine", rule="cube-root", plugins=(str(tmp_path / "plug.py"),), **names)
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), loss=cross_entropy, config=config) as session:
        session.run()
        assert session.finished


def test_a_step_that_the_loop_leaves_alone_is_computed_with_the_loss() -> None:
    model = make_model(batch_norm=True)
    data = TensorSource(*make_data())
    with ebbflow.Session(model, sgd(model), data, loss=cross_entropy, engine="loop", **SETTINGS) as session:
        steps = [step.assignment.batch for step in session]
    assert sum(steps) == 2 * SAMPLES
    torch.testing.assert_close(weights_of(model), weights_of(trained(engine="loop")), rtol=1e-12, atol=1e-12)


def test_scores_of_the_user_go_into_the_record(tmp_path: Path) -> None:
    trained(out=tmp_path, evaluate=lambda: {"score": 0.5}, ema=0.9)
    run = ebbflow.read_record(tmp_path / "record.jsonl")
    assert [row.metrics for row in run.validations] == [{"score": 0.5, "ema_score": 0.5}] * 2
    with pytest.raises(ConfigError, match="returned a float; expected the scores by name"):
        trained(evaluate=lambda: 0.5)


def test_mistakes_in_the_loop_are_named() -> None:
    model = make_model(batch_norm=True)
    session = ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **SETTINGS)
    with pytest.raises(ConfigError, match="the session is not open: use it in a `with`"):
        next(iter(session))
    with session:
        steps = iter(session)
        for _ in next(steps):
            pass
        with pytest.raises(ConfigError, match="16 samples of the step, but backward\\(\\) was called for 0"):
            next(steps)
    with session:
        step = next(iter(session))
        with pytest.raises(ConfigError, match="backward\\(\\) was called outside of `for x, y in step`"):
            step.backward(torch.zeros((), requires_grad=True))
    with session, pytest.raises(ConfigError, match="no loss was given"):
        session.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": None}, "epochs is missing: how many passes over the data\\?$"),
        ({"epochs": None, "max_steps": 5}, "virtual workers are planned for the whole run, which max_steps may end"),
        ({"base_batch": None}, "base_batch is missing: at how many samples per step"),
        ({"base_batch": 0}, "^base_batch is 0; expected a number above 0"),
        ({"lr": 0.1}, "lr is no setting here: the optimizer has it"),
        ({"evalute": dict}, "unknown setting 'evalute'; did you mean 'evaluate'"),
        ({"ouput": "runs"}, "unknown setting 'ouput'; did you mean 'out'"),
        ({"extra": {}}, "unknown setting 'extra'; did you mean 'extras'"),
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"calbacks": 1}, "unknown setting 'calbacks'; did you mean 'callbacks'"),
        ({"engine": "fussed"}, "engine is 'fussed'; did you mean 'fused'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(change: dict[str, Any], message: str) -> None:
    model = make_model(batch_norm=True)
    settings = {name: value for name, value in {**SETTINGS, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **settings)


@pytest.mark.parametrize("kind", ["function", "method", "reduction"])
def test_a_loss_that_is_a_sum_is_refused_or_divided(kind: str) -> None:
    """A mean over the samples that ends with a sum over the classes is no sum over the samples."""
    functional = torch.nn.functional
    sums = {
        "function": lambda output, y: functional.cross_entropy(output, y, reduction="sum"),
        "method": lambda output, y: functional.cross_entropy(output, y, reduction="none").sum(),
        "reduction": lambda output, y: (
            functional.nll_loss(output.log_softmax(1), y, reduction="sum").double().squeeze()
        ),
    }

    def weights(loss: Any, **settings: Any) -> torch.Tensor:
        model = make_model()
        session = ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **SETTINGS, **settings)
        with session:
            for step in session:
                for x, y in step:
                    step.backward(loss(model(x), y))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with pytest.raises(ConfigError, match=r"a sum over the \d+ samples.*reduction='sum' to the session"):
        weights(sums[kind])
    mean = weights(lambda output, y: functional.cross_entropy(output, y))
    torch.testing.assert_close(weights(sums[kind], reduction="sum"), mean)
    classes = weights(lambda output, y: (output.log_softmax(1) * functional.one_hot(y, output.shape[1])).mean(0).sum())
    assert classes.isfinite().all()


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Points(Dataset[Point]):
    """Named pairs of two."""

    def __len__(self) -> int:
        return len(make_data()[0])

    def __getitem__(self, index: int) -> Point:
        x, y = make_data()
        return Point(x[index], int(y[index]))


def test_a_loop_gets_named_tuples_and_a_loss_their_fields() -> None:
    models = make_model(), make_model()
    with ebbflow.Session(models[0], sgd(models[0]), Points(), loader_workers=0, **SETTINGS) as session:
        for step in session:
            for batch in step:
                step.backward(nn.functional.cross_entropy(models[0](batch.x), batch.y))
    settings = {**SETTINGS, "loss": cross_entropy, "engine": "loop"}
    with ebbflow.Session(models[1], sgd(models[1]), Points(), loader_workers=0, **settings) as session:
        session.run()
    torch.testing.assert_close(weights_of(models[0]), weights_of(models[1]))


def test_a_model_whose_parameters_are_all_frozen_is_refused() -> None:
    model = make_model().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"the \d+ tensors of the optimizer are all frozen .* nothing to train"):
        ebbflow.Session(model, sgd(model), TensorSource(*make_data()), rule="sqrt", **SETTINGS)


def test_a_model_without_parameters_is_refused() -> None:
    other = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="2 of the 2 tensors of the optimizer do not belong to the model"):
        ebbflow.Session(nn.Identity(), sgd(other), TensorDataset(torch.ones(8, 2)), **SETTINGS)


def test_a_rule_that_measures_refuses_parameters_without_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64))
    session = ebbflow.Session(model, sgd(model), TensorDataset(*make_data()), rule="adascale", **SETTINGS)
    with pytest.raises(ConfigError, match=r"parameter 0 has no shape yet .* call the model once with a batch"):
        session.__enter__()


def test_a_source_of_ones_own_needs_a_length_and_batches_only() -> None:
    class Source:
        def __len__(self) -> int:
            return len(make_data()[0])

        def batch(self, indices: Any, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = make_data()
            return x[indices], y[indices]

    models = make_model(), make_model()
    for model, source in zip(models, (Source(), TensorSource(*make_data())), strict=True):
        with ebbflow.Session(model, sgd(model), source, loss=cross_entropy, **SETTINGS) as session:
            session.run()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_signature_of_a_session_shows_its_arguments_and_settings() -> None:
    """Editors and `help()` ask for it."""
    shown = inspect.signature(ebbflow.Session).parameters
    assert {"model", "optimizer", "data", "engine", "reduction", "rule", "base_batch", "clip"} <= set(shown)
    joined = inspect.signature(ebbflow.live.join).parameters
    assert {"model", "on_epoch", "extras", "reduction", "rule", "base_batch"} <= set(joined)
    assert not {"engine", "config", "self"} & set(joined)


def test_a_sum_with_its_count_is_divided_by_the_count_of_the_whole_step() -> None:
    """As over tokens or boxes: here over the samples that are not of class 2, which a third of them is."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ebbflow.workloads.LossSum:
        total = nn.functional.cross_entropy(model(x), y, ignore_index=2, reduction="sum")
        return ebbflow.workloads.LossSum(total, (y != 2).sum())

    model = make_model(batch_norm=True)
    with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **SETTINGS) as session:
        for step in session:
            for x, y in step:
                total, count = loss(model, x, y)
                step.backward(0.0 * model[0].weight.sum(), count=count, last=False)  # as of a model with two losses
                step.backward(total, count=count)
    expected = weights_of(trained(loss=loss, engine="loop"))
    torch.testing.assert_close(weights_of(model), expected, rtol=1e-9, atol=1e-9)


def test_a_framework_may_combine_and_apply_the_steps_itself() -> None:
    """The gradient that is in `.grad` between the two is the one that is applied."""
    weights = []
    for own in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
        settings = {"trace": "constant(workers=4)", "base_batch": 4, "local_batch": 2, "epochs": 1}
        with ebbflow.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings) as session:
            if not own:
                for step in session:
                    for x, y in step:
                        step.backward((model(x) - y).square().mean())
            while own and (step := session.next_step()) is not None:
                for x, y in step:
                    step.backward((model(x) - y).square().mean())
                assert step.combine()
                before, gradient = model.weight.detach().clone(), model.weight.grad.clone()
                row = step.apply()
                torch.testing.assert_close(model.weight, before - row.lr * gradient)
                assert row.loss == step.loss
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


# -- what else belongs to the state ------------------------------------------------------------------------------------


def counting(folder: Path, *, steps: int | None = None, **extras: Counter) -> None:
    """A loop that goes back to the state after step 2 at steps 6 and 9, and is left after so many steps."""
    model = make_model(batch_norm=False)
    optimizer = ebbflow.ElasticOptimizer(
        sgd(model), BackAndForth(), base_batch=8, epochs=4, epoch_samples=SAMPLES, schedule=None
    )
    settings = {**SETTINGS, "trace": "constant(workers=2)", "epochs": 4, "extras": extras, "out": folder}
    with ebbflow.Session(model, optimizer, TensorSource(*make_data()), **settings) as session:
        for number, step in enumerate(session):
            if steps is not None and number == steps:
                break
            for counter in extras.values():
                counter.count += 1
            for inputs, targets in step:
                step.backward(nn.functional.cross_entropy(model(inputs), targets))


def test_extras_go_back_to_a_snapshot_and_are_part_of_checkpoints(tmp_path: Path) -> None:
    """97 samples are 13 steps of 8, so four epochs are 52; the seven steps that were given back do not count."""
    whole = Counter()
    counting(tmp_path / "whole", counter=whole)
    assert whole.count == 52
    interrupted, later = Counter(), Counter()
    counting(tmp_path / "halves", steps=12, counter=interrupted)
    assert interrupted.count == 12 - 7
    counting(tmp_path / "halves", counter=later)
    assert later.count == 52


def test_a_checkpoint_without_the_state_of_an_extra_is_refused(tmp_path: Path) -> None:
    counting(tmp_path, steps=2)
    with pytest.raises(CheckpointError, match=r"has no state of counter among its extras; leave them out"):
        counting(tmp_path, counter=Counter())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rule": "sqrt"}, r"rule is 'sqrt', but the ElasticOptimizer was made with rule='linear', by which it goes"),
        ({"base_batch": 16}, r"base_batch is 16, but the ElasticOptimizer was made with base_batch=8"),
        ({"clip": 1.0}, r"clip is 1\.0, but the ElasticOptimizer was made with clip=None"),
        ({"schedule": "constant"}, r"schedule is 'constant', but the ElasticOptimizer was made with schedule='cosine"),
    ],
)
def test_settings_that_contradict_an_elastic_optimizer_are_refused(setting: dict[str, Any], message: str) -> None:
    model = make_model()
    optimizer = ebbflow.ElasticOptimizer(
        sgd(model), "linear", base_batch=8, epochs=2, epoch_samples=SAMPLES, schedule="cosine"
    )
    settings = {name: value for name, value in SETTINGS.items() if name != "base_batch"}
    with pytest.raises(ConfigError, match=message):
        ebbflow.Session(model, optimizer, TensorSource(*make_data()), **{**settings, **setting})
    session = ebbflow.Session(model, optimizer, TensorSource(*make_data()), **settings)
    assert session.config.ref_batch == 8
    assert session.config.rule == "linear"


def each_micro_batch(between: str, *, schedule: str | None = None) -> None:
    """A loop that does something between the micro-batches of a step, as loops of one process may."""
    model = make_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    data = TensorDataset(*make_data())
    with ebbflow.Session(model, optimizer, data, rule="linear", schedule=schedule, **SETTINGS) as session:
        for step in session:
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
                if between == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                elif between == "zero_grad":
                    optimizer.zero_grad()
                elif between == "scheduler":
                    optimizer.param_groups[0]["lr"] *= 0.9
            if between == "scheduler per step" and session.step:
                scheduler.step()


@pytest.mark.parametrize(
    ("between", "message"),
    [
        ("clip", r"the gradients were changed between the micro-batches.*give clip= to the session"),
        ("zero_grad", r"the gradients were changed between the micro-batches.*Leave zero_grad\(\) out"),
        ("scheduler", r"the learning rate was changed from 0\.1 to 0\.09 in the middle of a step"),
    ],
)
def test_changes_between_the_micro_batches_of_a_step_are_refused(between: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        each_micro_batch(between)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kept", [False, True], ids=["nothing is saved", "saved"])
def test_a_scheduler_that_is_not_saved_with_the_run_is_refused(kept: bool, tmp_path: Path) -> None:
    """After a kill the run would go on at the rate of the beginning."""
    x, y = make_data()

    def train(**more: Any) -> None:
        model = make_model()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        extras = {"extras": {"scheduler": scheduler}} if more.pop("extra", False) else {}
        settings = {**SETTINGS, "rule": "linear", **more, **extras}
        with ebbflow.Session(model, optimizer, TensorDataset(x, y), **settings) as session:
            for step in session:
                if session.step:
                    scheduler.step()
                for inputs, targets in step:
                    step.backward(nn.functional.cross_entropy(model(inputs), targets))

    if not kept:
        train()
        return
    with pytest.raises(
        ConfigError, match="a scheduler changed the learning rate, but its state is not part of what is"
    ):
        train(out=tmp_path / "without")
    train(out=tmp_path / "with", extra=True)


def test_a_scheduler_beside_a_schedule_is_refused() -> None:
    each_micro_batch("scheduler per step")
    with pytest.raises(ConfigError, match=r"but the schedule cosine.* had set .*: use either schedule= or a scheduler"):
        each_micro_batch("scheduler per step", schedule="cosine")


def test_arguments_of_another_kind_are_refused() -> None:
    model, (x, y) = make_model(), make_data()
    with pytest.raises(ConfigError, match=r"the data is a tuple of 2 arrays.*utils\.data\.TensorDataset\(x, y\)"):
        ebbflow.Session(model, sgd(model), (x, y), **SETTINGS)
    with pytest.raises(ConfigError, match=r"the model is a SGD; expected a torch\.nn\.Module: Session\(model, optim"):
        ebbflow.Session(sgd(model), model, TensorDataset(x, y), **SETTINGS)
    with pytest.raises(ConfigError, match=r"the optimizer is a generator; expected a torch\.optim\.Optimizer"):
        ebbflow.Session(model, model.parameters(), TensorDataset(x, y), **SETTINGS)
    with pytest.raises(ConfigError, match="evaluate is a dict; expected a function that returns the scores by name"):
        ebbflow.Session(model, sgd(model), TensorDataset(x, y), evaluate={"score": 1.0}, **SETTINGS)
    with pytest.raises(ConfigError, match=r"'epoch' among the extras is a int, which has no state_dict\(\)"):
        ebbflow.Session(model, sgd(model), TensorDataset(x, y), extras={"epoch": 1}, **SETTINGS)
    with pytest.raises(ConfigError, match=r"config is a str; expected the settings of a run: ebbflow\.RunConfig\("):
        ebbflow.train("digits-mlp", "runs/first")
