"""A study as data: the grid of runs that a small TOML or YAML file describes.

name = "which rule for my model"
workloads = ["digits-mlp"]
rules = ["constant", "sqrt", "linear"]
seeds = 3                                   # or a list of seeds

[traces]
static = "constant(workers=8)"
mine = "my_trace.csv"                       # beside this file

[settings]                                  # for every run; the names are those of RunConfig
epochs = 30

[[override]]                                # for the runs that match
rule = "linear"
set = { lr = 0.02 }
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ebbflow.config import RunConfig, load_plugins
from ebbflow.errors import ConfigError
from ebbflow.rules.registry import make_rule
from ebbflow.spec import nearest
from ebbflow.traces import load as load_trace

__all__ = ["Arm", "Study", "check_arms", "load_study", "parse_study", "recipe_names"]

_KEYS = ["name", "workloads", "rules", "traces", "seeds", "settings", "override"]
_SELECTORS = ["workload", "trace", "rule", "seed"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of a study."""

    id: str
    """Name of its folder: readable, and different for different configurations."""
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Study:
    """The grid; `arms()` are its runs, in the order in which they are started."""

    name: str
    workloads: tuple[str, ...]
    rules: tuple[str, ...]
    traces: Mapping[str, str]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    override: tuple[Mapping[str, Any], ...] = ()
    source: str = "study"
    """Where it was read from, for errors."""

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON: what `study.json` keeps and what a resumed study is compared with."""
        return {
            "name": self.name,
            "workloads": list(self.workloads),
            "rules": list(self.rules),
            "traces": dict(self.traces),
            "seeds": list(self.seeds),
            "settings": dict(self.settings),
            "override": [dict(entry) for entry in self.override],
        }

    def arms(self) -> list[Arm]:
        """All runs: seeds outermost, so that an interrupted study has whole tables of fewer seeds."""
        return [
            self._arm(workload=workload, trace=trace, rule=rule, seed=seed)
            for seed in self.seeds
            for workload in self.workloads
            for trace in self.traces
            for rule in self.rules
        ]

    def _arm(self, *, workload: str, trace: str, rule: str, seed: int) -> Arm:
        chosen = {"workload": workload, "trace": trace, "rule": rule, "seed": seed}
        settings = dict(self.settings)
        for entry in self.override:
            if all(key == "set" or chosen[key] == value for key, value in entry.items()):
                settings |= entry["set"]
        values = {**settings, "workload": workload, "trace": self.traces[trace], "rule": rule, "seed": seed}
        config = RunConfig.from_mapping({**values, "label": trace}, where=self.source)
        readable = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-") for text in (workload, trace, rule))
        digest = hashlib.sha256(repr(sorted(config.as_dict().items())).encode()).hexdigest()[:6]
        return Arm(id=f"{readable[:80]}_s{seed}_{digest}", config=config)


def recipe_names() -> list[str]:
    """The studies that come with the package, by name."""
    folder = resources.files("ebbflow.studies").joinpath("recipes")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_study(text: str) -> Study:
    """The study of a file (.toml, .yaml, .yml), or of a recipe that comes with the package."""
    if text in recipe_names():
        content = resources.files("ebbflow.studies").joinpath("recipes", f"{text}.toml").read_text(encoding="utf-8")
        return parse_study(tomllib.loads(content), source=text, folder=None)
    path = Path(text)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"{text!r} is neither a study file (.toml, .yaml, .yml) nor a recipe; {nearest(text, recipe_names())}"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        values = tomllib.loads(content) if path.suffix == ".toml" else yaml.safe_load(content)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return parse_study(values, source=str(path), folder=path.parent)


def parse_study(values: Any, *, source: str, folder: Path | None) -> Study:
    """Check the content of a study file. Paths in it are relative to the folder it lies in."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected the keys {', '.join(_KEYS)}, found {type(values).__name__}")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{source}: unknown key {key!r}; {nearest(str(key), _KEYS)}")
    settings = _table(values, "settings", source)
    override = _overrides(values.get("override", []), source)
    for place in (settings, *(entry["set"] for entry in override)):
        _anchor_paths(place, folder)
    traces = {label: _anchor(str(text), folder) for label, text in _traces(values, source).items()}
    study = Study(
        name=str(values.get("name", Path(source).stem)),
        workloads=_texts(values, "workloads", source),
        rules=_texts(values, "rules", source),
        traces=traces,
        seeds=_seeds(values.get("seeds", 1), source),
        settings=settings,
        override=override,
        source=source,
    )
    study.arms()  # a wrong setting is an error now, before anything is started
    return study


def _texts(values: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    found = values.get(key)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, Sequence) or not found or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"{source}: {key} is {found!r}; expected a list of one text or more")
    if len(set(found)) < len(found):
        raise ConfigError(f"{source}: {key} has an entry twice: {', '.join(found)}")
    return tuple(found)


def _table(values: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{source}: {key} is {found!r}; expected a table of names and values")
    return dict(found)


def _traces(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A table label -> trace; a plain list is labelled by the texts themselves."""
    found = values.get("traces")
    if isinstance(found, list | str):
        found = {text: text for text in _texts(values, "traces", source)}
    if not isinstance(found, Mapping) or not found or not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(f"{source}: traces is {found!r}; expected a table such as static = 'constant(workers=8)'")
    return dict(found)


def _seeds(found: Any, source: str) -> tuple[int, ...]:
    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
        return tuple(range(found))
    if isinstance(found, list) and found and all(isinstance(seed, int) and seed >= 0 for seed in found):
        if len(set(found)) < len(found):
            raise ConfigError(f"{source}: seeds has an entry twice: {found}")
        return tuple(found)
    raise ConfigError(f"{source}: seeds is {found!r}; expected how many (3) or which ([0, 1, 2])")


def _overrides(found: Any, source: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise ConfigError(f"{source}: override is {found!r}; expected [[override]] tables")
    for entry in found:
        for key in entry:
            if key not in (*_SELECTORS, "set"):
                raise ConfigError(f"{source}: override: unknown key {key!r}; {nearest(key, [*_SELECTORS, 'set'])}")
        if not isinstance(entry.get("set"), Mapping):
            raise ConfigError(f"{source}: an override lacks its settings; add set = {{ lr = 0.01 }}")
    return tuple({**entry, "set": dict(entry["set"])} for entry in found)


def _anchor(text: str, folder: Path | None) -> str:
    """A path in a study file is relative to that file."""
    if folder is None or not (folder / text).exists():
        return text
    return str(folder / text)


def _anchor_paths(settings: dict[str, Any], folder: Path | None) -> None:
    for key in ("data", "plan"):
        if isinstance(settings.get(key), str):
            settings[key] = _anchor(settings[key], folder)
    if isinstance(settings.get("plugins"), list):
        settings["plugins"] = [_anchor(str(text), folder) for text in settings["plugins"]]


def check_arms(arms: Sequence[Arm]) -> None:
    """Refuse a study before it starts if a rule, a trace or a workload in it cannot be made; reads no data set."""
    from ebbflow import workloads  # imports torch, which describing a study does not need

    for arm in arms:
        load_plugins(arm.config.plugins)
    for rule in {arm.config.rule for arm in arms}:
        make_rule(rule)
    for trace in {arm.config.trace for arm in arms if arm.config.plan is None}:
        load_trace(trace)
    for workload in {arm.config.workload for arm in arms}:
        workloads.recipe(workload)
