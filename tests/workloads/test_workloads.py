"""The registry, recipes and tasks: what every workload guarantees, and how a user adds one."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from ebbflow import register_workload, workloads
from ebbflow.errors import ConfigError, DataError, InputError, MissingExtra, SpecError
from ebbflow.optim.optimizers import build_optimizer
from ebbflow.optim.schedules import make_schedule
from ebbflow.workloads import WORKLOADS, Recipe, Task, TensorSource
from ebbflow.workloads.workload import Workload

OWN = {
    "digits-mlp": 8_970,
    "digits-cnn": 24_058,
    "fashion-cnn": None,
    "folder-resnet18": None,
    "folder-resnet50": None,
    "imagenet-mobilenet": None,  # the others are in test_imagenet.py
    "cifar10-mobilenet": None,
    "cifar10-resnet18": None,
    "cifar10-resnet50": None,
    "cifar10-vgg11": None,
    "cifar10-vgg16": None,
    "cifar10-wrn16-4": None,
    "cifar100-resnet50": None,
    "shakespeare-gpt": None,
}
RECIPE = Recipe(ref_batch=4, local_batch=2, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric="accuracy")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path | None]:
    """A tiny data set for every workload that needs one: images of two classes, a periodic text."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 16)):
        labels = (np.arange(count) % 2).astype(np.uint8)
        pixels = (rng.integers(0, 100, (count, 28, 28)) + 100 * labels[:, None, None]).astype(np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = [i % 2 for i in range(8)]
        rows = (rng.integers(0, 100, (8, 3072)) + 100 * np.array(batch)[:, None]).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": rows, b"labels": batch}, protocol=2))
    for name, count in (("train", 40), ("test", 8)):
        fine = [99 * (i % 2) for i in range(count)]
        rows = (rng.integers(0, 100, (count, 3072)) + 100 * (np.array(fine) > 0)[:, None]).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": rows, b"fine_labels": fine}, protocol=2))
    for part, count in (("train", 40), ("val", 8)):
        for i in range(count):
            path = folder / "images" / part / f"class{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((rng.integers(0, 100, (48, 40, 3)) + 100 * (i % 2)).astype(np.uint8)).save(path)
    text = folder / "text.txt"
    text.write_text("the tide comes in and the tide goes out. " * 200)
    images = {name: folder for name in OWN if name.startswith(("cifar", "fashion"))}
    folders = {name: folder / "images" for name in OWN if name.startswith(("folder", "imagenet"))}
    return {**images, **folders, "shakespeare-gpt": text}


def small(name: str) -> str:
    if name.startswith("cifar"):
        return f"{name}(width=4)"
    if name.startswith(("folder", "imagenet")):
        return f"{name}(size=32)"
    return {"shakespeare-gpt": "shakespeare-gpt(width=32, layers=2)"}.get(name, name)


# ---- every workload ----


@pytest.mark.parametrize("name", OWN)
def test_every_recipe_is_known_without_data_and_its_texts_can_be_parsed(name):
    recipe = workloads.recipe(name)
    build_optimizer(recipe.optimizer, [nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    make_schedule(recipe.schedule)
    assert recipe.metric in ("accuracy", "loss")
    assert recipe.higher_is_better == (recipe.metric != "loss")
    assert WORKLOADS.entry(name).summary.endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_few_steps_of_its_own_recipe_lower_the_loss(name, data):
    task = workloads.build(small(name), data=data.get(name), seed=0)
    recipe = task.recipe
    # A tenth of the rate: at the full one, without warm-up, the loss of a deep network may rise in its first steps.
    optimizer = build_optimizer(recipe.optimizer, task.model.parameters(), lr=recipe.lr / 10)
    x, y = task.train.batch(torch.arange(min(recipe.ref_batch, len(task.train))), train=False)
    losses = []
    for _ in range(6):
        loss = task.loss(task.model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", OWN)
def test_batches_have_the_shape_that_the_model_takes(name, data):
    task = workloads.build(small(name), data=data.get(name))
    x, y = task.train.batch(np.array([3, 1, 4]), train=True)
    assert x.dtype == (torch.int64 if name == "shakespeare-gpt" else torch.float32)
    assert y.dtype == torch.int64
    assert len(x) == len(y) == 3
    assert task.model(x).shape[:-1] == y.shape
    assert set(task.evaluate(task.model)) == {"loss", task.recipe.metric}


@pytest.mark.parametrize("name", OWN)
def test_weights_depend_on_the_seed_only_and_data_on_nothing(name, data):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = workloads.build(small(name), data=data.get(name), seed=3)
    assert torch.equal(torch.get_rng_state(), before), "the generator of the caller must not move"
    torch.rand(7)
    again = workloads.build(small(name), data=data.get(name), seed=3)
    other = workloads.build(small(name), data=data.get(name), seed=4)
    for a, b in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    index = torch.arange(4)
    for a, b in zip(first.valid.batch(index, train=False), other.valid.batch(index, train=False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OWN)
def test_a_task_describes_itself_as_json(name, data):
    text = json.dumps(workloads.build(small(name), data=data.get(name)).describe())
    assert json.loads(text)["recipe"]["ref_batch"] == workloads.recipe(name).ref_batch


# ---- single workloads ----


def test_digits_are_split_by_class_and_standardised():
    task = workloads.build("digits-mlp")
    assert (len(task.train), len(task.valid)) == (1442, 355)
    x, y = task.train.batch(np.arange(1442), train=True)
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-5
    # scikit-learn's digits hold 174 to 183 of each class; floor(n / 5) of each are held out.
    held_out = torch.bincount(task.valid.batch(np.arange(355), train=False)[1])
    assert torch.equal(held_out, (torch.bincount(y) + held_out) // 5)


@pytest.mark.parametrize(("name", "parameters"), [(n, p) for n, p in OWN.items() if p])
def test_the_small_models_have_the_documented_size(name, parameters):
    assert workloads.build(name).describe()["parameters"] == parameters


def test_the_resnet_has_the_size_of_the_paper_and_the_gpt_of_the_text(data):
    assert workloads.build("cifar10-resnet18", data=data["cifar10-resnet18"]).describe()["parameters"] == 11_173_962
    gpt = workloads.build("shakespeare-gpt", data=data["shakespeare-gpt"])
    # 4 blocks of 12 * 128^2 weights and two norms, positions, the last norm, and two tables for each character.
    characters = len(set(Path(data["shakespeare-gpt"]).read_text()))
    expected = 4 * (12 * 128**2 + 4 * 128) + 128 * 128 + 2 * 128 + 2 * 128 * characters
    assert gpt.describe()["parameters"] == expected


def test_cifar_training_images_are_augmented_and_test_images_are_not(data):
    task = workloads.build("cifar10-resnet18(width=8)", data=data["cifar10-resnet18"])
    index = np.arange(8)
    torch.manual_seed(0)
    plain = task.train.batch(index, train=False)[0]
    assert not torch.equal(task.train.batch(index, train=True)[0], plain)
    assert torch.equal(task.valid.batch(index, train=True)[0], task.valid.batch(index, train=False)[0])
    # Standardised per channel: the byte 125.31 of red is 0, and one deviation, 62.99, is 1.
    red = task.train.x[:, 0].float()
    torch.testing.assert_close(plain[:, 0], (red[:8] - 125.31) / 62.99)


def test_the_gpt_does_not_see_the_future(data):
    task = workloads.build("shakespeare-gpt(width=32, layers=2)", data=data["shakespeare-gpt"])
    x, _ = task.train.batch(np.array([0, 1]), train=False)
    changed = x.clone()
    changed[:, 64:] = 0
    before, after = task.model(x), task.model(changed)
    torch.testing.assert_close(before[:, :64], after[:, :64])
    assert not torch.allclose(before[:, 64:], after[:, 64:])


def test_the_gpt_has_dropout_in_training_only(data):
    task = workloads.build("shakespeare-gpt(width=32, dropout=0.5)", data=data["shakespeare-gpt"])
    x, _ = task.train.batch(np.array([0]), train=False)
    assert not torch.equal(task.model(x), task.model(x))
    task.model.eval()
    assert torch.equal(task.model(x), task.model(x))


def test_the_text_is_split_in_time(data):
    task = workloads.build("shakespeare-gpt(context=16)", data=data["shakespeare-gpt"])
    # 41 * 200 = 8,200 characters: 7,380 for training and 820 for validation; blocks of 16 with one more to predict.
    assert len(task.train) == (7380 - 1) // 16
    assert len(task.valid) == (820 - 1) // 16


def test_a_text_with_the_line_ends_of_windows_is_the_same_text(tmp_path):
    tokens = []
    for ends in ("\n", "\r\n"):
        path = tmp_path / "text.txt"
        path.write_bytes(("the tide comes in" + ends + "and goes out" + ends).encode() * 20)
        task = workloads.build("shakespeare-gpt(context=8, width=8, layers=1)", data=path)
        tokens.append(task.train.tokens)
    assert torch.equal(*tokens)


# ---- wrong input ----


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "is empty"), (b"ab\xff\xfe", "binary file, not text"), (None, "no such file")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, says):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"text\.txt.*{says}"):
        workloads.build("shakespeare-gpt", data=path)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("digits-mpl", SpecError, "did you mean 'digits-mlp'"),
        ("digits-mlp(depth=3)", SpecError, "unknown argument 'depth'; .*he form is digits-mlp\\(width=64\\)"),
        ("digits-mlp(width=wide)", SpecError, "expected a number"),
        ("digits-mlp(seed=3)", SpecError, "unknown argument 'seed'"),
        ("shakespeare-gpt(width=30)", ConfigError, "width=30 is not a multiple of heads=4"),
        ("shakespeare-gpt(dropout=1)", ConfigError, "dropout is 1"),
        ("shakespeare-gpt(context=0)", ConfigError, "context is 0"),
        ("shakespeare-gpt(context=4000)", DataError, "8200 characters; a context of 4000 needs 40010"),
    ],
)
def test_a_wrong_name_or_argument_is_explained(text, kind, says, data):
    with pytest.raises(kind, match=says):
        workloads.build(text, data=data.get(text.partition("(")[0]))


@pytest.mark.parametrize("name", [name for name in OWN if name.startswith(("cifar", "shake"))])
def test_missing_data_is_asked_for(name):
    with pytest.raises(DataError, match=f"{name} needs its data: give with data="):
        workloads.build(name)


def test_missing_fashion_data_says_where_debian_puts_it(monkeypatch, tmp_path):
    monkeypatch.setattr("ebbflow.workloads.images._DEBIAN", tmp_path / "not-installed")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*dataset-fashion-mnist"):
        workloads.build("fashion-cnn")
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte, .*dataset-fashion-mnist"):
        workloads.build("fashion-cnn", data=tmp_path)


def test_fashion_data_that_debian_installed_is_found(monkeypatch, data):
    monkeypatch.setattr("ebbflow.workloads.images._DEBIAN", data["fashion-cnn"])
    assert len(workloads.build("fashion-cnn").train) == 64


def test_data_for_a_workload_that_takes_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the workload 'digits-mlp' takes none"):
        workloads.build("digits-mlp", data=tmp_path)


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match=f"device '?{device}"):
        workloads.build("digits-mlp", device=device)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ref_batch": 0}, "ref_batch is 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": -1.0}, "lr is -1"),
        ({"optimizer": "sgd(momentum"}, "optimizer: .*parentheses"),
        ({"schedule": ""}, "schedule: the text is empty"),
        ({"metric": ""}, "metric is empty"),
    ],
)
def test_an_impossible_recipe_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(RECIPE, **change)


# ---- a workload of one's own ----


@pytest.fixture
def registry(monkeypatch):
    """Undo the registrations of a test after it."""
    monkeypatch.setattr(WORKLOADS, "_entries", dict(WORKLOADS._entries))


def blobs(recipe: Recipe, width: int = 3) -> Task:
    """Two points, separated by a line."""
    x, y = torch.tensor([[-1.0], [1.0]]).repeat(1, width), torch.tensor([0, 1])
    return Task(model=nn.Linear(width, 2), train=TensorSource(x, y), valid=TensorSource(x, y), recipe=recipe)


def test_an_own_workload_is_a_function_that_is_registered(registry):
    register_workload("blobs", recipe=RECIPE, cite="nobody")(blobs)
    assert workloads.recipe("blobs") == RECIPE
    assert workloads.build("blobs(width=5)").model.in_features == 5
    assert workloads.build("blobs(5)").model.in_features == 5
    entry = WORKLOADS.entry("blobs")
    assert (entry.summary, entry.cite) == ("Two points, separated by a line.", "nobody")
    assert [(name, default) for name, default, _ in entry.parameters] == [("width", "3")]


def test_the_shorter_name_of_the_package_is_the_same_function():
    assert workloads.register is register_workload


def test_an_error_of_a_builder_keeps_its_cause_and_names_the_builder_s_line_even_when_torch_raised_it(registry):
    @register_workload("mismatched", recipe=RECIPE)
    def mismatched(recipe):
        return torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(ConfigError, match=r"'mismatched' cannot be built: RuntimeError: .*size") as caught:
        workloads.build("mismatched")
    assert isinstance(caught.value.__cause__, RuntimeError)
    # The function's first line is that of its decorator; the product is two lines below.
    assert str(caught.value).endswith(f"({__file__}:{mismatched.__code__.co_firstlineno + 2}, in mismatched)")


def test_a_wrong_use_of_ebbflow_in_a_builder_names_the_builder_s_line_too(registry):
    @register_workload("uneven", recipe=RECIPE)
    def uneven(recipe):
        return TensorSource(torch.zeros(3, 1), torch.zeros(2))

    with pytest.raises(ConfigError, match=rf"ConfigError: 3 inputs but 2 targets.* \({__file__}:\d+, in uneven\)"):
        workloads.build("uneven")


@pytest.mark.parametrize(
    "error",
    [
        MissingExtra("cv2", extra="vision", needed_for="my reader"),
        MemoryError("too large"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 PiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_needs_no_line_is_passed_on_as_it_is(registry, error):
    @register_workload("raises", recipe=RECIPE)
    def raises(recipe):
        raise error

    with pytest.raises(type(error)) as caught:
        workloads.build("raises")
    assert caught.value is error


def test_a_builder_that_returns_no_task_is_refused(registry):
    @register_workload("forgetful", recipe=RECIPE)
    def forgetful(recipe):
        blobs(recipe)

    with pytest.raises(
        ConfigError, match=r"forgetful of the workload 'forgetful' returned a NoneType; expected a Task"
    ):
        workloads.build("forgetful")


def test_a_workload_that_asks_for_data_and_seed_gets_them(registry, tmp_path):
    seen = {}

    @register_workload("curious", recipe=RECIPE)
    def curious(data, seed, recipe):
        seen.update(data=data, seed=seed)
        return blobs(recipe)

    workloads.build("curious", data=str(tmp_path), seed=9)
    assert seen == {"data": tmp_path, "seed": 9}


def test_the_same_name_twice_is_refused(registry):
    with pytest.raises(SpecError, match="'digits-mlp' is registered already"):
        register_workload("digits-mlp", recipe=RECIPE)(blobs)


def test_a_parameter_without_a_default_is_refused(registry):
    def needy(recipe: Recipe, width: int) -> Task:
        raise NotImplementedError

    with pytest.raises(SpecError, match="'width' needs a type and a default"):
        register_workload("needy", recipe=RECIPE)(needy)


def test_a_workload_reads_nothing_before_it_is_built(registry):
    def explosive(data: Path | None, recipe: Recipe, width: int = 1) -> Task:
        raise AssertionError("built")

    register_workload("explosive", recipe=RECIPE)(explosive)
    workload = WORKLOADS.make("explosive(width=2)")
    assert isinstance(workload, Workload)
    assert (workload.recipe, workload.takes_data, workload.arguments) == (RECIPE, True, {"width": 2})


# ---- tasks ----


def test_evaluation_is_the_mean_over_samples_whatever_the_batches():
    # Logits are (0, x); for x = 1, -1, 2, 3, 4 and targets all 1, four of five are right.
    x = torch.tensor([[1.0], [-1.0], [2.0], [3.0], [4.0]])
    y = torch.ones(5, dtype=torch.int64)
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[0.0], [1.0]])
    source = TensorSource(x, y)
    for size in (1, 2, 5, 100):
        task = Task(model=model, train=source, valid=source, recipe=RECIPE, eval_batch=size)
        scores = task.evaluate(model)
        assert scores["accuracy"] == pytest.approx(0.8)
        assert scores["loss"] == pytest.approx(float(torch.log1p(torch.exp(-x)).mean()))


def test_evaluation_leaves_every_mode_as_it_was_and_uses_running_statistics():
    task = workloads.build("digits-cnn")
    frozen = next(m for m in task.model.modules() if isinstance(m, nn.BatchNorm2d))
    frozen.eval()
    buffers = {name: value.clone() for name, value in task.model.named_buffers()}
    task.evaluate(task.model)
    assert task.model.training
    assert not frozen.training
    assert all(torch.equal(value, buffers[name]) for name, value in task.model.named_buffers())


def test_own_scores_are_used_and_must_hold_the_metric():
    source = TensorSource(torch.zeros(2, 1), torch.zeros(2))
    recipe = dataclasses.replace(RECIPE, metric="error")

    def scores(model, x, y):
        return {"error": (model(x).squeeze(1) - y).abs().mean()}

    model = nn.Linear(1, 1)
    task = Task(model=model, train=source, valid=source, recipe=recipe, scores=scores)
    assert task.evaluate(model) == {"error": pytest.approx(abs(model.bias.item()))}
    with pytest.raises(ConfigError, match="'error' is not built in"):
        Task(model=model, train=source, valid=source, recipe=recipe)
    with pytest.raises(ConfigError, match="the metric is 'accuracy', but the scores are error"):
        Task(model=model, train=source, valid=source, recipe=RECIPE, scores=scores).evaluate(model)


def test_a_metric_of_loss_reports_the_task_s_own_loss():
    recipe = dataclasses.replace(RECIPE, metric="loss", higher_is_better=False)
    source = TensorSource(torch.ones(3, 1), torch.zeros(3))

    def squared(model, x, y):
        return (model(x).squeeze(1) - y).square().mean()

    model = nn.Linear(1, 1)
    task = Task(model=model, train=source, valid=source, recipe=recipe, loss=squared)
    assert task.evaluate(model)["loss"] == pytest.approx((model.weight + model.bias).item() ** 2)


def test_a_task_without_samples_is_refused():
    empty, one = TensorSource(torch.zeros(0, 1), torch.zeros(0)), TensorSource(torch.zeros(1, 1), torch.zeros(1))
    for sources, says in (({"train": one, "valid": empty}, "0 validation"), ({"train": empty}, "0 training")):
        with pytest.raises(ConfigError, match=f"the task has {says} samples; expected 1 or more"):
            Task(model=nn.Linear(1, 1), **sources)


@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_data_set_that_is_no_source_is_refused_with_the_way_to_make_it_one(name):
    one = TensorSource(torch.zeros(1, 1), torch.zeros(1))
    sources = {"train": one, "valid": one, name: TensorDataset(torch.zeros(1, 1), torch.zeros(1))}
    with pytest.raises(ConfigError, match=rf"{name} is a TensorDataset, which has no batch, to; .*DatasetSource"):
        Task(model=nn.Linear(1, 1), **sources)


# ---- a task without a workload ----


POINTS = TensorSource(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]))


def squared_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - y).square().mean()


def test_a_task_for_a_loop_of_one_s_own_has_a_model_and_training_samples_only():
    task = Task(model=nn.Linear(1, 1), train=POINTS, loss=None)
    assert task.describe() == {
        "model": "Linear", "parameters": 2, "train_samples": 2, "valid_samples": 0, "recipe": None
    }  # fmt: skip
    task.close()
    with pytest.raises(ConfigError, match=r"the task has no valid, which is needed here; give Task\(valid=\.\.\.\)"):
        task.evaluate(task.model)
    with pytest.raises(ConfigError, match=r"the task has no loss, .* `loss\(model, x, y\)`"):
        task.require_loss()
    with pytest.raises(ConfigError, match=r"the task has no recipe, .*Task\(recipe=\.\.\.\)"):
        task.require_recipe()


def test_without_a_recipe_a_model_is_evaluated_by_the_scores_or_the_loss():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 3.0)
    # The model predicts 3 for the targets 0 and 1: the errors are 3 and 2.
    by_loss = Task(model=model, train=POINTS, valid=POINTS, loss=squared_error)
    assert by_loss.evaluate(model) == {"loss": pytest.approx(6.5)}
    by_scores = Task(
        model=model, train=POINTS, valid=POINTS, loss=None,
        scores=lambda model, x, y: {"error": (model(x).squeeze(1) - y).abs().mean()},
    )  # fmt: skip
    assert by_scores.evaluate(model) == {"error": pytest.approx(2.5)}
    with pytest.raises(ConfigError, match="the task has no loss"):
        Task(model=model, train=POINTS, valid=POINTS, loss=None).evaluate(model)
    assert model.training, "a failed evaluation leaves the mode as it was, too"


def test_a_workload_s_task_without_a_recipe_gets_the_registered_one_and_other_gaps_are_refused(registry):
    parts = {"valid": POINTS, "loss": squared_error}
    for gap in ("recipe", *parts):

        @register_workload(f"without-{gap}", recipe=RECIPE)
        def without(gap: str = gap) -> Task:
            return Task(model=nn.Linear(1, 1), train=POINTS, **{**parts, gap: None})

    assert workloads.build("without-recipe").recipe == RECIPE
    for gap, says in (("valid", "validation samples"), ("loss", "loss function")):
        with pytest.raises(ConfigError, match=f"the workload 'without-{gap}' has no {says}"):
            workloads.build(f"without-{gap}")


def test_errors_of_workloads_are_input_errors():
    with pytest.raises(InputError):
        workloads.build("no-such-thing")
