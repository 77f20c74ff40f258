"""What both estimators share: a net of skorch that is trained by Ebbflow."""
# ruff: noqa: N803, N806, because X is scikit-learn's name for it

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from skorch import NeuralNet
from skorch.callbacks import EpochTimer, PassthroughScoring, PrintLog
from skorch.dataset import Dataset
from skorch.utils import is_dataset
from torch.utils.data import DataLoader

from ebbflow.core.spec import parse_call
from ebbflow.core.units import whole_number
from ebbflow.errors import ConfigError, DataError
from ebbflow.estimators.batch_size import FitBatches
from ebbflow.estimators.dask_arrays import Blocks, check_blocks, is_dask
from ebbflow.estimators.fit import Fit, ProgressBar
from ebbflow.estimators.inputs import Slices, as_tensor, check_arrays, check_dataset
from ebbflow.estimators.modules import DefaultMLP, ModelLoss
from ebbflow.optim.optimizers import OPTIMIZERS, build_optimizer
from ebbflow.rules.families import default_rule, name_of_optimizer, tell_default_rule
from ebbflow.rules.rule import Rule, make_rule
from ebbflow.run.assemble import why_never_measured
from ebbflow.run.config import RunConfig, fields_of

__all__ = ["EbbflowNet"]

EVALUATION_BATCH = 1024
"""Samples of one forward pass in prediction and validation, unless `iterator_valid__batch_size` says otherwise."""

_MADE_BY_FIT = ("batch_size", "engine")
"""Parts that every fit makes from their parameters; skorch does not know them."""
_SET_DIRECTLY = (*_MADE_BY_FIT, "callbacks", "optimizer")
"""Parameters that skorch would take for parts of a module once the net is initialized."""
_SKORCH_HAS = ("optimizer", "lr", "max_epochs", "batch_size", "device")
"""Settings of a run that are parameters of skorch, too."""

_OTHER_DEFAULTS = {
    "optimizer": "adam",
    "lr": 0.01,
    "max_epochs": 20,
    "batch_size": 32,
    "random_state": None,
}
SETTINGS: dict[str, Any] = {name: _OTHER_DEFAULTS.get(name, field.default) for name, field in fields_of("estimator")}
"""The settings of a run that are parameters of the estimators, with their defaults."""

_NOT_CALLED = ("train_step", "train_step_single", "get_train_step_accumulator", "run_single_epoch")
"""Methods by which skorch trains; here the engine makes the steps. Validation alone calls `run_single_epoch`."""
_PREFIXES = tuple(f"{part}__" for part in _MADE_BY_FIT)


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


class EbbflowNet(NeuralNet):  # type: ignore[misc]  # skorch has no types
    """A net of skorch that is trained by Ebbflow: the batch may grow, and the learning rate follows it by a rule.

    Guarantees: each sample is used exactly once per epoch, in an order that depends only on `random_state` and the
    epoch; the gradient of a step is the mean over its samples, however many workers share it; an estimator continues
    after `partial_fit`, a warm start or unpickling as if it had not been interrupted; random numbers of the caller are
    left alone. Limits: the criterion must be a mean over samples, apart from torch's means weighted by class; there are
    no sample weights. docs/estimators.md explains the parameters."""

    # skorch determines these while it initializes. Known from the start, they allow parameters to be modules, and the
    # constructor to set nothing but parameters, as scikit-learn demands.
    prefixes_: ClassVar[list[str]] = [
        *NeuralNet.prefixes_, "module", "criterion", "optimizer", "batch_size", "engine",
    ]  # fmt: skip
    cuda_dependent_attributes_: ClassVar[list[str]] = ["module_", "criterion_", "optimizer_"]
    _modules: ClassVar[list[str]] = ["module"]
    _criteria: ClassVar[list[str]] = ["criterion"]
    _optimizers: ClassVar[list[str]] = ["optimizer"]
    history_ = None
    initialized_ = False
    virtual_params_: Any = MappingProxyType({})
    _fitting = False
    rule_: str

    def __init__(
        self,
        module: Any = None,
        criterion: Any = None,
        *,
        max_workers: int | None = None,
        record: Any = None,
        dtype: str | None = "float32",
        train_split: Any = None,
        callbacks: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        iterator_valid: Any = DataLoader,
        dataset: Any = Dataset,
        predict_nonlinearity: Any = "auto",
        compile: bool = False,
        use_caching: Any = "auto",
        torch_load_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        settings = {name: kwargs.pop(name, default) for name, default in SETTINGS.items()}
        super().__init__(
            module,
            criterion,
            train_split=train_split,
            callbacks=callbacks,
            warm_start=warm_start,
            verbose=verbose,
            iterator_valid=iterator_valid,
            dataset=dataset,
            predict_nonlinearity=predict_nonlinearity,
            compile=compile,
            use_caching=use_caching,
            torch_load_kwargs=torch_load_kwargs,
            **{name: settings.pop(name) for name in _SKORCH_HAS},
            **kwargs,
        )
        for name in ("history_", "initialized_", "virtual_params_"):
            self.__dict__.pop(name)  # the class has them
        for name, value in {**settings, "max_workers": max_workers, "record": record, "dtype": dtype}.items():
            setattr(self, name, value)

    __repr__ = BaseEstimator.__repr__  # skorch's shows the layers, which a grid search prints for every candidate

    # -- parameters ------------------------------------------------------------------------------------------------

    def _get_param_names(self) -> list[str]:
        """Parameters of the constructor, and what else was given: settings of parts (`module__hidden`), and an
        `iterator_train`, so that `fit` refuses it in a clone, too."""
        named = [
            name for name, p in inspect.signature(EbbflowNet.__init__).parameters.items()
            if name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD
        ]  # fmt: skip
        settings = [name for name in vars(self) if "__" in name and not name.startswith("_")]
        return [*named, *(["iterator_train"] if self._has_own_iterator else []), *settings]

    def _get_params_callbacks(self, deep: bool = True) -> dict[str, Any]:
        """Nothing: callbacks change while they are in use, and parameters must not. They can be set all the same."""
        return {}

    def set_params(self, **kwargs: Any) -> Self:
        """As in skorch; settings of the batch policy and of the engine take effect at the next fit."""
        ours = [name for name in kwargs if name in _SET_DIRECTLY or name.startswith(_PREFIXES)]
        for name in ours:
            setattr(self, name, kwargs.pop(name))
        super().set_params(**kwargs)
        if self.initialized_ and "callbacks" in ours:
            self._initialize_callbacks()
        if self.initialized_ and "optimizer" in ours:
            self._initialize_optimizer()
        return self

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        """Times and losses in the history; a progress bar with `verbose=1`, also a line per epoch with `verbose=2`."""
        return [
            ("epoch_timer", EpochTimer()),
            ("train_loss", PassthroughScoring(name="train_loss", on_train=True)),
            ("valid_loss", PassthroughScoring(name="valid_loss")),
            ("progress_bar", ProgressBar()),
            *([("print_log", PrintLog())] if self.verbose and self.verbose > 1 else []),
        ]

    def initialize_module(self) -> Self:
        """The module that was given, or a `DefaultMLP` sized by the data."""
        if self.module is not None:
            _check_makes("module", self.module, "a subclass of torch.nn.Module", self.get_params_for("module"))
            super().initialize_module()
            _check_made("module", self)
            return self
        if not hasattr(self, "n_inputs_"):
            raise ConfigError("module=None stands for layers sized by the data, which are not known yet; call fit")
        settings = {"features": self.n_inputs_, "outputs": self._outputs(), **self.get_params_for("module")}
        self.module_ = DefaultMLP(**settings)
        kind = getattr(torch, np.dtype(self.dtype).name, None) if self.dtype is not None else None
        if kind is not None and kind.is_floating_point:
            self.module_.to(kind)  # the module of a user is the user's
        return self

    def initialize_criterion(self) -> Self:
        """The criterion that was given, or the usual one."""
        settings = self.get_params_for("criterion")
        if self.criterion is not None:
            example = f"torch.nn.{self._default_criterion.__name__}"
            _check_makes("criterion", self.criterion, f"a loss class such as {example}", settings)
        self.criterion_ = self.initialized_instance(self.criterion or self._default_criterion, settings)
        _check_made("criterion", self)
        if getattr(self.criterion_, "reduction", "mean") == "sum":
            raise ConfigError(
                "criterion is a sum over the samples, so that the rate would depend on how a step is divided; expected "
                "a mean: use reduction='mean'"
            )
        return self

    def initialize_optimizer(self, triggered_directly: bool | None = None) -> Self:
        """The optimizer class that was given, or the one with this name: "sgd(momentum=0.9)"."""
        lr = self.get_params_for("optimizer").get("lr", self.lr)
        if lr is None:
            raise ConfigError("lr is None; expected a number")
        RunConfig.for_front_end("estimator", {"lr": _plain(lr)}, workload=type(self).__name__)  # refuses other values
        if not isinstance(self.optimizer, str):
            if isinstance(self.optimizer, torch.optim.Optimizer) or not callable(self.optimizer):
                raise ConfigError(
                    f"optimizer is {_shown(self.optimizer)}; expected a class such as torch.optim.SGD, or a text such "
                    f"as 'sgd(momentum=0.9)'"
                )
            super().initialize_optimizer()
            return self
        settings = self.get_params_for("optimizer")
        lr = settings.pop("lr", self.lr)
        given = {name: str(value) for name, value in settings.items()}
        text = str(OPTIMIZERS.with_arguments(parse_call(self.optimizer), given))
        self.optimizer_ = build_optimizer(text, self.module_, lr=lr)
        return self

    def _outputs(self) -> int:
        """Columns that the default module returns."""
        raise NotImplementedError

    _default_criterion: type[torch.nn.Module]

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The mean loss of the criterion, as validation uses it; see `ModelLoss`."""
        return ModelLoss(self.criterion_).of(y_pred, torch.as_tensor(y_true, device=self.device))

    _usual_loss = get_loss

    @property
    def _has_own_loss(self) -> bool:
        """Whether a subclass computes the loss itself; training then asks its `get_loss`, as skorch does."""
        return type(self).get_loss is not EbbflowNet._usual_loss

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """As in skorch, for prediction and validation; training gets its batches from the engine."""
        settings = {"batch_size": EVALUATION_BATCH, **self.get_params_for("iterator_valid")}
        if self.iterator_valid is DataLoader and [*settings] == ["batch_size"] and Slices.can(dataset):
            return Slices(dataset, settings["batch_size"])
        return self.iterator_valid(dataset, **settings)

    def _rule(self, batches: FitBatches, *, ends: bool) -> str | Rule:
        """The rule of a fit; one that was not named is decided once, and goes on in a warm start and `partial_fit`."""
        if self.rule is None and hasattr(self, "rule_"):
            return str(self.rule_)
        rule: str | Rule = self.rule
        if self.rule is None:
            policy = batches.growing
            grows = policy is not None and policy.damps
            if policy is None and batches.batch == batches.base_batch:
                rule = "constant"  # the batch is always the one at which the rate was tuned
            else:
                name = name_of_optimizer(type(self.optimizer_))
                trained = [parameter for parameter in self.module_.parameters() if parameter.requires_grad]
                unmeasured = why_never_measured(self.batch_norm, trained)
                rule = tell_default_rule(*default_rule(name, ends=ends, grows=grows, unmeasured=unmeasured))
        self.rule_ = str(rule)
        return rule

    def _run_config(self, batches: FitBatches, rule: str | Rule) -> RunConfig:
        """The settings of a fit, checked."""
        values = {name: _plain(getattr(self, name)) for name in SETTINGS}
        needs = make_rule(rule).needs or (batches.growing is not None and batches.growing.needs)
        values |= {
            "rule": str(rule),
            "schedule": None if self.schedule is None else str(self.schedule),
            "optimizer": self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", ""),
            "random_state": self.seed_,
            "max_epochs": whole_number(self.max_epochs, "max_epochs"),
            "batch_size": batches.text,
            "base_batch": batches.base_batch,
            "local_batch": batches.local_batch,
            "micro_batch": self.micro_batch or (batches.measured_micro_batch if needs else None),
            "engine": "auto",
            "device": str(self.device),
        }
        return RunConfig.for_front_end("estimator", values, workload=type(self).__name__)

    # -- fitting ---------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, **fit_params: Any) -> Self:
        """Train for `max_epochs` epochs, from the beginning or, with `warm_start`, from where training was."""
        self._refuse_what_has_no_effect("fit", fit_params)
        going_on = self.warm_start and self.initialized_
        X, y = self._check_training(X, y, reset=not going_on)
        if not going_on:
            self._start()
        return self._train(X, y, epochs=whole_number(self.max_epochs, "max_epochs"))

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, **fit_params: Any) -> Self:
        """Train one epoch over these samples and continue where training was; so do rule and batch policy."""
        self._refuse_what_has_no_effect("partial_fit", fit_params)
        first = not self.initialized_
        X, y = self._check_training(X, y, reset=first, **({} if classes is None else {"classes": classes}))
        if first:
            self._start()
        return self._train(X, y, epochs=1)

    @property
    def _has_own_iterator(self) -> bool:
        """Whether `iterator_train` was given; skorch sets it to None where a net only predicts."""
        return self.iterator_train is not DataLoader and self.iterator_train is not None

    def _refuse_what_has_no_effect(self, method: str, arguments: dict[str, Any]) -> None:
        """Refuse further arguments of a fit, and parameters and methods of a subclass that training would not use."""
        name = type(self).__name__
        for argument, value in arguments.items():
            if argument != "sample_weight":
                raise TypeError(f"{name}.{method}() got an unexpected keyword argument {argument!r}")
            if value is not None:
                raise ConfigError(
                    f"{method} was given sample_weight, but every sample counts equally, once per epoch; leave it out, "
                    f"and weight the classes of a classifier with criterion__weight=torch.tensor([...]), or repeat "
                    f"samples in X and y, for example with numpy.repeat(X, times, axis=0)"
                )
        iterator = ["iterator_train"] if self._has_own_iterator else []
        unread = [*iterator, *(parameter for parameter in vars(self) if parameter.startswith("iterator_train__"))]
        if unread:
            raise ConfigError(
                f"{unread[0]} is given, but training uses no iterator: the engine reads every sample once per epoch, "
                f"in a random order; leave it out, and set batch_size, weight classes with criterion__weight, repeat "
                f"or leave out samples in the data, or change samples in a Dataset or in the module"
            )
        uncalled = [own for own in _NOT_CALLED if getattr(type(self), own) is not getattr(NeuralNet, own)]
        if uncalled:
            raise ConfigError(
                f"{name} has a {uncalled[0]} of its own, which training would not call, since the engine makes the "
                f"steps; change the loss in get_loss or in a criterion, samples in a Dataset or in the module, "
                f"gradients in a callback (on_grad_computed), and validation in validation_step"
            )

    def _check_training(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Inputs as tensors (or a Dataset) and targets as the module's loss takes them."""
        raise NotImplementedError

    def _check_inputs(self, X: Any, y: Any, *, reset: bool, **checks: Any) -> tuple[Any, Any]:
        """Checks of both estimators; y is returned as an array, or None for a Dataset."""
        if self.dtype is not None:
            try:
                np.dtype(self.dtype)
            except TypeError:
                raise ConfigError(
                    f"dtype is {self.dtype!r}; expected the name of a type of NumPy such as 'float32', or None"
                ) from None
        if y is None and not is_dataset(X):
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None; only a Dataset brings "
                f"its own"
            )
        if is_dask(X):
            X, y = check_blocks(self, X, y, reset=reset)
            if reset:
                self.n_inputs_ = math.prod(X.shape[1:])
            return X.astype(self.dtype or X.dtype), y
        if is_dataset(X):
            inputs = check_dataset(self, X, y, reset=reset)
            if reset:
                self.n_inputs_ = inputs
            return X, None
        X, y = check_arrays(self, X, y, reset=reset, dtype=self.dtype, **checks)
        if reset:
            self.n_inputs_ = math.prod(X.shape[1:])
        return as_tensor(X), y

    def _start(self) -> None:
        """Begin anew, with a new seed and new weights."""
        seeded = isinstance(self.random_state, int | np.integer)
        self.seed_ = int(self.random_state if seeded else check_random_state(self.random_state).randint(2**31 - 1))
        self.flow_state_: dict[str, Any] = {}
        self.__dict__.pop("rule_", None)
        self.n_epochs_ = self.n_updates_ = 0
        with self._own_random_numbers():
            torch.manual_seed(self.seed_)
            self.initialize()

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw inside without changing the random numbers that the caller draws afterwards."""
        device = torch.device(self.device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield

    def _train(self, X: Any, y: Any, *, epochs: int) -> Self:
        with self._own_random_numbers():
            self.notify("on_train_begin", X=X, y=y)
            self._fitting = True
            try:
                self.fit_loop(X, y, epochs)
            except KeyboardInterrupt:
                pass  # as in skorch: what was learned so far is kept
            finally:
                self.__dict__.pop("_fitting")
                self.notify("on_train_end", X=X, y=y)
        return self

    def fit_loop(self, X: Any, y: Any = None, epochs: int | None = None, **_: Any) -> Self:
        """Train: steps by Ebbflow, validation and callbacks by skorch."""
        self.check_training_readiness()
        train, valid = self._split(X, y)
        epochs = whole_number(self.max_epochs, "max_epochs") if epochs is None else epochs
        Fit(self, train, valid, epochs=epochs).run()
        return self

    def _split(self, X: Any, y: Any) -> tuple[Any, Any]:
        if self.train_split and not callable(self.train_split):
            raise ConfigError(
                f"train_split is {self.train_split!r}; expected a way to split such as skorch.dataset.ValidSplit(5), "
                f"or None to train on all samples"
            )
        if not is_dask(X):
            train, valid = self.get_split_datasets(X, y)
            return train, valid
        if self.train_split:
            raise ConfigError("train_split cannot split a Dask array; split it yourself, or leave train_split out")
        return Blocks(X, y), None

    # -- predicting ------------------------------------------------------------------------------------------------

    def _for_blocks(self) -> Self:
        """A copy with what a worker needs to predict; callbacks, history and optimizer may be large, or not
        picklable."""
        slim: Self = object.__new__(type(self))
        left_out = ("callbacks", "callbacks_", "history_", "optimizer_", "flow_state_")
        slim.__dict__.update({name: value for name, value in vars(self).items() if name not in left_out})
        return slim

    def _answers(self, X: Any, *, block: bool = False) -> npt.NDArray[Any]:
        """The module's outputs for these inputs, after the nonlinearity that belongs to its criterion.

        Inputs are compared with those of the fit, unless they are a block of a checked array, or given by a callback.
        """
        self.check_is_fitted()
        if block:
            X = as_tensor(check_array(X, dtype=self.dtype or "numeric", allow_nd=True))
        elif not (is_dataset(X) or self._fitting):
            X = as_tensor(check_arrays(self, X, reset=False, dtype=self.dtype))
        answers: npt.NDArray[Any] = NeuralNet.predict_proba(self, X)
        return answers


def _shown(part: Any) -> str:
    """An optimizer as an error names it; the representation of one that was made has several lines."""
    return f"a {type(part).__name__} object" if isinstance(part, torch.optim.Optimizer) else repr(part)


def _check_makes(name: str, part: Any, expected: str, settings: dict[str, Any]) -> None:
    """Refuse what skorch could not call to make a part: a text, a number, a function such as cross_entropy."""
    if isinstance(part, torch.nn.Module | type):
        return
    fits = callable(part)
    if inspect.isroutine(part):
        with suppress(ValueError):  # functions written in C have no signature
            try:
                inspect.signature(part).bind(**settings)
            except TypeError:
                fits = False
    if not fits:
        raise ConfigError(f"{name} is {part!r}; expected {expected}, or an instance of one")


def _check_made(name: str, net: EbbflowNet) -> None:
    """Refuse a class or function that made something else than a module."""
    made = getattr(net, f"{name}_")
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"{name} is {getattr(net, name)!r}, which made {made!r}; expected that it makes a torch.nn.Module"
        )


def _signature() -> inspect.Signature:
    """The constructor's parameters, with the settings of a run written out."""
    own = inspect.signature(EbbflowNet.__init__).parameters.values()
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in SETTINGS.items()
    ]
    *named, rest = own
    return inspect.Signature([*named, *settings, rest])


EbbflowNet.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
