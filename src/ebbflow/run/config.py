"""One run as data: everything that decides what a run computes, checked once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.core.spec import nearest
from ebbflow.errors import ConfigError

__all__ = ["RunConfig"]

_MOST_LOADERS = 4  # processes that read ahead, unless somebody asks for more

_CHOICES = {
    "on_change": ["finish", "lose"],
    "on_nonfinite": ["stop", "skip"],
    "engine": ["auto", "loop", "fused"],
    "precision": ["fp32", "bf16", "fp16"],
    "batch_norm": ["local", "sync", "frozen"],
}


_RECORDED_AS = {"micro_batch": "piece"}
"""Settings whose name in records, and so in the identity of an arm, is an older one."""

_WHERE_AND_HOW = frozenset({"data", "plugins", "device", "compile", "loader_workers"})
"""Settings that say where things lie and who does the work, not what is computed."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train, on which fleet, by which rule. None means: what the workload's recipe says."""

    workload: str
    """Name or text form, for example digits-mlp or digits-cnn(width=32)."""
    rule: str = "linear"
    """Text form of the rule, for example linear+warmup(5ep)."""
    trace: str = "constant(workers=8)"
    """A trace file, or a generator such as gcp-a100-like(seed=1)."""
    plan: str | None = None
    """A step,batchsize file instead of a trace."""
    label: str = ""
    """What the trace is called in tables; by default its name."""
    seed: int = 0
    """Of the model's initial weights, the order of the samples, dropout and augmentation."""
    epochs: int | None = None
    lr: float | None = None
    """Base learning rate, at the reference batch."""
    ref_batch: int | None = None
    """The batch at which `lr` was tuned, in samples."""
    local_batch: int | None = None
    """Samples a worker takes a step."""
    optimizer: str | None = None
    schedule: str | None = None
    policy: str = "follow"
    """How the batch follows the workers: follow, fixed(TOTAL), capped(max_batch=N); or grows: geo(60ep, factor=5)."""
    step_time: str = "fit"
    """How long a step takes, for example 0.6s; fit: such that the run spans the whole trace (of a plan file: 1 s)."""
    offset: str = "0s"
    """Where in the trace the run starts."""
    on_change: str = "finish"
    """What becomes of a step that a change of workers cuts: finish or lose."""
    repeat: bool = False
    """Play the trace again when it ends before the run."""
    micro_batch: int | None = None
    """At most so many samples of a worker together; by default its share."""
    engine: str = "auto"
    """How workers are emulated: loop (one after another), fused (many at a time), or auto: fused where possible."""
    chunk: int | None = None
    """Samples in one backward pass of the fused engine; by default what is fastest on the device."""
    precision: str = "fp32"
    """What forward and backward passes compute in: fp32, bf16 or fp16."""
    batch_norm: str = "local"
    """Over the samples of one worker (local) or of the whole step (sync), or with fixed statistics (frozen)."""
    compile: bool | None = None
    """Whether to compile the model; by default on a GPU, where the run is long enough for it to pay."""
    memory_steps: float = 1000.0
    """Reference steps that the averages of noise and signal remember; AdaScale's 1000 is long for a short run."""
    measure_every: int = 4
    """Once that many were seen, at most so many steps from one measurement to the next; 1 measures every step."""
    clip: float | None = None
    """Largest norm of a step's mean gradient; by default gradients are not clipped."""
    on_nonfinite: str = "stop"
    """What becomes of a step whose gradient is NaN or infinite: stop the run, or skip the step."""
    ema: float | None = None
    """Part that a moving average of the weights keeps in a reference step; its scores are reported as ema_accuracy."""
    bn_follows_batch: bool = False
    """Whether the momentum of batch-norm statistics follows the batch: 1 - (1 - p)^(batch/ref_batch)."""
    validate_every: int = 1
    """Epochs between validations; the last epoch is always validated."""
    data: str | None = None
    """Folder or file of the data set, for workloads that need one."""
    loader_workers: int | None = None
    """Processes that read samples ahead, of data sets that are not in memory; by default idle cores, four at most."""
    device: str = "cpu"
    threads: int = 1
    """CPU threads. Part of the configuration because results are equal bit for bit only with the same number."""
    plugins: tuple[str, ...] = ()
    """Python files that register rules, workloads or traces of your own."""

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "ref_batch", "local_batch", "micro_batch", "chunk", "memory_steps", "clip", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:  # not NaN either
                raise ConfigError(f"{name} is {value}; expected a number above 0 and below infinity")
        for name in ("measure_every", "validate_every", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.loader_workers is not None and self.loader_workers < 0:
            raise ConfigError(f"loader_workers is {self.loader_workers}; expected 0 (read in this process) or more")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        if self.ema is not None and self.ema >= 1:
            raise ConfigError(f"ema is {self.ema:g}; expected the part kept in a reference step, such as 0.999")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str) -> RunConfig:
        """A configuration from the settings of a file; `where` names the file in errors."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(f"{where}: unknown setting {name!r}; {nearest(name, list(fields))}")
            check_type(value, str(fields[name].type), f"{where}: {name}")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for records."""
        return {
            _RECORDED_AS.get(key, key): list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    def with_loader_workers(self, *, cores: int, processes: int) -> RunConfig:
        """With the number of processes that read ahead, if it was left open: the cores left idle, four at most.

        The `cores` of the machine are shared by so many `processes` that train.

        >>> [RunConfig(workload="mine").with_loader_workers(cores=n, processes=1).loader_workers for n in (1, 2, 4, 64)]
        [0, 1, 3, 4]
        """
        if self.loader_workers is not None:
            return self
        idle = cores // processes - self.threads
        return dataclasses.replace(self, loader_workers=max(0, min(_MOST_LOADERS, idle)))

    def recorded(self) -> dict[str, Any]:
        """What is written down of a run when it begins, and compared by `differences` when it goes on."""
        return {**self.as_dict(), "trace_sha256": self.trace_digest()}

    def trace_digest(self) -> str:
        """Of the trace or plan itself: the bytes of its file, wherever that lies, or the text of a generator."""
        text = self.plan if self.plan is not None else self.trace
        try:
            content = Path(text).read_bytes()
        except (OSError, ValueError):  # no file, or longer than a path can be
            content = text.encode()
        return hashlib.sha256(content).hexdigest()

    def fingerprint(self) -> str:
        """Equal for two configurations if they compute the same: what a run of a study is known by.

        Settings at their default do not enter, so that one which a later version adds leaves earlier runs what they
        were.
        """
        content = {key: value for key, value in self._computing().items() if value != _DEFAULTS[key]}
        kind = "trace" if self.plan is None else "plan"
        return hashlib.sha256(json.dumps([content, kind, self.trace_digest()], sort_keys=True).encode()).hexdigest()

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """What a recorded run computes otherwise, a phrase each; none: it is this very run, and may be continued.

        `recorded`: what the method of that name gave for that run. A setting that it lacks, since a later version
        added it, is taken to have been at its default. A trace or plan that was moved is the same; one that was edited
        is not.
        """
        found = [
            f"{key} is {value!r}, was {recorded.get(key, _DEFAULTS[key])!r}"
            for key, value in self._computing().items()
            if value != recorded.get(key, _DEFAULTS[key])
        ]
        if recorded.get("trace_sha256") != self.trace_digest():
            kind, text = ("trace", self.trace) if self.plan is None else ("plan", self.plan)
            found.append(f"the {kind} is not the one it was ({text})")
        return found

    def other_data(self, recorded: Mapping[str, Any]) -> str:
        """Where a recorded run found its data, if that was another place, as a phrase; empty if it was the same.

        The same data may have been moved, so that this is worth a word and no error.
        """
        before = recorded.get("data")
        return (
            "" if before == self.data else f"its data was {before or 'not given'}, now it is {self.data or 'not given'}"
        )

    def _computing(self) -> dict[str, Any]:
        """The settings that say what is computed, but the trace or plan, whose text may be the name of a file."""
        other = {"label", "trace", "plan", *_WHERE_AND_HOW}
        return {key: value for key, value in self.as_dict().items() if key not in other}


_DEFAULTS = {_RECORDED_AS.get(field.name, field.name): field.default for field in dataclasses.fields(RunConfig)}


_ACCEPTED: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((list, tuple), "a list of texts"),
}


def check_type(value: Any, annotation: str, where: str) -> None:
    """Refuse a value of a study file that is not of the annotated type."""
    wanted = annotation.removesuffix(" | None")
    types, expected = _ACCEPTED[wanted]
    if value is None and annotation.endswith(" | None"):
        return
    if not isinstance(value, types) or (isinstance(value, bool) and wanted != "bool"):
        raise ConfigError(f"{where} is {value!r}; expected {expected}{_instead(value, wanted, where)}")


def _instead(value: Any, wanted: str, where: str) -> str:
    """How to write a value that was meant, but that TOML reads as a number, a date or a single text."""
    if wanted == "str" and not isinstance(value, list | dict):
        unit = "s" if where.endswith(("step_time", "offset")) else ""
        return f", such as {json.dumps(f'{value}{unit}')}: in quotation marks"
    return f", such as {json.dumps([value])}" if wanted.startswith("tuple") and isinstance(value, str) else ""
