"""The Trainer of transformers on a session: what it computes, its schedulers, clipping, precision and checkpoints."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ebbflow[transformers]'")

import transformers

import ebbflow
from ebbflow.data.permutation import Permutation
from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.integrations.transformers import ElasticTrainer, ElasticTrainerMixin

pytestmark = pytest.mark.slow  # all of it together: it imports transformers

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "transformers_trainer.py"
FLEET = {"trace": "0s:4 3s:2 7s:5 60s", "step_time": "1s"}
"""Steps of 4, 4, 4, 2, 2, 2, 2, 5, 5, ... workers."""


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def trained(folder: Path, elastic: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A run of the example for an epoch, on a fleet that changes; a constant rate unless a scheduler is given."""
    defaults = {
        "samples": 120,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    defaults |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0}
    return example()["main"](str(folder), elastic={**FLEET, **(elastic or {})}, **{**defaults, **settings})


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def new_model() -> Any:
    """The model of the example, with the weights that it begins with."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class Decoded(Dataset):  # type: ignore[type-arg]
    """The samples of the example, for a session without the Trainer."""

    def __init__(self, count: int = 120) -> None:
        self._samples = example()["Sentences"](count)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Any:
        return self._samples[i]


@pytest.mark.parametrize(
    ("rule", "trainer", "session"),
    [
        ("linear", {}, {}),
        ("adascale", {"max_grad_norm": 0.5}, {"clip": 0.5}),
        ("sqrt", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"micro_batch": 2}),
    ],
    ids=["plain", "measured-and-clipped", "accumulation"],
)
def test_a_trainer_computes_what_a_session_computes_with_the_same_samples(
    rule: str, trainer: dict[str, Any], session: dict[str, Any], tmp_path: Path, double_precision: None
) -> None:
    """Dropout included, in double precision. Sequences have 4 to 16 tokens, and the loss is the mean over tokens."""
    made = trained(tmp_path, {"rule": rule}, optim="adamw_torch", **trainer)
    model = new_model()
    loader = torch.utils.data.DataLoader(Decoded(), batch_size=4, shuffle=True, collate_fn=example()["pad"])
    settings = {**FLEET, "rule": rule, "base_batch": 16, "local_batch": 4, "epochs": 1, "seed": 42}
    settings |= {"loader_workers": 0, **session}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with ebbflow.Session(model, optimizer, loader, **settings) as own:
        for step in own:
            for batch in step:
                tokens = batch["labels"].ne(-100).sum()  # the Trainer's count for models that name no loss_type
                step.backward(model(**batch, num_items_in_batch=1).loss, count=tokens)  # a sum divided by 1
    assert own.step == made.state.global_step == made.session.step
    # torch's clipping divides by the norm plus 1e-6, ours by the norm.
    torch.testing.assert_close(weights(made.model), weights(model), rtol=1e-5, atol=1e-6)


def test_a_step_is_the_mean_over_its_tokens_however_many_workers_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double_precision: None
) -> None:
    """Eight workers with 2 sequences each, and one with 16: sequences differ in length, dropout is off."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = transformers.GPT2Config
    monkeypatch.setitem(example()["main"].__globals__, "GPT2Config", lambda **sizes: made(**sizes, **off))
    many = trained(tmp_path, {"trace": "constant(workers=8)"}, per_device_train_batch_size=2)
    one = trained(tmp_path, {"trace": "constant(workers=1)"}, per_device_train_batch_size=16)
    assert many.state.global_step == one.state.global_step == 8  # of 120/16
    torch.testing.assert_close(weights(many.model), weights(one.model), rtol=1e-8, atol=1e-10)
    losses = [[row["loss"] for row in run.state.log_history if "loss" in row] for run in (many, one)]
    assert losses[0] == pytest.approx(losses[1])


class Ordered(transformers.Trainer):  # type: ignore[misc]
    """The plain Trainer, with the order of samples that a session has."""

    def _get_train_sampler(self, *arguments: Any) -> Any:
        samples, seed = len(self.train_dataset), self.args.seed
        epochs = iter(range(1000))

        class Order(torch.utils.data.Sampler):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return samples

            def __iter__(self) -> Iterator[int]:
                return iter(Permutation(samples, seed, next(epochs)).indices(0, samples).tolist())

        return Order()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 4, "max_grad_norm": 0.5},
        {"lr_scheduler_type": "linear", "max_grad_norm": 0, "weight_decay": 0.1, "optim": "sgd"},
        {"lr_scheduler_type": "cosine_with_restarts", "max_steps": 13, "label_smoothing_factor": 0.1},
    ],
    ids=["cosine-clipped", "linear-sgd", "max-steps-smoothed"],
)
def test_at_the_reference_batch_it_trains_what_the_plain_trainer_trains(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Four workers with 4 sequences each, and the plain Trainer with 4 accumulated batches of 4: sequences differ in
    length, and each step is a mean over tokens. Two epochs of 8 steps, in double precision; rates, losses, weights."""
    runs = []
    for elastic in (False, True):
        config = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": 13, "n_positions": 16}
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**config, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        ).double()
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
            learning_rate=1e-2, logging_steps=1, per_device_train_batch_size=4,
            gradient_accumulation_steps=1 if elastic else 4, **{"num_train_epochs": 2} | settings,
        )  # fmt: skip
        kind = ElasticTrainer if elastic else Ordered
        more = {"elastic": {"trace": "constant(workers=4)", "rule": "linear", "base_batch": 16}} if elastic else {}
        made = kind(model=model, args=args, train_dataset=Decoded(128), data_collator=example()["pad"], **more)
        made.train()
        rows = [row for row in made.state.log_history if "loss" in row]
        runs.append((weights(model), [row["learning_rate"] for row in rows], [row["loss"] for row in rows]))
    (plain, rates, losses), (ours, our_rates, our_losses) = runs
    assert len(rates) == settings.get("max_steps", 16)
    assert our_rates == pytest.approx(rates, rel=1e-12) and our_losses == pytest.approx(losses, rel=1e-6)
    # torch's clipping divides by the norm plus 1e-6, ours by the norm.
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


# Schedulers, counts, logs ------------------------------------------------------------------------------------------


def test_the_scheduler_counts_reference_steps_and_the_rule_multiplies_once(tmp_path: Path) -> None:
    """Reference steps of 16 samples: 120/16 = 7.5, so that the scheduler is made for 8.

    The first steps have 16 samples (4 workers of 4), then 8, then 20: after 3 * 16 + 4 * 8 = 80 samples the scheduler
    has counted 5, and the linear schedule is at 1 - 5/8.
    """
    made = trained(tmp_path, {"rule": "linear"}, lr_scheduler_type="linear")
    rows = [row for row in made.state.log_history if "loss" in row]
    rates = [row["learning_rate"] / 3e-3 for row in rows]
    assert rates[:4] == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8])
    assert rates[7] == pytest.approx(3 / 8)
    assert [row["batch"] for row in rows[:8]] == [16, 16, 16, 8, 8, 8, 8, 20]
    assert [row["multiplier"] for row in rows[:8]] == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 1.25]
    assert [row["workers"] for row in rows[:8]] == [4, 4, 4, 2, 2, 2, 2, 5]
    assert sum(row["batch"] for row in rows) == 120 and rows[-1]["epoch"] == 1.0


def test_steps_of_the_trainer_are_steps_of_the_fleet(tmp_path: Path) -> None:
    """Saved, evaluated and logged after every second step of the fleet, and after every epoch."""
    seen: list[tuple[str, int, float]] = []

    class Seen(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seen.append(("step", state.global_step, state.epoch))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seen.append(("epoch", state.global_step, state.epoch))

    main = example()["main"]
    plain = main.__globals__["ElasticTrainer"]
    main.__globals__["ElasticTrainer"] = lambda **settings: plain(**settings, callbacks=[Seen()])
    try:
        made = trained(tmp_path, save_strategy="steps", save_steps=5, num_train_epochs=2)
    finally:
        main.__globals__["ElasticTrainer"] = plain
    steps = [number for kind, number, _ in seen if kind == "step"]
    assert steps == list(range(1, made.session.step + 1))
    assert [epoch for kind, _, epoch in seen if kind == "epoch"] == [1.0, 2.0]
    saved = sorted(int(folder.name.partition("-")[2]) for folder in tmp_path.glob("checkpoint-*"))
    assert saved == [*range(5, made.session.step, 5), made.session.step]


def test_max_steps_count_steps_at_the_reference_batch(tmp_path: Path) -> None:
    """Five steps of 16 samples: 3 * 16 + 4 * 8 = 80."""
    made = trained(tmp_path, max_steps=5)
    assert (made.state.global_step, made.session.flow.ledger.total) == (7, 80)


# Saving and precision ----------------------------------------------------------------------------------------------


def test_a_run_that_was_saved_in_the_middle_of_an_epoch_ends_with_the_same_weights(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "cosine", "num_train_epochs": 2}
    made = trained(tmp_path, {"rule": "adascale"}, **settings)
    again = trained(tmp_path / "again", {"rule": "adascale"}, resume=str(tmp_path / "checkpoint-6"), **settings)
    assert torch.equal(weights(made.model), weights(again.model))
    assert again.state.global_step == made.state.global_step
    expected = {row["step"]: row.get("learning_rate") for row in made.state.log_history if "loss" in row}
    assert {row["step"]: row.get("learning_rate") for row in again.state.log_history if "loss" in row} == expected


def test_mixed_precision_in_bfloat16_learns(tmp_path: Path) -> None:
    made = trained(tmp_path, bf16=True, num_train_epochs=2)
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in made.model.parameters())


def test_a_loss_scale_changes_neither_the_measurement_nor_the_step() -> None:
    """What fp16 does, with a scaler on the CPU: a scale of 1024 is a power of two, so that all bits are the same."""
    runs = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        settings = {"trace": "constant(workers=2)", "rule": "adascale", "base_batch": 4, "local_batch": 4, "epochs": 1}
        settings["loader_workers"] = 0
        rows = []
        with ebbflow.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings) as session:
            from ebbflow.integrations.session_optimizer import SessionOptimizer

            optimizer = SessionOptimizer(session.flow.optimizer, scaled=True)
            optimizer.begin(session)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
            while (step := session.next_step()) is not None:
                for x, y in step:
                    loss = (model(x) - y).square().mean()
                    scaler.scale(loss.detach())
                    step.backward(loss, loss_scale=scale)
                step.combine()
                optimizer.combined = step
                scaler.step(optimizer)
                scaler.update()
                rows.append(optimizer.row)
        runs.append((weights(model), [(row.loss, row.multiplier, row.stats) for row in rows]))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_the_samples_of_a_step_that_overflows_count_and_the_scale_falls() -> None:
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.tensor([[1.0], [math.inf], [1.0], [1.0]]), torch.zeros(4, 1))
    settings = {"trace": "constant(workers=1)", "base_batch": 1, "local_batch": 1, "epochs": 1, "on_nonfinite": "skip"}
    settings["loader_workers"] = 0
    with ebbflow.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings) as session:
        from ebbflow.integrations.session_optimizer import SessionOptimizer

        optimizer = SessionOptimizer(session.flow.optimizer, scaled=True)
        optimizer.begin(session)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        while (step := session.next_step()) is not None:
            for x, y in step:
                loss = (model(x) - y).square().mean()
                scaler.scale(loss.detach())
                step.backward(loss, loss_scale=scaler.get_scale())
            step.combine()
            optimizer.combined = step
            scaler.step(optimizer)
            scaler.update()
        assert session.step == 4 and scaler.get_scale() == 32.0 and torch.isfinite(model.weight).all()


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elastic", "settings", "message"),
    [
        ({"epochs": 3}, {}, "epochs is given for the session.*set num_train_epochs"),
        ({"clip": 1.0}, {}, "clip is given for the session.*set max_grad_norm"),
        ({"schedule": "cosine"}, {}, "schedule is given for the session.*set lr_scheduler_type"),
        ({"base_batch": None}, {}, "base_batch is missing"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy is 'group_by_length'.*'random'"),
        ({"engine": "live"}, {"fp16": True}, "fp16 is set.*use bf16"),
        ({"rul": "sqrt"}, {}, "unknown setting 'rul'; did you mean 'rule'"),
        ({"engine": "lve"}, {}, "engine is 'lve'; did you mean 'live'"),
        ({}, {"num_train_epochs": 0}, "num_train_epochs is 0; expected more than 0, or max_steps"),
        ({}, {"samples": 0}, "train_dataset has no samples"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    elastic: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, elastic, **settings)


def test_a_checkpoint_of_the_plain_trainer_and_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2}
    args = transformers.TrainingArguments(output_dir=str(tmp_path), save_strategy="steps", save_steps=2, **settings)
    known = {"model": new_model(), "args": args, "train_dataset": Decoded(), "data_collator": example()["pad"]}
    transformers.Trainer(**known).train()
    with pytest.raises(CheckpointError, match="saved by a script without Ebbflow; load its weights"):
        ElasticTrainer(**known, elastic={"base_batch": 8}).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"elastic is 'spot\.csv'; expected settings"):
        ElasticTrainer(**known, elastic="spot.csv")  # type: ignore[arg-type]


def test_a_model_whose_weights_are_all_frozen_is_refused(tmp_path: Path) -> None:
    model = new_model()
    model.requires_grad_(False)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = ElasticTrainer(
        model=model, args=args, train_dataset=Decoded(), data_collator=example()["pad"], elastic={"base_batch": 4}
    )
    with pytest.raises(ConfigError, match=r"the optimizer has no parameters.*frozen"):
        trainer.train()


def test_a_stream_is_refused(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter(Decoded())

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    with pytest.raises(ConfigError, match=r"train_dataset is a Stream, a stream.*random access"):
        ElasticTrainer(model=new_model(), args=args, train_dataset=Stream(), elastic={"base_batch": 4})


def test_the_mixin_makes_any_trainer_elastic(tmp_path: Path) -> None:
    class Weighted(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **others: Any) -> Any:
            return 0.0 * super().compute_loss(*arguments, **others)

    class Elastic(ElasticTrainerMixin, Weighted):
        pass

    model = new_model()
    before = weights(model).clone()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        weight_decay=0.0,
    )
    Elastic(
        model=model, args=args, train_dataset=Decoded(), data_collator=example()["pad"], elastic={"base_batch": 64},
    ).train()  # fmt: skip
    assert torch.equal(before, weights(model))


# Real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_trainers_are_replicas_of_a_live_fleet(tmp_path: Path) -> None:
    """Two replicas: every sample counts once, and all have the same weights."""
    pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
    from ebbflow.live import read_fleet

    command = [sys.executable, "-m", "ebbflow", "launch", "--replicas", "2", "--out", str(tmp_path / "fleet")]
    script = tmp_path / "replica.py"
    script.write_text(
        "from ebbflow.workloads.torchvision_import import import_torchvision\n"
        "import_torchvision(needed_for='transformers')\n"
        "import os, runpy\n"
        f"main = runpy.run_path({str(EXAMPLE)!r})['main']\n"
        f"main(os.path.join({str(tmp_path)!r}, os.environ['EBBFLOW_REPLICA']), num_train_epochs=1, samples=120)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    account, runs = read_fleet(tmp_path / "fleet")
    assert account.exactly_once and account.epochs == 1
    assert len({run.end.weights_sha256 for run in runs if run.end is not None}) == 1
