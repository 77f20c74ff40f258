"""Workloads and tasks: a workload is a registered recipe and a function that builds a task, which engines train.

The text form of a workload, such as `digits-mlp(width=128)`, is parsed without reading data or building a model.
`build` then reads the data and returns the task.

    WORKLOADS.make("digits-mlp(width=128)")  ->  Workload      arguments are checked, the recipe is known
    .build(data=..., seed=..., device=...)   ->  Task          model, training and validation samples, loss, scores

A workload of your own is a function in a file of your own:

    @ebbflow.register_workload("mine", recipe=Recipe(ref_batch=32, local_batch=8, lr=0.1, epochs=10, ...))
    def mine(recipe: Recipe, width: int = 64) -> Task:
        '''My model on my data.'''
        return Task(
            model=MyModel(width),
            train=DatasetSource(my_training_set),
            valid=DatasetSource(my_test_set),
            recipe=recipe,
        )

Three parameters of the function are filled in by `build` if they are there: `data` (a Path or None), `seed` and
`recipe`. All others are arguments of the text form: they are int, float, bool or str and need a default.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.core.plugins import line_of
from ebbflow.core.spec import Call, Registry, parse_calls
from ebbflow.core.units import MOST_SEED, whole_number
from ebbflow.core.wording import called
from ebbflow.engines.batches import as_pair
from ebbflow.engines.loss_sum import LossSum, mean_over_samples
from ebbflow.engines.module_modes import modes_kept
from ebbflow.engines.replica_step import Loss
from ebbflow.errors import ConfigError, DataError, EbbflowError, InputError, SpecError
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.sources import Source

__all__ = [
    "WORKLOADS", "Recipe", "Task", "ValidationMetric", "Workload", "build", "cross_entropy", "missing_data",
    "recipe", "register", "register_workload",
]  # fmt: skip

Builder = TypeVar("Builder", bound=Callable[..., "Task"])
T = TypeVar("T")
Scores = Callable[[nn.Module, Any, Any], Mapping[str, Tensor | LossSum]]
_FILLED_IN = ("data", "seed", "recipe")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a workload is trained at its reference batch, which is what every scaling rule is compared with."""

    ref_batch: int
    """Batch at which `lr` was tuned, in samples."""
    local_batch: int
    """Samples that one worker takes per step, unless the plan says otherwise."""
    lr: float
    """Base learning rate, which schedule and rule multiply."""
    optimizer: str
    """Text form, without the learning rate: sgd(momentum=0.9, weight_decay=5e-4), adamw(weight_decay=0.1)."""
    schedule: str
    """Text form: constant, cosine, multistep(30ep, 60ep, factor=0.1), exponential(factor=0.01)."""
    epochs: int
    """Length of the run, in epochs."""
    metric: str
    """The score by which runs are compared: a key of what `Task.evaluate` returns."""
    higher_is_better: bool = True
    """Whether a larger metric is a better one."""

    def __post_init__(self) -> None:
        for name in ("ref_batch", "local_batch", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe: {name} is {getattr(self, name)}; expected at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"recipe: lr is {self.lr}; expected a finite number above 0")
        if not self.metric:
            raise ConfigError("recipe: metric is empty; expected the name of a score, such as accuracy or loss")
        for name in ("optimizer", "schedule"):
            try:
                parse_calls(getattr(self, name))
            except SpecError as error:
                raise ConfigError(f"recipe: {name}: {error}") from None


class ValidationMetric(Protocol):
    """A metric that is no mean over samples, such as mAP or mIoU: it sees all validation samples, then computes."""

    def update(self, model: nn.Module, x: Any, y: Any) -> None:
        """Take a batch of validation samples into account; the model is in eval mode, and gradients are off."""

    def compute(self) -> Mapping[str, float]:
        """Return the scores by name, over all batches."""


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `(samples, ..., classes)` for class indices `(samples, ...)`."""
    logits: Tensor = model(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def _accuracy_and_loss(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits: Tensor = model(x)
    return {"accuracy": (logits.argmax(-1) == y).float().mean(), "loss": F.cross_entropy(logits, y)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its samples, and what is needed to train and evaluate it, all on one device.

    A workload's task has all of it. A task for a training loop of your own needs `model` and `train` only; methods that
    need a field which is None raise ConfigError.
    """

    model: nn.Module
    """The only part that training changes."""
    train: Source
    """Training samples."""
    valid: Source | None = None
    """Validation samples, which `evaluate` needs."""
    recipe: Recipe | None = None
    """Settings of the training and the metric. In the function of a workload, None means the registered recipe."""
    loss: Loss | None = cross_entropy
    """`loss(model, x, y)`: the mean over the samples, so that micro-batches can be combined by their sizes.

    A loss that is divided by something else, such as matched boxes or valid pixels, returns a `LossSum`. None means
    that the training loop computes the loss itself.
    """
    scores: Scores | None = None
    """`scores(model, x, y)`: scores by name, each the mean over the samples, or a `LossSum`.

    None means none if there is a `validation`, accuracy and cross-entropy if the metric is accuracy, and otherwise the
    loss alone.
    """
    validation: Callable[[], ValidationMetric] | None = None
    """Makes a metric over the whole validation set, anew for each validation.

    The recipe's metric is one of its scores or of `scores`.
    """
    eval_batch: int = 500
    """Samples per forward pass of `evaluate`."""
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """What the data hold and training does not use, by kind, such as images without boxes.

    The record's header has it, and the command and the report say it in a line.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"the model is {self.model!r}; expected an instance of torch.nn.Module")
        for function in (self.loss, self.scores, self.validation):
            if function is not None and not callable(function):
                raise ConfigError(f"loss, scores or validation is {function!r}; expected a function")
        given = self.scores is not None or self.validation is not None
        if not given and self.recipe is not None and self.recipe.metric not in ("accuracy", "loss"):
            raise ConfigError(f"the metric {self.recipe.metric!r} is not built in; give Task `scores` or `validation`")
        sources = {"train": self.train} if self.valid is None else {"train": self.train, "valid": self.valid}
        members = ["__len__", "batch", *(["to"] if self.valid is not None else [])]  # a session moves no data
        for name, source in sources.items():
            missing = [member for member in members if not hasattr(source, member)]
            if missing:
                raise ConfigError(
                    f"{name} is a {type(source).__name__}, which has no {', '.join(missing)}; expected a source, such "
                    f"as DatasetSource(dataset) for a map-style data set or TensorSource(x, y) for tensors"
                )
            if len(source) < 1:
                kind = {"train": "training", "valid": "validation"}[name]
                raise ConfigError(f"the task has 0 {kind} samples; expected 1 or more")

    def require_loss(self) -> Loss:
        """Return the loss function; raise ConfigError if the task has none."""
        return _required(self.loss, "loss", "function `loss(model, x, y)`")

    def require_recipe(self) -> Recipe:
        """Return the recipe; raise ConfigError if the task has none."""
        return _required(self.recipe, "recipe", "recipe")

    def evaluate(self, model: nn.Module, source: Source | None = None) -> dict[str, float]:
        """Return the scores of a model over all validation samples, or over those of another source.

        A validation metric that holds annotations of the validation samples is right for those only.
        The model is evaluated in `eval` mode; afterwards every module is in the mode in which it was before.
        """
        valid = _required(source or self.valid, "valid", "source of validation samples")
        metric: Any = self.validation() if self.validation is not None else None
        if self.validation is not None and not all(hasattr(metric, name) for name in ("update", "compute")):
            raise ConfigError(f"the validation of the task returned {metric!r}; expected a metric with the methods "
                              f"update and compute")  # fmt: skip
        sums: dict[str, list[tuple[Tensor, Tensor | float]]] = {}
        batches = torch.split(torch.arange(len(valid)), self.eval_batch)
        with modes_kept(model), torch.no_grad():
            model.eval()
            for indices, batch in zip(batches, _validation_batches(valid, batches), strict=True):
                x, y = as_pair(batch)
                for name, value in _by_name(self._batch_scores(model, x, y), "the scores of a batch").items():
                    mean, count = mean_over_samples(value, len(indices))
                    sums.setdefault(name, []).append((mean * len(indices), count))
                if metric is not None:
                    metric.update(model, x, y)
        scores = {name: _ratio(parts) for name, parts in sums.items()}
        if metric is not None:
            found = _by_name(metric.compute(), "what the validation metric computed")
            scores |= {name: _score(name, value) for name, value in found.items()}
        if self.recipe is not None and self.recipe.metric not in scores:
            raise ConfigError(f"the metric is {self.recipe.metric!r}, but the scores are {', '.join(sorted(scores))}")
        return scores

    def _batch_scores(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, Tensor | LossSum]:
        if self.scores is not None:
            return self.scores(model, x, y)
        if self.validation is not None:
            return {}
        if self.recipe is not None and self.recipe.metric == "accuracy":
            return _accuracy_and_loss(model, x, y)
        return {"loss": self.require_loss()(model, x, y)}

    def close(self) -> None:
        """End the processes that prefetch samples, if there are any."""
        for source in (self.train, self.valid):
            if isinstance(source, DatasetSource):
                source.close()

    def describe(self) -> dict[str, Any]:
        """Return the sizes and the recipe of the task as JSON, for the header of a record."""
        return {
            "model": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "train_samples": len(self.train),
            "valid_samples": 0 if self.valid is None else len(self.valid),
            "recipe": None if self.recipe is None else asdict(self.recipe),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
        }


def _by_name(scores: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(scores, Mapping):
        raise ConfigError(f"{what}: found {scores!r}; expected scores by name, such as {{'accuracy': 0.9}}")
    return scores


def _score(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the validation metric computed {name}={value!r}; expected a number") from None


def _required(value: T | None, name: str, expected: str) -> T:
    if value is None:
        raise ConfigError(f"the task has no {name}, which is needed here; give Task({name}=...) a {expected}")
    return value


def _ratio(parts: Sequence[tuple[Tensor, Tensor | float]]) -> float:
    """The sum of the totals divided by the sum of the counts."""
    # Stacked on the device and copied once: a copy for each batch would stall a GPU each time.
    totals = torch.stack([total.double() for total, _ in parts])
    counts = [count for _, count in parts]
    if isinstance(counts[0], Tensor):
        total, count = torch.stack([totals.sum(), torch.stack([torch.as_tensor(c) for c in counts]).sum()]).tolist()
    else:
        total, count = float(totals.sum()), sum(map(float, counts))
    return total / count if count else 0.0


def _validation_batches(valid: Source, batches: Sequence[Tensor]) -> Iterator[Any]:
    if isinstance(valid, DatasetSource):
        return valid.validation_batches(batches)
    return (valid.batch(indices, train=False) for indices in batches)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A registered workload with its arguments; nothing is read or allocated before `build`."""

    name: str
    recipe: Recipe
    function: Callable[..., Task]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_data(self) -> bool:
        """Whether `build` accepts the path of a data set."""
        return "data" in inspect.signature(self.function).parameters

    def build(
        self,
        *,
        data: Path | str | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        loader_workers: int = 0,
    ) -> Task:
        """Read the data and return the task.

        The initial weights depend on the seed only, neither on the device nor on what ran before. `loader_workers` is
        the number of prefetching processes of sources that do not have a number of their own.
        """
        if data is not None and not self.takes_data:
            raise ConfigError(f"data={data} was given, but the workload {self.name!r} takes none; leave it out")
        target = _device(device)
        path = None if data is None else Path(data).expanduser()
        given = {"data": path, "seed": seed, "recipe": self.recipe}
        parameters = inspect.signature(self.function).parameters
        filled_in = {name: given[name] for name in _FILLED_IN if name in parameters}
        # Models are initialised on the CPU with a generator state of their own; the caller's generators do not change.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(whole_number(seed, "seed", least=0, most=MOST_SEED))
            task = self._call_builder(**filled_in, **self.arguments)
        if task.valid is None or task.loss is None:
            missing = "validation samples" if task.valid is None else "loss function"
            raise ConfigError(
                f"the task of the workload {self.name!r} has no {missing}; a workload needs Task(valid=..., loss=...)"
            )
        return replace(
            task,
            model=task.model.to(target),
            train=_with_loader_workers(task.train.to(target), loader_workers),
            valid=_with_loader_workers(task.valid.to(target), loader_workers),
            recipe=task.recipe or self.recipe,
        )

    def missing_data(self, data: Path | str | None) -> str:
        """Why the data of a workload of ebbflow's are not there, without reading them; empty if they may be.

        A workload of a user's own may make its data, so nothing is said of those.
        """
        if not self.takes_data or not self.function.__module__.startswith("ebbflow.workloads."):
            return ""
        if data is not None:
            path = Path(data).expanduser()
            return "" if path.exists() else f"the data of {self.name} are not at {path}: it does not exist"
        try:
            self.build()
        except DataError as error:
            return str(error)
        except Exception:  # something else, which whoever builds it for training reports
            return ""
        return ""

    def _call_builder(self, **arguments: Any) -> Task:
        """Call the workload's function; an error in a user's function is reported with the user's own file and line."""
        try:
            task = self.function(**arguments)
        except Exception as error:
            if self._is_explained(error):
                raise
            raise ConfigError(
                f"the workload {self.name!r} cannot be built: {type(error).__name__}: {error} ({_builder_line(error)})"
            ) from error
        if not isinstance(task, Task):
            raise ConfigError(
                f"the function {self.function.__qualname__} of the workload {self.name!r} returned a "
                f"{type(task).__name__}; expected a Task"
            )
        return task

    def _is_explained(self, error: Exception) -> bool:
        """Whether the user needs no line of code to act on an error: ours in our own workloads, or lack of memory."""
        if isinstance(error, InputError):
            return self.function.__module__.partition(".")[0] == "ebbflow"
        memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        return memory or isinstance(error, EbbflowError)


def _builder_line(error: Exception) -> str:
    """Return the innermost line of the traceback that is in the file of the workload's function."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = frames[1:] or frames  # the first is our own call of the function
    return line_of(error, frames[0].filename)


def _with_loader_workers(source: Source, loader_workers: int) -> Source:
    return source.with_loader_workers(loader_workers) if isinstance(source, DatasetSource) else source


def _device(device: torch.device | str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known to torch; write cpu, cuda or cuda:1") from None
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device} was asked for, but torch sees {torch.cuda.device_count()} GPUs; use cpu")
    return target


WORKLOADS: Registry[Workload] = Registry("workload")


def register_workload(name: str, *, recipe: Recipe, cite: str = "") -> Callable[[Builder], Builder]:
    """Return a decorator that registers a function `(...) -> Task` as a workload.

    Three parameters of the function are filled in if they are there: `data` (a Path or None), `seed` and `recipe`. All
    others are arguments of the text form, such as `mine(width=128)`: they are int, float, bool or str and need a
    default; `**options: str` takes all other names. `cite` is the source of the recipe or of the data.
    """

    def add(function: Builder) -> Builder:
        signature = inspect.signature(function)
        arguments = [p for p in signature.parameters.values() if p.name not in _FILLED_IN]
        for p in arguments:
            if p.kind is inspect.Parameter.VAR_KEYWORD:
                continue  # arguments of a library, whose names are not known here
            if p.default is inspect.Parameter.empty or p.annotation is inspect.Parameter.empty:
                raise SpecError(
                    f"workload {name!r}: the parameter {p.name!r} needs a type and a default, such as width: int = 64; "
                    f"only {', '.join(_FILLED_IN)} are filled in by build"
                )

        @functools.wraps(function)
        def make(**values: Any) -> Workload:
            width = values.get("width")
            if isinstance(width, int) and width < 1:  # torch would build and train a network without neurons
                raise SpecError(f"{name}: width is {width}; expected 1 or more")
            return Workload(name=name, recipe=recipe, function=function, arguments=values)

        make.__signature__ = signature.replace(parameters=arguments)  # type: ignore[attr-defined]
        WORKLOADS.register(name, cite=cite)(make)
        return function

    return add


register = register_workload


def missing_data(workload: str, expected: str) -> DataError:
    """Return the error for a workload that needs the path of its data and was given none."""
    return DataError(f"{workload} needs its data: give with {called('data')} (in a study: --set data=) {expected}")


def recipe(text: str | Call) -> Recipe:
    """Return the recipe of a workload, given its text form; no data are read and no model is built."""
    return WORKLOADS.make(text).recipe


def build(
    text: str | Call,
    *,
    data: Path | str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    loader_workers: int = 0,
) -> Task:
    """Build the task of a workload, given its text form; see `Workload.build`.

    >>> build("digits-mlp(width=16)", seed=1).describe()["parameters"]
    1482
    """
    return WORKLOADS.make(text).build(data=data, seed=seed, device=device, loader_workers=loader_workers)
