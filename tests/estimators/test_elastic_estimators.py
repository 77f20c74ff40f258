"""What a fit does, beside what scikit-learn's suite asks: the same weights as a plain loop, every sample once."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.utils.validation import has_fit_parameter
from skorch.callbacks import EpochScoring, GradientNormClipping, LRScheduler
from skorch.dataset import ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ebbflow.data.permutation import Permutation
from ebbflow.engines.loss_sum import LossSum
from ebbflow.errors import ConfigError, DataError, Diverged, SpecError
from ebbflow.estimators.modules import DefaultMLP, ModelLoss
from ebbflow.record import read_record
from ebbflow.report.report_page import write_report
from ebbflow.sklearn import EbbflowClassifier, EbbflowRegressor

DIGITS, LABELS = (part[:300] for part in load_digits(return_X_y=True))
DIGITS = (DIGITS / 16).astype(np.float32)
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(97, 5)).astype(np.float32)
VALUES = (INPUTS @ np.arange(1.0, 6.0, dtype=np.float32)).astype(np.float32)


class HiddenLayer(nn.Module):
    """Sievert's own example (2021)."""

    def __init__(self, features: int = 4, hidden: int = 2, out: int = 1) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.out = nn.Linear(hidden, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


class WordsAndNumbers(Dataset[Any]):
    """A Dataset that keeps its samples one by one, with labels that are words."""

    words = ("ebb", "flow")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        if index >= 20:
            raise IndexError
        return torch.full((3,), float(index % 2)), self.words[index % 2]


def weights(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy() for parameter in model.parameters()]


# -- the same as without us --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", torch.optim.SGD])
def test_a_fit_equals_a_plain_torch_loop(optimizer: Any) -> None:
    settings = {} if isinstance(optimizer, str) else {"optimizer__momentum": 0.9}
    ours = EbbflowRegressor(
        optimizer=optimizer, lr=0.01, batch_size=16, max_epochs=3, random_state=7, module__hidden=(8,), **settings
    ).fit(INPUTS, VALUES)

    torch.manual_seed(7)
    model = DefaultMLP(features=5, outputs=1, hidden=(8,))
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.from_numpy(INPUTS), torch.from_numpy(VALUES)
    for epoch in range(3):
        order = torch.from_numpy(Permutation(97, 7, epoch).indices(0, 97))
        # 97 = 5 x 16 + 17: the sixth step takes one sample less, so that none is left alone.
        for rows in order.split([16, 16, 16, 16, 16, 15, 2]):
            plain.zero_grad()
            nn.functional.mse_loss(model(x[rows])[:, 0], y[rows]).backward()
            plain.step()
    for own, expected in zip(weights(ours.module_), weights(model), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    assert ours.n_updates_ == 21


def test_workers_that_share_a_step_change_nothing() -> None:
    def fitted(local_batch: int | None) -> EbbflowRegressor:
        settings = {"batch_size": 32, "max_epochs": 2, "random_state": 1}
        return EbbflowRegressor(**settings, local_batch=local_batch).fit(INPUTS, VALUES)

    alone, shared = fitted(None), fitted(8)
    assert [h["workers"] for h in alone.history] == [1, 1]
    assert [h["workers"] for h in shared.history] == [4, 4]
    for own, expected in zip(weights(shared.module_), weights(alone.module_), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_a_fit_leaves_the_random_numbers_of_the_caller_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    EbbflowRegressor(max_epochs=1, random_state=0).fit(INPUTS, VALUES)
    assert torch.equal(torch.rand(4), expected)


# -- exactly once, and fewer updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [16, 1000, "geo(delay=1ep, factor=3, initial=8)", "pada(rate=0.5, initial=4)"])
def test_every_sample_counts_once_an_epoch(batch_size: Any) -> None:
    model = EbbflowRegressor(batch_size=batch_size, max_epochs=3, lr=1e-3, random_state=0).fit(INPUTS, VALUES)
    for epoch in model.history:
        assert sum(batch["train_batch_size"] for batch in epoch["batches"]) == 97


def test_a_batch_that_grows_takes_fewer_updates() -> None:
    # 300 samples: 300/10 = 30 updates an epoch with 10, 300/20 = 15 with 20, ceil(300/40) = 8 with 40.
    model = EbbflowClassifier(
        batch_size="geo", batch_size__delay="2ep", batch_size__factor=2, batch_size__initial=10, max_epochs=5
    )
    model.fit(DIGITS, LABELS)
    assert [h["train_batch_count"] for h in model.history] == [30, 30, 15, 15, 8]
    assert [h["batch"] for h in model.history] == [10, 10, 20, 20, 40]
    assert [h["workers"] for h in model.history] == [1, 1, 2, 2, 4]
    assert model.n_updates_ == 98 == model.history[-1]["updates"]


def test_beyond_max_batch_and_max_workers_the_rate_pays() -> None:
    # Adam normalises, so a batch half as large as wanted costs a factor of sqrt(1/2) in the rate.
    settings = {"batch_size": "geo(delay=1ep, factor=2, initial=10)", "lr": 0.01, "max_epochs": 3}
    for limit in ({"batch_size__max_batch": 20}, {"max_workers": 2}):
        model = EbbflowClassifier(**settings, **limit).fit(DIGITS, LABELS)
        assert [h["batch"] for h in model.history] == [10, 20, 20]
        rates = [h["batches"][0]["train_lr"] for h in model.history]
        assert rates == pytest.approx([0.01, 0.01, 0.01 * 0.5**0.5])


def test_a_rule_scales_the_rate_with_the_batch() -> None:
    # A seed: weights that have hardly learned have so little signal that one fit in 20 reads none, and the whole ratio.
    settings = {
        "optimizer": "sgd", "lr": 0.01, "max_epochs": 2, "batch_size": "geo(delay=1ep, factor=4, initial=10)",
        "random_state": 0,
    }  # fmt: skip
    constant = EbbflowClassifier(**settings, rule="constant").fit(DIGITS, LABELS)
    linear = EbbflowClassifier(**settings, rule="linear").fit(DIGITS, LABELS)
    measured = EbbflowClassifier(**settings, rule="adascale").fit(DIGITS, LABELS)
    rates = [model.history[-1]["batches"][0]["train_lr"] for model in (constant, linear, measured)]
    assert rates[:2] == pytest.approx([0.01, 0.04])
    assert 0.01 < rates[2] < 0.04  # the gain lies between 1 and the ratio of the batches


@pytest.mark.parametrize("policy", ["ada(wait=5, dwell=5)", "rada(wait=5, dwell=5)", "noise(wait=5, dwell=5)"])
def test_policies_that_look_at_the_run_are_shown_it(policy: str) -> None:
    model = EbbflowClassifier(batch_size=policy, base_batch=10, max_epochs=4, random_state=0).fit(DIGITS, LABELS)
    assert model.history[-1]["batch"] > 10


# -- going on ----------------------------------------------------------------------------------------------------------


def test_partial_fit_goes_on_where_training_was() -> None:
    settings = {"batch_size": "geo(delay=1ep, factor=2, initial=10)", "rule": "adascale", "random_state": 2}
    whole = EbbflowClassifier(**settings, max_epochs=3).fit(DIGITS, LABELS)
    parts = EbbflowClassifier(**settings, max_epochs=3)
    for _ in range(3):
        parts.partial_fit(DIGITS, LABELS)
        parts = pickle.loads(pickle.dumps(parts))  # a search sends estimators to and fro
    assert [h["batch"] for h in parts.history] == [10, 20, 40]
    for own, expected in zip(weights(parts.module_), weights(whole.module_), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_partial_fit_knows_the_classes_that_it_was_told() -> None:
    model = EbbflowClassifier(random_state=0).partial_fit(DIGITS[:10], LABELS[:10], classes=range(10))
    assert model.classes_.tolist() == [*range(10)]
    first = EbbflowClassifier(random_state=0).partial_fit(DIGITS[LABELS < 3], LABELS[LABELS < 3])
    with pytest.raises(DataError, match=r"labels that the classes do not have: 3, 4.*classes=\[\.\.\.\]"):
        first.partial_fit(DIGITS, LABELS)


def test_a_warm_start_goes_on_and_a_cold_one_begins_anew() -> None:
    model = EbbflowRegressor(max_epochs=2, random_state=0).fit(INPUTS, VALUES).fit(INPUTS, VALUES)
    assert len(model.history) == 2
    model.set_params(warm_start=True).fit(INPUTS, VALUES)
    assert [h["epoch"] for h in model.history] == [1, 2, 3, 4]


def test_a_changed_rule_or_policy_begins_anew() -> None:
    model = EbbflowClassifier(batch_size="geo(delay=1ep, initial=10)", max_epochs=2).fit(DIGITS, LABELS)
    model.set_params(rule="linear", batch_size="pada", batch_size__initial=30, batch_size__rate=0)
    model.partial_fit(DIGITS, LABELS)
    assert model.history[-1]["batch"] == 30


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_of_parts_survive_clone_and_pickle() -> None:
    model = EbbflowRegressor(
        HiddenLayer, module__features=5, module__hidden=3, optimizer=torch.optim.Adadelta, optimizer__rho=0.8,
        batch_size="geo", batch_size__delay="3ep", random_state=0, max_epochs=2,
    )  # fmt: skip
    copy = clone(model).set_params(module__hidden=4, batch_size__factor=5)
    assert copy.get_params()["optimizer__rho"] == 0.8
    assert model.get_params()["module__hidden"] == 3
    copy.fit(INPUTS, VALUES)
    assert copy.module_.hidden.out_features == 4
    assert copy.optimizer_.param_groups[0]["rho"] == 0.8
    again = pickle.loads(pickle.dumps(copy))
    np.testing.assert_array_equal(again.predict(INPUTS), copy.predict(INPUTS))
    again.set_params(batch_size__factor=7, optimizer__rho=0.7, lr=0.5)  # also of a fitted estimator
    assert again.optimizer_.param_groups[0]["rho"] == 0.7
    assert again.fit(INPUTS, VALUES).n_updates_ == copy.n_updates_


def test_settings_of_a_named_optimizer_may_stand_beside_it() -> None:
    model = EbbflowRegressor(optimizer="adadelta(rho=0.8)", optimizer__weight_decay=1e-7, max_epochs=1)
    groups = model.fit(INPUTS, VALUES).optimizer_.param_groups
    assert (groups[0]["rho"], groups[0]["weight_decay"]) == (0.8, 1e-7)


def test_a_setting_replaces_what_the_text_says_by_its_place_too() -> None:
    """As a grid search sets them, over a text that was written by hand."""
    settings = {
        "optimizer": "sgd(0.9)",
        "optimizer__momentum": 0.5,
        "batch_size": "geo(5ep)",
        "batch_size__delay": "1ep",
    }
    model = EbbflowRegressor(**settings, max_epochs=2).fit(INPUTS, VALUES)
    assert model.optimizer_.param_groups[0]["momentum"] == 0.5
    assert model.history[:, "batch"] == [32, 64]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"batch_size": "goe"}, SpecError, "did you mean 'geo'"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0; expected a whole number from 1"),
        ({"batch_size__factor": 3}, ConfigError, "batch_size is 32, which has no settings such as batch_size__factor"),
        ({"rule": "lineer"}, SpecError, "did you mean 'linear'"),
        ({"optimizer": "adm"}, SpecError, "did you mean 'adam'"),
        ({"max_epochs": 0}, ConfigError, "max_epochs is 0"),
        ({"max_workers": 1.5}, ConfigError, "max_workers is 1.5"),
        ({"engine": "ray"}, ConfigError, "engine is 'ray'"),
        ({"learning_rate": 1}, ValueError, "unexpected argument"),
        ({"module__hiden": (3,)}, TypeError, "hiden"),
        ({"module__hidden": 3}, ConfigError, r"module__hidden is 3; expected the sizes of the hidden layers"),
        ({"lr": "a"}, ConfigError, "lr is 'a'; expected a number"),
        ({"lr": None}, ConfigError, "lr is None; expected a number"),
        ({"optimizer__lr": "a"}, ConfigError, "lr is 'a'; expected a number"),
        ({"criterion__reduction": "sum"}, ConfigError, "criterion is a sum over the samples, .* use reduction='mean'"),
        ({"lr": -1, "optimizer": torch.optim.SGD}, ConfigError, "lr is -1; expected a number above 0"),
        ({"module": 3}, ConfigError, r"module is 3; expected a subclass of torch.nn.Module, or an instance of one"),
        (
            {"module": dict},
            ConfigError,
            r"module is <class 'dict'>, which made {}; expected that it makes a torch.nn.Mod",
        ),
        (
            {"criterion": "mse"},
            ConfigError,
            r"criterion is 'mse'; expected a loss class such as torch.nn.MSELoss, or an",
        ),
        (
            {"criterion": nn.functional.mse_loss},
            ConfigError,
            r"criterion is <function mse_loss .*; expected a loss class",
        ),
        ({"optimizer": 3}, ConfigError, r"optimizer is 3; expected a class such as torch.optim.SGD, or a text such"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ConfigError, "optimizer is a SGD object; expected a class"),
        (
            {"train_split": 5},
            ConfigError,
            r"train_split is 5; expected .* such as skorch.dataset.ValidSplit\(5\), or None",
        ),
        (
            {"dtype": torch.float32},
            ConfigError,
            r"dtype is torch.float32; expected the name of a type of NumPy such as",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_fit(settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        EbbflowRegressor(**settings).fit(INPUTS, VALUES)


def test_a_loss_that_explodes_stops_the_fit_with_advice(tmp_path: Path) -> None:
    model = EbbflowRegressor(optimizer="sgd", lr=1e6, record=tmp_path)
    with pytest.raises(Diverged, match="use a smaller learning rate"):
        model.fit(INPUTS, VALUES)
    assert read_record(model.record_).status == "diverged"


# -- losses that torch divides by weights ------------------------------------------------------------------------------

CLASS_WEIGHTS = torch.tensor([1.0, 20.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 0.1, 3.0])


class Probabilities(nn.Module):
    """What `NLLLoss` takes, as in skorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).softmax(dim=1)


@pytest.mark.parametrize(
    "sharing",
    [
        {"engine": "loop", "local_batch": 16, "micro_batch": 5},
        {"engine": "fused", "local_batch": 8, "fused_batch": 16},
        {"engine": "auto"},
    ],
    ids=["loop", "fused", "whole"],
)
@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(ignore_index=3),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=1, label_smoothing=0.2),
        nn.NLLLoss(weight=CLASS_WEIGHTS, ignore_index=4),
    ],
    ids=["weights", "ignored", "weights, ignored and smoothed", "likelihood"],
)
def test_a_mean_by_weights_is_that_of_the_whole_step_however_it_is_shared(
    criterion: nn.Module, sharing: dict[str, Any]
) -> None:
    x, y = torch.from_numpy(DIGITS[:96]), torch.from_numpy(LABELS[:96])
    module = Probabilities if isinstance(criterion, nn.NLLLoss) else DefaultMLP
    sizes = {} if module is Probabilities else {"features": 64, "outputs": 10}
    torch.manual_seed(7)
    model = module(**sizes)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        order = torch.from_numpy(Permutation(96, 7, epoch).indices(0, 96))
        for rows in order.split(32):
            plain.zero_grad()
            output = model(x[rows])
            if module is Probabilities:
                output = torch.log(output + torch.finfo(output.dtype).eps)
            loss = criterion(output, y[rows])
            loss.backward()
            plain.step()
            losses.append(loss.item())

    ours = EbbflowClassifier(
        module, **{f"module__{name}": value for name, value in sizes.items()}, criterion=criterion, optimizer="sgd",
        lr=0.1, batch_size=32, max_epochs=2, random_state=7, **sharing,
    ).fit(x, y)  # fmt: skip
    for own, expected in zip(weights(ours.module_), weights(model), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)
    recorded = [batch["train_loss"] for epoch in ours.history for batch in epoch["batches"]]
    assert recorded == pytest.approx(losses, rel=1e-4)


def test_parts_of_a_step_have_the_sum_and_the_count_by_which_torch_divides() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randn(4, 3, 5, generator=generator)  # 4 samples of 5 tokens, 3 classes
    tokens = torch.randint(3, (4, 5), generator=generator)
    tokens[0, 2:] = -100
    tokens[1] = 7  # no class at all
    for criterion in (
        nn.CrossEntropyLoss(ignore_index=7, weight=torch.tensor([1.0, 2.0, 4.0])),
        nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1),
    ):
        found = ModelLoss(criterion).in_step(sequences[1:], tokens[1:])
        assert isinstance(found, LossSum)
        torch.testing.assert_close(found.total / found.count, criterion(sequences[1:], tokens[1:]))
    # By default torch ignores -100, the padding of sequences: here 3 of 10 tokens.
    assert ModelLoss(nn.CrossEntropyLoss()).in_step(sequences[[0, 2]], tokens[[0, 2]])[1] == 7
    # Nothing counts: torch's mean would be 0/0.
    total, count = ModelLoss(nn.CrossEntropyLoss(ignore_index=7)).in_step(sequences[1:2], tokens[1:2])
    assert (total, count) == (0, 0)


class MeanOverSamples(nn.CrossEntropyLoss):
    """Weighted, but divided by the number of samples."""

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, targets, self.weight, reduction="none").mean()


def test_a_mean_over_samples_stays_one() -> None:
    output, labels = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 4, 0, 8])
    shares = torch.full((4, 10), 0.1)
    for criterion, targets in (
        (MeanOverSamples(weight=CLASS_WEIGHTS), labels),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), shares),  # torch divides by the 4 samples
        (nn.MultiMarginLoss(weight=CLASS_WEIGHTS), labels),
    ):
        torch.testing.assert_close(ModelLoss(criterion).in_step(output, targets), criterion(output, targets))


def test_a_step_whose_targets_are_all_ignored_changes_nothing() -> None:
    settings = {"criterion": nn.CrossEntropyLoss, "criterion__ignore_index": 0, "optimizer": "sgd", "random_state": 0}
    model = EbbflowClassifier(**settings).partial_fit(DIGITS[:20], np.zeros(20, dtype=int), classes=range(10))
    torch.manual_seed(0)
    for own, expected in zip(weights(model.module_), weights(DefaultMLP(features=64, outputs=10)), strict=True):
        np.testing.assert_array_equal(own, expected)
    assert model.history[-1]["train_loss"] == 0


def test_a_loss_of_its_own_may_be_a_sum_with_its_count() -> None:
    class Weighted(EbbflowClassifier):  # type: ignore[misc]
        def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Any:
            total = nn.functional.cross_entropy(y_pred, y_true, CLASS_WEIGHTS, reduction="sum")
            count = CLASS_WEIGHTS[y_true].sum()
            return LossSum(total, count) if training else total / count

    settings = {"optimizer": "sgd", "lr": 0.1, "max_epochs": 1, "random_state": 0, "train_split": ValidSplit(5)}
    own = Weighted(**settings, engine="loop", micro_batch=5).fit(DIGITS, LABELS)
    torchs = EbbflowClassifier(**settings, criterion=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)).fit(DIGITS, LABELS)
    for ours, expected in zip(weights(own.module_), weights(torchs.module_), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_validation_has_the_mean_of_torch_over_a_batch() -> None:
    settings = {"criterion": nn.CrossEntropyLoss, "criterion__weight": CLASS_WEIGHTS, "max_epochs": 1}
    valid = predefined_split(TensorDataset(torch.from_numpy(DIGITS[200:]), torch.from_numpy(LABELS[200:])))
    model = EbbflowClassifier(**settings, train_split=valid, random_state=0).fit(DIGITS[:200], LABELS[:200])
    with torch.no_grad():
        output = model.module_(torch.from_numpy(DIGITS[200:]))
    expected = nn.functional.cross_entropy(output, torch.from_numpy(LABELS[200:]), CLASS_WEIGHTS)
    assert model.history[-1]["valid_loss"] == pytest.approx(expected.item(), rel=1e-5)


# -- what training would not use ---------------------------------------------------------------------------------------


class MyLoader(DataLoader[Any]):
    """An iterator of skorch's kind."""


@pytest.mark.parametrize(
    "settings",
    [
        {"iterator_train__sampler": [0, 0, 1]},
        {"iterator_train__drop_last": True},
        {"iterator_train": MyLoader},
    ],
)
def test_an_iterator_for_training_is_refused_with_what_to_do(settings: dict[str, Any]) -> None:
    (name,) = settings
    refused = pytest.raises(ConfigError, match=f"^{name} is given, but training uses no iterator.*criterion__weight")
    model = EbbflowRegressor(**settings)
    assert model.get_params()[name] is settings[name]
    with refused:
        model.fit(INPUTS, VALUES)
    with refused:
        model.partial_fit(INPUTS, VALUES)
    with refused:  # as a search fits it
        clone(model).fit(INPUTS, VALUES)
    with refused:
        EbbflowRegressor().set_params(**settings).fit(INPUTS, VALUES)


def test_the_iterator_that_skorch_has_by_default_may_be_named() -> None:
    model = EbbflowRegressor(iterator_train=DataLoader, max_epochs=1).fit(INPUTS, VALUES)
    assert "iterator_train" not in model.get_params()


@pytest.mark.parametrize("name", ["train_step", "train_step_single", "get_train_step_accumulator", "run_single_epoch"])
def test_a_way_to_train_that_would_not_be_called_is_refused(name: str) -> None:
    own = type("Own", (EbbflowRegressor,), {name: lambda *_, **__: None})
    with pytest.raises(ConfigError, match=f"^Own has a {name} of its own, which training would not call.*get_loss"):
        own().fit(INPUTS, VALUES)


def test_sample_weights_are_refused_with_what_to_do() -> None:
    for fit in (EbbflowClassifier(max_epochs=1).fit, EbbflowClassifier().partial_fit):
        with pytest.raises(ConfigError, match=rf"^{fit.__name__} was given sample_weight.*criterion__weight=.*repeat"):
            fit(DIGITS, LABELS, sample_weight=np.ones(300))
        with pytest.raises(TypeError, match=rf"{fit.__name__}\(\) got an unexpected keyword argument 'weights'"):
            fit(DIGITS, LABELS, weights=np.ones(300))
        fit(DIGITS, LABELS, sample_weight=None)  # what meta-estimators pass on if they were given none
    assert not has_fit_parameter(EbbflowClassifier(), "sample_weight")


# -- data --------------------------------------------------------------------------------------------------------------


def test_tensors_frames_and_datasets_give_what_arrays_give() -> None:
    import pandas as pd

    def answers(x: Any, y: Any) -> np.ndarray:
        return EbbflowRegressor(max_epochs=2, random_state=0).fit(x, y).predict(INPUTS)

    expected = answers(INPUTS, VALUES)
    frame = pd.DataFrame(INPUTS, columns=[*"abcde"])
    tensors = torch.from_numpy(INPUTS), torch.from_numpy(VALUES)
    np.testing.assert_array_equal(answers(*tensors), expected)
    np.testing.assert_array_equal(answers(TensorDataset(*tensors), None), expected)
    np.testing.assert_array_equal(answers(INPUTS.astype(np.float64), VALUES), expected)
    model = EbbflowRegressor(max_epochs=2, random_state=0).fit(frame, pd.Series(VALUES))
    assert model.feature_names_in_.tolist() == [*"abcde"]
    np.testing.assert_array_equal(model.predict(frame), expected)


def test_a_frame_with_words_is_refused_by_the_names_of_its_columns() -> None:
    import pandas as pd

    frame = pd.DataFrame({"size": [1.0, 2.0], "colour": ["red", "blue"]})
    with pytest.raises(DataError, match=r"the columns 'colour' .* do not hold numbers; encode them first"):
        EbbflowRegressor().fit(frame, [0.0, 1.0])


def test_words_are_classes_also_in_a_dataset() -> None:
    data = WordsAndNumbers()
    model = EbbflowClassifier(max_epochs=20, random_state=0, batch_size=4).fit(data)
    assert model.classes_.tolist() == ["ebb", "flow"]
    assert model.predict(np.array([[0.0] * 3, [1.0] * 3])).tolist() == ["ebb", "flow"]
    assert model.predict(data)[:3].tolist() == ["ebb", "flow", "ebb"]


def test_a_dataset_that_cannot_be_trained_on_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(DataError, match="map-style"):
        EbbflowClassifier().fit(Stream())
    with pytest.raises(DataError, match="brings its own targets"):
        EbbflowClassifier().fit(WordsAndNumbers(), [0, 1])


def test_images_keep_their_shape() -> None:
    images = DIGITS.reshape(-1, 1, 8, 8)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    model = EbbflowClassifier(module, max_epochs=1, random_state=0).fit(images, LABELS)
    assert model.predict_proba(images[:2]).shape == (2, 10)


def test_several_targets_are_predicted_together() -> None:
    both = np.stack([VALUES, -VALUES], axis=1)
    model = EbbflowRegressor(max_epochs=1, random_state=0).fit(INPUTS, both)
    assert model.predict(INPUTS).shape == (97, 2)
    column = EbbflowRegressor(max_epochs=1, random_state=0).fit(INPUTS, VALUES[:, None])
    assert column.predict(INPUTS).shape == (97, 1)


# -- history, callbacks, record ----------------------------------------------------------------------------------------


def test_validation_scores_and_callbacks_work_as_in_skorch() -> None:
    words = np.array(["no", "yes"])[(LABELS < 5).astype(int)]
    model = EbbflowClassifier(
        max_epochs=3, random_state=0, train_split=ValidSplit(5, stratified=True), optimizer="sgd", lr=0.1,
        callbacks=[
            ("f1", EpochScoring("f1_macro", lower_is_better=False)),
            ("train", EpochScoring("accuracy", name="train_acc", on_train=True, lower_is_better=False)),
            ("clip", GradientNormClipping(1e-12)),
            ("schedule", LRScheduler("StepLR", step_size=1, gamma=0.5)),
        ],
    )  # fmt: skip
    model.fit(DIGITS, words)
    last = model.history[-1]
    assert sum(batch["train_batch_size"] for batch in last["batches"] if "train_batch_size" in batch) == 240
    assert 0 <= last["valid_acc"] <= 1 and 0 <= last["f1_macro"] <= 1 and 0 <= last["train_acc"] <= 1
    # Clipped to nothing, the weights never move: the callback saw the gradients before the step.
    assert last["valid_loss"] == pytest.approx(model.history[0]["valid_loss"])
    assert [h["batches"][0]["train_lr"] for h in model.history] == pytest.approx([0.1, 0.05, 0.025])
    assert set(model.predict(DIGITS)) <= {"no", "yes"}


def test_a_loss_of_its_own_trains_a_subclass_as_in_skorch() -> None:
    class Halved(EbbflowRegressor):  # type: ignore[misc]
        def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().get_loss(y_pred, y_true) / 2

    settings = {"optimizer": "sgd", "max_epochs": 1, "random_state": 0}
    halved = Halved(**settings, lr=0.02).fit(INPUTS, VALUES)
    whole = EbbflowRegressor(**settings, lr=0.01).fit(INPUTS, VALUES)
    for own, expected in zip(weights(halved.module_), weights(whole.module_), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_record_of_a_fit_can_be_reported(tmp_path: Path) -> None:
    settings = {"max_epochs": 2, "record": tmp_path / "fits", "train_split": ValidSplit(5), "random_state": 0}
    fixed = EbbflowClassifier(**settings, batch_size=30).fit(DIGITS, LABELS)
    EbbflowClassifier(**settings, batch_size="geo(delay=1ep, initial=30)").fit(DIGITS, LABELS)
    run = read_record(fixed.record_)
    assert (run.status, len(run.steps), run.header.config["ref_batch"]) == ("finished", 16, 30)
    epochs, accuracy = run.metric("accuracy")
    assert epochs.tolist() == [1.0, 2.0]
    assert accuracy[-1] == pytest.approx(fixed.history[-1]["valid_acc"])
    page = write_report(tmp_path / "fits", out=tmp_path / "report").page
    assert "geo(delay=1ep, initial=30)" in page.read_text(encoding="utf-8")


def test_verbose_shows_a_bar_and_silence_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    EbbflowRegressor(max_epochs=1).fit(INPUTS, VALUES)
    assert capsys.readouterr() == ("", "")
    model = EbbflowRegressor(max_epochs=1, verbose=1).fit(INPUTS, VALUES)
    assert "97/97" in capsys.readouterr().err
    pickle.dumps(model)


# -- importing ---------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_without_skorch_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['skorch'] = None\n"
        "import ebbflow.sklearn\n"
        "assert 'torch' not in sys.modules\n"
        "ebbflow.sklearn.EbbflowClassifier"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert "needs skorch, which is not installed; run: pip install 'ebbflow[dask]'" in done.stderr


def test_the_module_made_for_the_data_has_their_type() -> None:
    model = EbbflowRegressor(max_epochs=1, dtype="float64", random_state=0).fit(INPUTS.astype(np.float64), VALUES)
    assert {parameter.dtype for parameter in model.module_.parameters()} == {torch.float64}
    assert np.isfinite(model.predict(INPUTS)).all()


# -- the rule where none is named --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "constant"),
        ({"batch_size": "geo(delay=1ep, factor=2)", "optimizer": "sgd"}, "constant"),
        ({"batch_size": 16, "base_batch": 8}, "sqrt+statewarmup(0.05, by=multiplier)"),
        ({"batch_size": 16, "base_batch": 8, "optimizer": torch.optim.SGD}, "adascale+statewarmup(0.05)"),
        ({"batch_size": "goodput(initial=8)", "optimizer": "sgd"}, "adascale+statewarmup(0.05)"),
    ],
    ids=["the batch stays", "the batch grows", "adam", "sgd", "goodput"],
)
def test_a_fit_without_a_rule_records_the_one_that_it_used(settings: dict[str, Any], rule: str, tmp_path: Path) -> None:
    model = EbbflowClassifier(**{"max_epochs": 2, "record": tmp_path, "lr": 0.01, **settings}).fit(DIGITS, LABELS)
    assert model.rule is None and model.rule_ == rule
    assert read_record(model.record_).header.config["rule"] == rule


def test_partial_fit_has_no_end_and_goes_on_with_its_rule() -> None:
    model = EbbflowClassifier(batch_size=16, base_batch=8, optimizer="sgd", lr=0.01)
    for _ in range(2):
        model.partial_fit(DIGITS, LABELS, classes=np.arange(10))
        assert model.rule_ == "adascale", "a warm-up would be a part of a length that nobody knows"
    assert model.fit(DIGITS, LABELS).rule_ == "adascale+statewarmup(0.05)"
    assert model.partial_fit(DIGITS, LABELS).rule_ == "adascale+statewarmup(0.05)"
