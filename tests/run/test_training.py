"""Runs from configuration to record: how they end, what they survive, and that a kill changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow import workloads
from ebbflow.errors import CheckpointError, ConfigError, EbbflowError, OutputError, PlanError
from ebbflow.record import Run, StepRow, has_header, read_record
from ebbflow.run import training
from ebbflow.run.assemble import resolve
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.planning import make_plan
from ebbflow.run.training import train
from ebbflow.workloads import Recipe, Task, TensorSource
from ebbflow.workloads.sources import EvenSubset

RECIPE = Recipe(
    ref_batch=8,
    local_batch=4,
    lr=0.05,
    optimizer="sgd(momentum=0.9)",
    schedule="cosine",
    epochs=3,
    metric="loss",
    higher_is_better=False,
)
SAMPLES = 97
TRACE = "0s:4 3s:2 7s:5 11s:3 15s:1 17s:4 40s"


class Cliff(nn.Module):
    """A small regression with batch norm; the samples of one value turn everything into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spoilt = (x[:, :1] > 50).any()
        result: torch.Tensor = self.net(x.clamp(max=10) * (math.nan if spoilt and self.training else 1.0))
        return result


def cliff(recipe: Recipe, bad: int = 0, same: bool = False) -> Task:
    """Samples on a line; `bad` of them are poison; `same`: all samples are equal, so that a gradient has no noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator)
    y = x[:, :1] + torch.randn(SAMPLES, 1, generator=generator)
    if same:
        x, y = x[:1].repeat(SAMPLES, 1), y[:1].repeat(SAMPLES, 1)
    valid = TensorSource(x.clone(), y.clone())
    x[:bad, 0] = 100.0
    return Task(
        model=Cliff(),
        train=TensorSource(x, y),
        valid=valid,
        recipe=recipe,
        loss=lambda model, x, y: nn.functional.mse_loss(model(x), y),
    )


if "test-cliff" not in workloads.WORKLOADS.names():
    workloads.register("test-cliff", recipe=RECIPE)(cliff)


def as_many(data: Path | None, recipe: Recipe) -> Task:
    """As many samples as the data file says."""
    assert data is not None
    x = torch.linspace(-1, 1, int(data.read_text(encoding="utf-8")))[:, None]
    return Task(model=nn.Linear(1, 1), train=TensorSource(x, x), valid=TensorSource(x, x), recipe=recipe,
                loss=lambda model, x, y: nn.functional.mse_loss(model(x), y))  # fmt: skip


if "test-as-many" not in workloads.WORKLOADS.names():
    workloads.register("test-as-many", recipe=RECIPE)(as_many)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [part.split(":") for part in TRACE.replace("s", "").split()]
    path.write_text(
        "time_s,accelerators\n" + "\n".join(f"{r[0]},{r[1] if len(r) > 1 else 4}" for r in rows) + "\n",
        encoding="utf-8",
    )
    return str(path)


def config(trace: str, **settings: Any) -> RunConfig:
    return RunConfig(**{"workload": "test-cliff", "trace": trace} | settings)


def run(tmp_path: Path, trace: str, **settings: Any) -> Run:
    return train(config(trace, **settings), tmp_path / "run")


class Killed(BaseException):
    """A kill -9, as far as the run is concerned: nothing of it is caught."""


def killed_at(step: int) -> Callbacks:
    def on_step(row: StepRow) -> None:
        if row.step == step:
            raise Killed

    return Callbacks(on_step=on_step)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("adascale+warmup(2ep)", {}),
        ("adascale(progress=gain)+ramp", {"clip": 1.0}),
        ("lena+statewarmup(0.5)", {"ema": 0.99, "bn_follows_batch": True}),
        ("linear+statewarmup(0.5)", {}),
        ("auto", {"lr": 1.0}),
        ("linear+ramp+inside", {"on_nonfinite": "skip"}),
        ("adamsde", {"optimizer": "adamw"}),
        ("adamsde(beta1=false)", {"optimizer": "adam(weight_decay=0.01)"}),
        ("sqrt+keepdecay", {"optimizer": "lamb"}),
    ],
)
def test_a_run_killed_again_and_again_equals_an_uninterrupted_one(
    rule: str, settings: dict[str, Any], tmp_path: Path, trace: str
) -> None:
    if settings.get("optimizer") == "lamb":
        pytest.importorskip("pytorch_optimizer")
    chosen = config(trace, rule=rule, **settings)
    whole = train(chosen, tmp_path / "whole")
    assert whole.status == "finished"
    # In the middle of averages, of the warm-up (two of three epochs), of ramps (8k steps), and late.
    for step in (1, 4, 5, 13, 20):
        with pytest.raises(Killed):
            train(chosen, tmp_path / "killed", callbacks=killed_at(step), checkpoint_every_s=0)
    killed = train(chosen, tmp_path / "killed")
    back = [event.what for event in whole.events]
    assert ("went back" in back) == (rule == "auto")
    assert sorted(event.what for event in killed.events) == sorted([*["resumed"] * 5, *back])
    assert killed.end is not None and whole.end is not None
    assert killed.end.weights_sha256 == whole.end.weights_sha256
    assert [row.stats for row in killed.steps] == [row.stats for row in whole.steps]
    assert [row.metrics for row in killed.validations] == [row.metrics for row in whole.validations]
    for name in ("lr", "multiplier", "loss", "samples"):
        assert [getattr(row, name) for row in killed.steps] == [getattr(row, name) for row in whole.steps]


@pytest.mark.parametrize("left", ["", '{"kind": "header", "vers'])
def test_a_run_killed_before_its_header_was_written_begins_anew(left: str, tmp_path: Path, trace: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text(left, encoding="utf-8")
    assert run(tmp_path, trace).status == "finished"


def test_what_a_kill_in_the_middle_of_a_checkpoint_left_is_removed(tmp_path: Path, trace: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".checkpoint.pt.x8f2").write_bytes(b"half of it")  # as `write_whole` names it
    run(tmp_path, trace, epochs=1)
    assert sorted(path.name for path in folder.iterdir()) == [".run.lock", "record.jsonl", "weights.pt"]


def test_a_checkpoint_without_its_record_is_not_taken_for_one_of_the_next_record(tmp_path: Path, trace: str) -> None:
    with pytest.raises(Killed):
        train(config(trace, epochs=1), tmp_path / "run", callbacks=killed_at(5), checkpoint_every_s=0)
    (tmp_path / "run" / "record.jsonl").unlink()
    with pytest.raises(Killed):
        train(config(trace, epochs=1), tmp_path / "run", callbacks=killed_at(2), checkpoint_every_s=3600)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    result = train(config(trace, epochs=1), tmp_path / "run")
    assert [row.step for row in result.steps] == list(range(len(result.steps)))


@pytest.mark.parametrize("others", [60, 200])
def test_a_run_does_not_go_on_with_data_of_another_size(others: int, tmp_path: Path, trace: str) -> None:
    for samples in (97, others):
        (tmp_path / f"{samples}.txt").write_text(str(samples), encoding="utf-8")
    begun, other = (config(trace, workload="test-as-many", data=str(tmp_path / f"{n}.txt")) for n in (97, others))
    with pytest.raises(Killed):
        train(begun, tmp_path / "run", callbacks=killed_at(5), checkpoint_every_s=0)
    with pytest.raises(CheckpointError, match=f"epochs of 97 samples, but the data has {others}; give the data"):
        train(other, tmp_path / "run")
    moved = (tmp_path / "97.txt").rename(tmp_path / "elsewhere.txt")
    assert train(config(trace, workload="test-as-many", data=str(moved)), tmp_path / "run").status == "finished"


def test_a_finished_run_that_was_made_from_data_elsewhere_is_returned_with_a_word(
    tmp_path: Path, trace: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text("97", encoding="utf-8")
    one, two = (config(trace, workload="test-as-many", data=str(tmp_path / name)) for name in ("one", "two"))
    train(one, tmp_path / "run")
    train(one, tmp_path / "run")
    assert not caplog.records
    train(two, tmp_path / "run")
    assert f"its data was {tmp_path / 'one'}, now it is {tmp_path / 'two'}" in caplog.text


def test_memory_that_the_machine_does_not_have_is_an_error_that_says_what_to_do(tmp_path: Path, trace: str) -> None:
    def huge(recipe: Recipe) -> Task:
        raise AssertionError(torch.empty(2**50))  # 4 PiB, more than a process can address

    if "test-huge" not in workloads.WORKLOADS.names():
        workloads.register("test-huge", recipe=RECIPE)(huge)
    with pytest.raises(ConfigError, match=r"memory of the device cpu does not suffice .*smaller local batch"):
        run(tmp_path, trace, workload="test-huge")


def test_a_nan_gradient_stops_the_run(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, workload="test-cliff(bad=1)")
    assert result.status == "diverged"
    assert result.end is not None
    assert "the norm of the gradient is nan at step" in result.end.text


@pytest.mark.parametrize("rule", ["linear", "adascale", "lena"])
def test_a_nan_gradient_is_skipped_if_asked_for(rule: str, tmp_path: Path, trace: str) -> None:
    """One poisoned sample of 97: one step an epoch is skipped; weights, batch norm and averages stay healthy."""
    result = run(tmp_path, trace, workload="test-cliff(bad=1)", rule=rule, on_nonfinite="skip")
    assert result.status == "finished"
    skipped = [row for row in result.steps if "skipped" in row.stats]
    assert len(skipped) == 3
    assert [event.step for event in result.events if event.what == "skipped step"] == [row.step for row in skipped]
    assert all((row.lr, row.multiplier) == (0.0, 0.0) for row in skipped)
    assert result.steps[-1].samples == 3 * SAMPLES, "the samples of skipped steps count"
    assert all(
        math.isfinite(value) for row in result.validations for value in row.metrics.values() if value is not None
    )
    assert all(row.metrics["loss"] is not None for row in result.validations)
    if rule != "linear":
        assert all(
            math.isfinite(row.stats["noise"]) for row in result.steps if row not in skipped and "noise" in row.stats
        )


def test_a_run_by_gain_ends_when_the_gain_is_that_of_the_reference_run(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, rule="adascale(progress=gain)")
    assert result.status == "finished"
    assert result.header.config["progress"] == "gain"
    reference_steps = 3 * SAMPLES / 8
    done = result.column("progress")
    assert done[-1] >= reference_steps * (1 - 1e-9)
    assert done[-2] < reference_steps
    assert done[-1] == pytest.approx(sum(row.stats["gain"] for row in result.steps))
    assert result.end is not None
    assert result.end.samples > 3 * SAMPLES, "a gain below the batch ratio takes more samples"
    assert f"worth {done[-1]:.1f} reference steps" in result.end.text
    # By epochs, and once more where it ended.
    epochs = [row.epoch for row in result.validations]
    assert epochs[:3] == [1.0, 2.0, 3.0]
    assert epochs[-1] == pytest.approx(result.end.samples / SAMPLES)
    # The schedule follows the gain: half a cosine over the reference steps.
    before = done[-1] - result.steps[-1].stats["gain"]
    assert result.steps[-1].lr_base == pytest.approx(0.05 * (1 + math.cos(math.pi * before / reference_steps)) / 2)


def test_a_run_by_samples_says_so(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, rule="adascale", epochs=1)
    assert result.header.config["progress"] == "samples"
    assert result.end is not None
    assert (result.end.samples, result.end.text) == (SAMPLES, "")


def test_a_run_by_gain_that_would_never_end_is_given_up(tmp_path: Path, trace: str) -> None:
    # Without noise a step is worth one reference step, whatever its batch; here one of 97 samples, of a reference of 1.
    result = run(tmp_path, "constant(workers=8)", workload="test-cliff(same=true)", rule="adascale(progress=gain)",
                 ref_batch=1, local_batch=13, epochs=1)  # fmt: skip
    assert result.status == "failed"
    assert result.end is not None
    assert "the gain is too small for the run ever to end" in result.end.text
    assert result.end.samples == 10 * SAMPLES


def test_a_run_that_has_failed_by_its_own_end_is_not_trained_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workload": "test-cliff(same=true)", "rule": "adascale(progress=gain)", "ref_batch": 1,
                                "local_batch": 13, "epochs": 1}  # fmt: skip
    first = run(tmp_path, "constant(workers=8)", **settings)
    stepped: list[StepRow] = []
    again = train(
        config("constant(workers=8)", **settings), tmp_path / "run", callbacks=Callbacks(on_step=stepped.append)
    )
    assert (again.status, again.end, stepped) == ("failed", first.end, [])


def test_the_header_of_a_record_is_on_the_disk_before_the_first_step(tmp_path: Path) -> None:
    """So that a report can be made of a study whose first steps take long."""
    seen: list[bool] = []
    path = tmp_path / "run" / "record.jsonl"
    callbacks = Callbacks(on_start=lambda done, total: seen.append(has_header(path)))
    train(config("constant(workers=2)", rule="linear", epochs=1), tmp_path / "run", callbacks=callbacks)
    assert seen == [True]


def test_a_growing_policy_does_not_repeat_a_trace_for_a_run_by_gain_unless_told(tmp_path: Path) -> None:
    growing: dict[str, Any] = {"policy": "geo(1ep, factor=2)", "rule": "adascale(progress=gain)", "step_time": "1s"}
    settings = resolve(config("constant(workers=2, duration=100s)", **growing))
    plans = [make_plan(settings.replace(repeat=repeat), SAMPLES, by_gain=True)[0] for repeat in (False, True)]
    assert plans[0].steps == 100 and plans[1].steps > 100


def test_a_plan_too_short_for_a_run_by_gain_says_how_far_it_came(tmp_path: Path, trace: str) -> None:
    with pytest.raises(
        PlanError, match=r"ends before the run: after .* worth .* reference steps of 36\.375 .*repeat=True"
    ):
        run(tmp_path, trace, rule="adascale(progress=gain)", step_time="2s")
    whole = train(config(trace, rule="adascale(progress=gain)", step_time="2s", repeat=True), tmp_path / "repeated")
    assert whole.status == "finished"


def test_a_rule_that_measures_needs_steps_of_two_pieces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adascale measures the noise .* give micro_batch=2 or less"):
        run(tmp_path, "constant(workers=1)", rule="adascale")
    assert run(tmp_path, "constant(workers=1)", rule="adascale", micro_batch=2, epochs=1).status == "finished"


def test_a_growing_policy_that_could_never_measure_is_refused(tmp_path: Path) -> None:
    # Eight workers could take 32 samples in 8 micro-batches, but a step of 4 samples is one worker's, in one
    # micro-batch.
    fleet: dict[str, Any] = {"trace": "constant(workers=8)", "epochs": 1}
    for policy in ("noise(initial=4, wait=0, dwell=1)", "ada-norm(initial=4, wait=0, dwell=1)"):
        with pytest.raises(ConfigError, match=r"the policy .* one: give micro_batch=2 or less,.* larger initial batch"):
            run(tmp_path, policy=policy, **fleet)
    with pytest.raises(ConfigError, match=r"the rule adascale measures .* largest step has 4 samples in one"):
        run(tmp_path, policy="geo(50ep, initial=4)", rule="adascale", **fleet)
    noisy = "noise(initial=8, part=100, wait=0, dwell=1)"  # of two workers
    measured = train(config(policy=noisy, **fleet), tmp_path / "measured")
    assert max(row.batch for row in measured.steps) == 32
    # It grows by loss and norm, which one micro-batch shows as well, also where one worker is all there is.
    alone = train(config("constant(workers=1)", policy="rada(initial=2, dwell=2, wait=0)"), tmp_path / "alone")
    assert {row.micro_batches for row in alone.steps} == {1}
    assert max(row.batch for row in alone.steps) == 4


def test_unsuitable_optimizers_are_refused_at_the_start(tmp_path: Path, trace: str) -> None:
    with pytest.raises(ConfigError, match="adamsde changes the betas, which SGD does not have"):
        run(tmp_path, trace, rule="adamsde")
    assert not (tmp_path / "run" / "record.jsonl").exists()


def test_the_averaged_weights_are_validated_beside_the_others(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, ema=0.9, epochs=2)
    for row in result.validations:
        assert set(row.metrics) == {"loss", "ema_loss"}
        assert row.metrics["loss"] != row.metrics["ema_loss"]
    saved = torch.load(tmp_path / "run" / training.WEIGHTS, weights_only=True)
    assert set(saved["ema"]) == {name for name, _ in Cliff().named_parameters()}


def test_a_layer_wise_rule_records_its_layers_by_name(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, rule="lena", epochs=1, optimizer="sgd(weight_decay=0.1, decay_norms=false)")
    # In the order of the optimizer, which has biases and norms in a group of their own.
    assert result.header.config["layers"] == [
        "net.0.weight", "net.3.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.3.bias",
    ]  # fmt: skip
    assert [row.step for row in result.layers] == [row.step for row in result.steps]
    for step, row in zip(result.steps, result.layers, strict=True):
        multipliers = [value for value in row.multiplier if value is not None]
        assert sum(multipliers) / 6 == pytest.approx(step.multiplier, rel=1e-5)
    assert run(tmp_path / "other", trace, rule="adascale", epochs=1).layers == []


def test_clipping_is_recorded(tmp_path: Path, trace: str) -> None:
    result = run(tmp_path, trace, clip=0.5, epochs=1)
    assert 0 < result.column("clipped").mean() <= 1
    assert (result.column("gradient_norm") > 0.5).tolist() == (result.column("clipped") == 1).tolist()


def test_batch_norm_that_follows_the_batch_has_other_statistics(tmp_path: Path, trace: str) -> None:
    plain = train(config(trace, epochs=1, ref_batch=64), tmp_path / "plain")
    follows = train(config(trace, epochs=1, ref_batch=64, bn_follows_batch=True), tmp_path / "follows")
    assert plain.end is not None and follows.end is not None
    assert plain.end.weights_sha256 != follows.end.weights_sha256
    assert [row.loss for row in plain.steps] == [row.loss for row in follows.steps]  # training itself is the same


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_nonfinite": "skipp"}, "on_nonfinite is 'skipp'; did you mean 'skip'"),
        ({"on_nonfinite": "ignore"}, "Known: skip, stop"),
        ({"ema": 1.5}, "ema is 1.5; expected the fraction kept"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"lr": math.nan}, "lr is nan; expected a number above 0 and below infinity"),
        ({"memory_steps": math.inf}, "memory_steps is inf"),  # would forget everything, not nothing
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(workload="test-cliff", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fussed"}, "engine is 'fussed'; did you mean 'fused'"),
        ({"tracker": "tenserboard"}, "did you mean 'tensorboard'"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"rule": "lineer"}, "did you mean 'linear'"),
        ({"policy": "folow"}, "did you mean 'follow'"),
        ({"trace": "poison(workers=3)"}, "did you mean 'poisson'"),
        ({"step_time": "5"}, "step_time: duration '5' has no unit"),
    ],
)
def test_a_typo_is_reported_before_the_data_is_read(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The data file does not exist, which nobody notices."""
    fleet: dict[str, Any] = {"workload": "test-as-many", "data": str(tmp_path / "missing.txt"), "rule": "sqrt"}
    with pytest.raises(EbbflowError, match=message):
        train(RunConfig(**{**fleet, **settings}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(tmp_path: Path, trace: str) -> None:
    first = run(tmp_path, trace, epochs=1)
    assert run(tmp_path, trace, epochs=1).header.created == first.header.created
    assert read_record(tmp_path / "run" / "record.jsonl").status == "finished"


@pytest.mark.parametrize("setting", [{"policy": "geo(1ep)"}, {"offset": "5s"}, {"on_change": "lose"}, {"repeat": True}])
def test_a_setting_that_a_plan_file_would_leave_without_effect_is_refused(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("step,batchsize\n" + "0,8\n" * 13, encoding="utf-8")
    fleet: dict[str, Any] = {"workload": "test-cliff", "plan": str(plan), "epochs": 1}
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is .* leave it out"):
        train(RunConfig(**fleet, **setting), tmp_path / "run")
    timed = train(RunConfig(**fleet, step_time="0.5s"), tmp_path / "run")
    assert [row.time_s for row in timed.steps[:3]] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["trace", "plan"])
def test_a_run_is_not_taken_for_one_on_a_file_that_was_changed_since(kind: str, tmp_path: Path, trace: str) -> None:
    file = Path(trace)
    if kind == "plan":
        file = tmp_path / "plan.csv"
        file.write_text("step,batchsize\n" + "0,8\n" * 20 + "0,4\n" * 20, encoding="utf-8")
    chosen = config(trace, epochs=1, plan=str(file) if kind == "plan" else None)
    before = file.read_text(encoding="utf-8")
    other = before.replace("0,8\n0,4\n", "0,4\n0,8\n").replace("\n3,2\n", "\n4,2\n")  # one change, one step later
    assert other != before

    with pytest.raises(Killed):
        train(chosen, tmp_path / "run", callbacks=killed_at(3), checkpoint_every_s=0)
    file.write_text(other, encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"the {kind} is not the one it was .*{file.name}"):
        train(chosen, tmp_path / "run")
    file.write_text(before, encoding="utf-8")
    first = train(chosen, tmp_path / "run")
    assert first.status == "finished"

    file.write_text(other, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"the {kind} is not the one it was"):
        train(chosen, tmp_path / "run")
    file.write_text(before, encoding="utf-8")
    assert train(chosen, tmp_path / "run").header.created == first.header.created


def test_a_trace_that_is_edited_while_a_run_follows_it_is_another_trace_when_the_run_goes_on(
    tmp_path: Path, trace: str
) -> None:
    before = Path(trace).read_text(encoding="utf-8")

    def edit_then_kill(row: StepRow) -> None:
        Path(trace).write_text(before.replace("\n3,2\n", "\n4,2\n"), encoding="utf-8")
        if row.step == 3:
            raise Killed

    with pytest.raises(Killed):
        train(config(trace, epochs=1), tmp_path / "run", callbacks=Callbacks(on_step=edit_then_kill),
              checkpoint_every_s=0)  # fmt: skip
    with pytest.raises(CheckpointError, match="the trace is not the one it was"):
        train(config(trace, epochs=1), tmp_path / "run")
    Path(trace).write_text(before, encoding="utf-8")
    assert train(config(trace, epochs=1), tmp_path / "run").status == "finished"


def test_a_finished_run_on_a_trace_with_a_long_text_is_found_again(tmp_path: Path) -> None:
    """A text longer than any file's name may be is no file, and no error of the system's either."""
    changes = " ".join(f"{second}s:{2 + second % 3}" for second in range(60)) + " 60s"
    assert len(changes) > 255
    first = run(tmp_path, changes, epochs=1)
    assert run(tmp_path, changes, epochs=1).header.created == first.header.created


def test_a_run_whose_final_weights_cannot_be_written_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the end: the same command trains the rest again, instead of taking it for finished."""
    write = training.save_checkpoint

    def full(path: Path, state: dict[str, Any]) -> None:
        if path.name == training.WEIGHTS:
            raise OutputError(f"{path}: cannot be written: No space left on device")
        write(path, state)

    monkeypatch.setattr(training, "save_checkpoint", full)
    config = RunConfig(workload="digits-mlp", epochs=1, local_batch=32)
    with pytest.raises(OutputError, match="No space left"):
        train(config, tmp_path)
    monkeypatch.setattr(training, "save_checkpoint", write)
    assert train(config, tmp_path).status == "finished"
    assert (tmp_path / training.WEIGHTS).is_file()


def test_training_samples_are_scored_at_every_validation_and_change_nothing_else(tmp_path: Path) -> None:
    config = RunConfig(workload="test-cliff", trace=TRACE)
    plain = train(config, tmp_path / "plain")
    scored = train(config.replace(train_scores=SAMPLES), tmp_path / "scored")
    assert plain.end is not None and scored.end is not None
    assert plain.end.weights_sha256 == scored.end.weights_sha256
    for before, after in zip(plain.validations, scored.validations, strict=True):
        assert after.metrics["loss"] == before.metrics["loss"]
        # The validation samples of this task are its training samples.
        assert after.metrics["train_loss"] == pytest.approx(before.metrics["loss"])
        assert set(before.metrics) == {"loss"}


def test_training_samples_to_score_are_spread_over_the_training_set_and_not_augmented() -> None:
    x = torch.arange(10.0)[:, None]
    source = EvenSubset(TensorSource(x, x, augment=lambda x: x + 100), 4)
    # Sample i of four is number i x 10 // 4 of ten.
    assert source.batch(torch.arange(4), train=False)[0].flatten().tolist() == [0, 2, 5, 7]
    assert len(EvenSubset(TensorSource(x, x), 99)) == 10


def test_training_scores_leave_the_arms_of_earlier_studies_as_they_were() -> None:
    config = RunConfig(workload="test-cliff")
    assert config.replace(train_scores=0).fingerprint() == config.fingerprint()
    assert config.replace(train_scores=1).fingerprint() != config.fingerprint()
