"""The settings of a run, declared once.

Everything that takes settings is generated from `RunConfig`: the options of the command, the keys of study files, the
arguments of `ebbflow.Session` and `ebbflow.live.join`, the options of a replica and the parameters of the estimators. A
new setting is one field here, with its type, default and documentation.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, time
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo

from ebbflow.core.plugins import plugin_digests
from ebbflow.core.spec import nearest
from ebbflow.core.units import MOST_SEED
from ebbflow.errors import ConfigError

__all__ = [
    "ENGINE_KINDS",
    "FRONT_ENDS",
    "EngineKind",
    "FrontEnd",
    "RunConfig",
    "fields_of",
    "recipe_settings",
    "settings_of",
    "shows_settings",
]

Shown = TypeVar("Shown", bound=Callable[..., Any])
FrontEnd = Literal["command", "replica", "session", "estimator"]
FRONT_ENDS: tuple[FrontEnd, ...] = ("command", "replica", "session", "estimator")
"""Where settings come from: the command and studies, the ready-made replica of a fleet, a user's own loop, an
estimator."""
EngineKind = Literal["emulated", "live", "dask"]
ENGINE_KINDS: tuple[EngineKind, ...] = ("emulated", "live", "dask")

_MOST_LOADER_WORKERS = 4  # processes that prefetch, unless somebody asks for more


def setting(
    default: Any = None,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    recipe: bool = False,
    computes: bool = True,
    recorded_as: str | None = None,
    names: Mapping[FrontEnd, str] | None = None,
    not_for: Mapping[FrontEnd | EngineKind, str] | None = None,
) -> Any:
    """Declare a field of `RunConfig`.

    `recipe`: None stands for what the workload's recipe says. `computes`: whether the setting changes what is computed,
    and so belongs to the identity of a study's arm. `recorded_as`: the key in records, where it is older than the name.
    `names`: what a front end calls it, where that differs. `not_for`: front ends that do not offer it and engines that
    cannot follow it, each with the reason.
    """
    told = {"recipe": recipe, "computes": computes, "recorded_as": recorded_as, "names": names or {}}
    return Field(default, gt=gt, ge=ge, lt=lt, json_schema_extra={"ebbflow": {**told, "not_for": not_for or {}}})  # type: ignore[dict-item]


Number = Annotated[int | float, Field(allow_inf_nan=False)]
"""A number as it was written: 1 stays 1, since an arm of a study is known by the text of its settings."""

# Why a setting is not offered, or cannot be followed.
_GIVEN: dict[FrontEnd | EngineKind, str] = {"session": "it is given", "estimator": "it is given"}
_OF_A_TRACE: dict[FrontEnd | EngineKind, str] = dict.fromkeys(
    ("live", "dask", "estimator"), "the workers that are there are the fleet, and no trace is played"
)
_OF_FUSING: dict[FrontEnd | EngineKind, str] = dict.fromkeys(
    ("live", "dask"), "it belongs to the engine that fuses virtual workers in one process"
)
_OF_THE_PROCESS: dict[FrontEnd | EngineKind, str] = dict.fromkeys(("session", "estimator"), "the process is yours")
_BASE_BATCH: dict[FrontEnd, str] = {"session": "base_batch", "estimator": "base_batch"}


class RunConfig(BaseModel):
    """All settings of a run: what to train, on which fleet, by which rule.

    Frozen, and checked when it is made: an unknown name or a bad value is a ConfigError that says what was expected.
    None stands for what the workload's recipe says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    workload: str = setting(..., not_for=_GIVEN)
    """Name or text form, for example digits-mlp or digits-cnn(width=32)."""
    rule: str | None = None
    """Text form of the rule, for example linear+warmup(5ep). Default: by the optimizer, adascale+statewarmup(0.05) for
    SGD and sqrt+statewarmup(0.05, by=multiplier) for Adam."""
    trace: str = setting("constant(workers=8)", not_for=_OF_A_TRACE)
    """A trace file, a generator such as gcp-a100-like(seed=1), or a published trace, gcp-a100-2022-05."""
    plan: str | None = setting(not_for=_OF_A_TRACE)
    """A step,batchsize file instead of a trace."""
    label: str = setting("", computes=False, not_for=_OF_A_TRACE)
    """Name of the trace in tables; by default its text."""
    seed: int = setting(0, ge=0, lt=MOST_SEED, names={"estimator": "random_state"})
    """Seed of the initial weights, the order of the samples, dropout and augmentation."""
    epochs: int | None = setting(gt=0, recipe=True, names={"estimator": "max_epochs"})
    """Passes over the training samples."""
    lr: Number | None = setting(gt=0, recipe=True, not_for={"session": "the optimizer has it"})
    """Base learning rate, at the reference batch."""
    ref_batch: int | None = setting(gt=0, recipe=True, names=_BASE_BATCH)
    """Reference batch: the batch at which the base rate was tuned, in samples."""
    local_batch: int | None = setting(gt=0, recipe=True)
    """Samples that one worker takes per step."""
    optimizer: str | None = setting(recipe=True, not_for={"session": "it is given"})
    """Text form of the optimizer, for example sgd(momentum=0.9)."""
    schedule: str | None = setting(recipe=True)
    """Text form of the schedule of the base rate, for example multistep(30ep, 60ep)."""
    policy: str = setting("follow", names={"estimator": "batch_size"})
    """How the batch follows the workers: follow, fixed(TOTAL), capped(max_batch=N), drop(parts=N); or grows:
    geo(60ep, factor=5)."""
    step_time: str = setting("fit", not_for=_OF_A_TRACE)
    """Duration of a step, for example 0.6s, or of an epoch, 1h/ep; fit: such that the run spans the whole trace (of a
    plan file: 1 s)."""
    offset: str = setting("0s", not_for=_OF_A_TRACE)
    """Time of the trace at which the run starts, for example 30min."""
    on_change: Literal["finish", "lose"] = setting("finish", not_for=_OF_A_TRACE)
    """What happens to a step during which the workers change: finish or lose."""
    repeat: bool = setting(False, not_for=_OF_A_TRACE)
    """Play the trace again when it ends before the run."""
    micro_batch: int | None = setting(gt=0, recorded_as="piece")
    """Most samples of one worker in one backward pass; by default all of its samples."""
    engine: str = setting("auto", not_for={"replica": "a replica is an engine", "session": "it has its own argument"})
    """What computes the steps: loop (virtual workers one after another), fused (many at a time), auto, or your own."""
    fused_batch: int | None = setting(gt=0, recorded_as="chunk", not_for=_OF_FUSING)
    """Samples in one fused pass of the fused engine; by default what is fastest on the device."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the forward and backward passes: fp32, bf16 or fp16."""
    batch_norm: Literal["local", "sync", "frozen"] = setting("local", not_for=_OF_FUSING)
    """Batch norm over the samples of one worker (local), of the step (sync), or with fixed statistics (frozen)."""
    compile: bool | None = setting(
        computes=False, not_for={"dask": "Dask sends the model to its workers", "estimator": "skorch compiles modules"}
    )
    """Whether to compile the model; by default on a GPU, where the run is long enough for it to pay, and in no replica
    of a live fleet."""
    memory_steps: Number = setting(1000.0, gt=0)
    """Reference steps that the averages of noise and signal remember; AdaScale's 1000 is long for a short run."""
    measure_every: int = setting(4, ge=1)
    """After `memory_steps`, at least one step in every `measure_every` is measured; 1 measures every step."""
    clip: Number | None = setting(gt=0)
    """Largest norm of a step's mean gradient; by default gradients are not clipped."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens at a step whose gradient is NaN or infinite: stop the run, or skip the step."""
    ema: Number | None = setting(
        gt=0,
        lt=1,
        not_for={"estimator": "an estimator has one module; a Session keeps an average of the weights beside it"},
    )
    """Fraction that a moving average of the weights keeps per reference step, for example 0.999; the average is kept in
    float32 where the model has fewer bits."""
    bn_follows_batch: bool = False
    """Whether the momentum of batch-norm statistics follows the batch: 1 - (1 - p)^(batch/ref_batch)."""
    validate_every: int = setting(1, ge=1, not_for={"estimator": "skorch validates after every epoch"})
    """Epochs between validations; the last epoch is always validated."""
    train_scores: int = setting(
        0, ge=0, not_for={"session": "its evaluation is yours", "estimator": "skorch scores the training samples"}
    )
    """Training samples, without augmentation, that every validation scores, too (train_accuracy, ...); 0: none."""
    data: str | None = setting(computes=False, not_for=_GIVEN)
    """Folder or file of the data set, for workloads that need one."""
    loader_workers: int | None = setting(
        ge=0,
        computes=False,
        not_for={"estimator": "data is in memory"},
    )
    """Processes that prefetch samples of data sets that are not in memory; by default the idle cores, at most four."""
    device: str = setting("cpu", computes=False, not_for={"session": "the model has one"})
    """Device that computes: cpu, cuda, cuda:1, ..."""
    threads: int = setting(1, ge=1, not_for=_OF_THE_PROCESS)
    """CPU threads. Results are equal bit for bit only with the same number of threads."""
    tracker: str | None = setting(computes=False, not_for={"estimator": "skorch has callbacks for it"})
    """Where else the record goes: tensorboard, wandb or mlflow; several with commas."""
    plugins: Annotated[tuple[str, ...], Strict(False)] = setting((), computes=False, not_for=_OF_THE_PROCESS)
    """Python files that register rules, workloads, traces and so on of your own."""

    # Making one --------------------------------------------------------------------------------------------------

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{name: _as_text(value) for name, value in values.items()})
        except ValidationError as error:
            raise ConfigError(_explained(error)) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """A configuration from the settings of a file; `where` names the file in errors.

        Older names of settings, as records have them, are understood.
        """
        names = {_recorded_key(name): name for name in cls.model_fields}
        plain = {
            names.get(key, key): tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        try:
            return cls(**plain)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def for_front_end(
        cls, front_end: FrontEnd, values: Mapping[str, Any], *, beside: Iterable[str] = (), **others: Any
    ) -> Self:
        """A configuration from the arguments of a front end, under its own names; `others`: what it does not offer.

        `beside`: the arguments that it takes besides settings, one of which a misspelt name may have meant."""
        known = settings_of(front_end)
        if unknown := [name for name in values if name not in known]:
            raise ConfigError(_not_offered(unknown[0], front_end, beside))
        plan, trace = values.get("plan"), values.get("trace")
        if plan is not None and trace not in (None, _DEFAULTS["trace"]):
            raise ConfigError(f"trace is {trace!r}, but the steps are those of the file {plan}; leave one of them out")
        try:
            return cls(**{known[name]: value for name, value in values.items()}, **others)
        except ConfigError as error:
            text = str(error)
            for name, own in known.items():  # under the name that the front end knows
                if name in values and text.startswith(f"{own} is "):
                    text = text.replace(own, name, 1)
            raise ConfigError(text) from None

    def check_engine(self, kind: EngineKind) -> None:
        """Refuse a setting that an engine cannot follow, with the reason, instead of ignoring it."""
        for name, field in type(self).model_fields.items():
            reason = _metadata(name)["not_for"].get(kind)
            if reason is not None and getattr(self, name) != field.default:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but {reason}; leave it out")

    def replace(self, **changes: Any) -> Self:
        """The same configuration with other values, checked again."""
        return type(self)(**{**dict(self), **changes})

    def with_loader_workers(self, *, cores: int, processes: int) -> Self:
        """The configuration with `loader_workers` filled in, if it was left open: the idle cores, at most four.

        The `cores` of the machine are shared by `processes` that train.

        >>> [RunConfig(workload="mine").with_loader_workers(cores=n, processes=1).loader_workers for n in (1, 2, 4, 64)]
        [0, 1, 3, 4]
        """
        if self.loader_workers is not None:
            return self
        idle = cores // processes - self.threads
        return self.replace(loader_workers=max(0, min(_MOST_LOADER_WORKERS, idle)))

    # Comparing ----------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the keys that records have."""
        return {_recorded_key(key): list(value) if isinstance(value, tuple) else value for key, value in self}

    def recorded(self) -> dict[str, Any]:
        """What a run writes down of its settings when it begins, and `differences` compares when it goes on."""
        plugins = {"plugins_sha256": plugin_digests(self.plugins)} if self.plugins else {}
        return {**self.as_dict(), "trace_sha256": self.trace_digest(), **plugins}

    def trace_digest(self) -> str:
        """Digest of the trace or plan itself: the bytes of its file, wherever it lies, or the text of a generator."""
        text = self.plan if self.plan is not None else self.trace
        try:
            content = Path(text).read_bytes()
        except (OSError, ValueError):  # no file, or longer than a path can be
            content = text.encode()
        return hashlib.sha256(content).hexdigest()

    def fingerprint(self) -> str:
        """Equal for two configurations if they compute the same: by this an arm of a study is known.

        Settings at their default do not enter, so a setting that a later version adds leaves earlier arms as they were.
        """
        content = {key: value for key, value in self._computing().items() if value != _DEFAULTS[key]}
        kind = "trace" if self.plan is None else "plan"
        return hashlib.sha256(json.dumps([content, kind, self.trace_digest()], sort_keys=True).encode()).hexdigest()

    def differences(self, recorded: Mapping[str, Any], *, by_recipe: Collection[str] = ()) -> list[str]:
        """What a recorded run computes differently, one phrase each; empty if it is this run and may be continued.

        `recorded` is what the method of that name returned for the run. A setting that it lacks, because a later
        version added it, counts as being at its default. A trace or plan that was moved is the same; one that was
        edited is not. Settings `by_recipe`, which the workload's recipe filled in, are left to `code_differences`."""
        found = self._other_values(recorded, [key for key in self._computing() if key not in by_recipe])
        if recorded.get("trace_sha256") != self.trace_digest():
            kind, text = ("trace", self.trace) if self.plan is None else ("plan", self.plan)
            found.append(f"the {kind} is not the one it was ({text})")
        return found

    def code_differences(self, recorded: Mapping[str, Any], *, by_recipe: Collection[str] = ()) -> list[str]:
        """What has changed in the user's code since a run was recorded: its plugins, and the recipe of the workload.

        Plugins are compared by their content, and further ones may have been added. Nothing is known about the plugins
        of records that have no digests of them.
        """
        now, names = plugin_digests(self.plugins), {Path(path).name for path in self.plugins}
        before = zip(recorded.get("plugins", ()), recorded.get("plugins_sha256", ()), strict=False)
        found = [Path(path).name for path, digest in before if digest not in now]
        plugins = [f"plugin {name} {'has changed' if name in names else 'is no longer loaded'}" for name in found]
        return plugins + [f"the recipe's {text}" for text in self._other_values(recorded, by_recipe)]

    def _other_values(self, recorded: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
        own = self._computing()
        before = {key: recorded.get(key, _DEFAULTS[key]) for key in keys}
        names = {_recorded_key(name): name for name in type(self).model_fields}
        return [f"{names[key]} is {own[key]!r}, was {value!r}" for key, value in before.items() if own[key] != value]

    def other_data(self, recorded: Mapping[str, Any]) -> str:
        """Where a recorded run found its data, if that was another place, as a phrase; empty if it was the same place.

        The same data may have been moved, so this deserves a warning and is no error.
        """
        before = recorded.get("data")
        if before == self.data:
            return ""
        return f"its data was {before or 'not given'}, now it is {self.data or 'not given'}"

    def _computing(self) -> dict[str, Any]:
        """The settings that change what is computed, except the trace or plan, whose text may be the name of a file."""
        left_out = {"trace", "plan", *(name for name in RunConfig.model_fields if not _metadata(name)["computes"])}
        return {_recorded_key(key): value for key, value in self if key not in left_out}


# Metadata of the fields ------------------------------------------------------------------------------------------


def _metadata(name: str) -> dict[str, Any]:
    """What `setting` was told about a field; its defaults for a field that was declared without it."""
    found = RunConfig.model_fields[name].json_schema_extra
    nothing: dict[str, Any] = {"recipe": False, "computes": True, "recorded_as": None, "names": {}, "not_for": {}}
    return {**nothing, **found["ebbflow"]} if isinstance(found, dict) else nothing  # type: ignore[dict-item]


def _recorded_key(name: str) -> str:
    return _metadata(name)["recorded_as"] or name


def _offered(name: str, front_end: FrontEnd) -> bool:
    missing = _metadata(name)["not_for"]
    return front_end not in missing and not (front_end == "replica" and "live" in missing)


def settings_of(front_end: FrontEnd) -> dict[str, str]:
    """The settings that a front end offers: its own name -> the name of the field."""
    every = RunConfig.model_fields
    return {_metadata(name)["names"].get(front_end, name): name for name in every if _offered(name, front_end)}


def other_arguments(function: Callable[..., Any], front_end: FrontEnd) -> list[str]:
    """The arguments by name that a class or function takes besides the settings of a front end."""
    settings, parameters = settings_of(front_end), inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in settings
    ]


def fields_of(front_end: FrontEnd) -> Iterator[tuple[str, FieldInfo]]:
    """Name in the front end and declaration of every setting that it offers: from this, front ends are generated."""
    for shown, name in settings_of(front_end).items():
        yield shown, RunConfig.model_fields[name]


def shows_settings(front_end: FrontEnd) -> Callable[[Shown], Shown]:
    """A decorator: `inspect.signature()` and `help()` show the settings that a class or function takes as `**settings`.

    Of a class the signature is that of its own `__init__`.
    """

    def decorate(function: Shown) -> Shown:
        of_class = isinstance(function, type)
        signature = inspect.signature(vars(function)["__init__"] if of_class else function)
        *own, rest = list(signature.parameters.values())[1 if of_class else 0 :]
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in fields_of(front_end)
        ]
        assert rest.kind is inspect.Parameter.VAR_KEYWORD, "settings come last, as **settings"
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return decorate


def recipe_settings() -> list[str]:
    """The settings that a workload's recipe fills in."""
    return [name for name in RunConfig.model_fields if _metadata(name)["recipe"]]


def _as_text(value: Any) -> Any:
    """A path as its text, also in a list; anything else as it is."""
    if isinstance(value, PathLike):
        return fspath(value)
    return type(value)(map(_as_text, value)) if type(value) in (list, tuple) else value


def _not_offered(name: str, front_end: FrontEnd, beside: Iterable[str] = ()) -> str:
    """Why a front end does not take a setting: it does not offer it, calls it something else, or there is none."""
    if name not in RunConfig.model_fields:
        return f"unknown setting {name!r}; {nearest(name, [*settings_of(front_end), *beside])}"
    metadata = _metadata(name)
    if _offered(name, front_end):
        return f"{name} is called {metadata['names'][front_end]} here"
    reason = metadata["not_for"].get(front_end) or metadata["not_for"]["live"]
    return f"{name} is no setting here: {reason}; leave it out"


_DEFAULTS = {_recorded_key(name): field.default for name, field in RunConfig.model_fields.items()}
# The rule was linear where none was named, when the first records were written: arms are known by what differs from it.
_DEFAULTS["rule"] = "linear"


# Errors ----------------------------------------------------------------------------------------------------------

_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list of texts",
    "finite_number": "a number below infinity",
}


def _explained(error: ValidationError) -> str:
    """The first problem that pydantic found, as a sentence: what was found, what was expected, what to write."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    name, kind, value = str(problem["loc"][0]), problem["type"], problem["input"]
    if any(other["loc"][0] == name and other["type"] == "float_type" for other in problems):
        kind = "float_type"  # a union of int and float reports both
    if kind == "extra_forbidden":
        return f"unknown setting {name!r}; {nearest(name, list(RunConfig.model_fields))}"
    if kind == "missing":
        return f"the setting {name!r} is missing"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in str(problem["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
        return f"{name} is {value!r}; {nearest(str(value), choices)}"
    if name == "loader_workers" and kind == "greater_than_equal":
        return f"{name} is {value}; expected 0 (read in this process) or more"
    if name == "ema":
        return f"{name} is {value!r}; expected the fraction kept per reference step, such as 0.999"
    if kind == "greater_than_equal":
        return f"{name} is {value}; expected {problem['ctx']['ge']:g} or more"
    if name == "seed" and kind == "less_than":
        return f"{name} is {value}; expected a whole number below {MOST_SEED:,}"
    if kind in ("greater_than", "less_than") or (kind == "finite_number" and not isinstance(value, str)):
        return f"{name} is {value}; expected a number above 0 and below infinity"
    return f"{name} is {value!r}; expected {_EXPECTED.get(kind, problem['msg'])}{_instead(value, kind, name)}"


def _instead(value: Any, kind: str, name: str) -> str:
    """How to write a value that was meant, but that TOML reads as a number, a date or a single text."""
    if kind == "string_type" and name == "policy" and isinstance(value, int):
        return f': "fixed({value})" for {value} samples in every step, "follow" for as many as the workers take'
    if kind == "string_type" and isinstance(value, bool | int | float | date | time):
        unit = "s" if name in ("step_time", "offset") else ""
        return f", such as {json.dumps(f'{value}{unit}')}: in quotation marks"
    return f", such as {json.dumps([value])}" if kind == "tuple_type" and isinstance(value, str) else ""
