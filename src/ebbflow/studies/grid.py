"""A study as data: the grid of runs that a TOML or YAML file describes.

name = "which rule for my model"
summary = "One line for `ebbflow study --list`."
workloads = ["digits-mlp"]
rules = ["constant", "sqrt", "linear"]
seeds = 3                                   # or a list of seeds

[traces]
static = "constant(workers=8)"
mine = "my_trace.csv"                       # beside this file

[settings]                                  # for every run; the names are those of RunConfig
epochs = 30

[[override]]                                # for the runs that match: workload, trace, rule, seed, or lists of them
rule = "linear"
set = { lr = 0.02 }

[[skip]]                                    # runs that are left out of the grid
rule = ["sqrt", "linear"]
trace = "static"

[[paper]]                                   # published values, which a report shows beside ours
source = "Somebody 2022, Table 1"
workload = "digits-mlp"                     # may be left out if there is only one
rule = "sqrt"
values = { mine = 0.9488 }                  # by trace; in units of the metric

[[paper]]                                   # what = "steps", "epochs to 0.95" (updates, seconds) or another score
source = "Somebody 2022, Table 1"
rule = "sqrt"
what = "epochs to 0.95"
values = { mine = "never" }                 # or the number of epochs

[made_from]                                 # what --show adds for a smaller study, or one on other data:
scale = 0.1                                 # published values are shown as not comparable
stand_in = "small"

[stand_in.small]                            # what --stand-in small replaces, where the data is not at hand
workloads = { digits-mlp = "digits-mlp(width=16)" }
divide = 4                                  # batches: local_batch, ref_batch, micro_batch, fixed(N), max_batch, initial
lr = 0.01                                   # at the divided ref_batch; by default the study's, divided as well
traces = { mine = "constant(workers=2)" }
settings = { step_time = "fit" }
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ebbflow.core.choices import Choice
from ebbflow.core.plugins import load_plugins
from ebbflow.core.spec import nearest
from ebbflow.errors import ConfigError
from ebbflow.report.published import PaperValue, PublishedValue, parse_quantity, parse_value
from ebbflow.run.config import RunConfig

__all__ = [
    "Arm", "Study", "check_arms", "load_study", "parse_study", "recipe_names", "recipe_text",
    "study_text", "with_choice", "with_plugins", "with_settings",
]  # fmt: skip

_KEYS = [
    "name",
    "summary",
    "workloads",
    "rules",
    "traces",
    "seeds",
    "settings",
    "override",
    "skip",
    "paper",
    "stand_in",
    "made_from",
]
_SELECTORS = ["workload", "trace", "rule", "seed"]
_MOST_SEEDS = 10_000
_AXES = {"workload": "workloads", "trace": "[traces]", "rule": "rules", "seed": "seeds", "label": "[traces]"}
"""What the grid itself determines for each run, and the key that does so: these are not settings."""
_PAPER_KEYS = ["source", "workload", "rule", "values", "what"]
_STAND_IN_KEYS = ["workloads", "divide", "lr", "traces", "settings"]
_MADE_FROM_KEYS = ["scale", "stand_in"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of a study."""

    id: str
    """Name of the folder: readable, and distinct for distinct configurations."""
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Study:
    """The grid of runs."""

    name: str
    workloads: tuple[str, ...]
    rules: tuple[str, ...]
    traces: Mapping[str, str]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    override: tuple[Mapping[str, Any], ...] = ()
    skip: tuple[Mapping[str, Any], ...] = ()
    paper: tuple[PaperValue, ...] = ()
    summary: str = ""
    stand_ins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name, what is replaced where the data is not at hand (`scaling.with_stand_in`)."""
    stand_in: str | None = None
    """The stand-in that has been put into the study."""
    scale: float = 1.0
    """Fraction of the epochs of the study as it was written (`scaling.scaled`)."""
    source: str = "study"
    """Where the study was read from, for errors."""

    def as_dict(self) -> dict[str, Any]:
        """The configuration that `study.json` keeps."""
        always = {
            "name": self.name,
            "workloads": list(self.workloads),
            "rules": list(self.rules),
            "traces": dict(self.traces),
            "seeds": list(self.seeds),
            "settings": dict(self.settings),
            "override": [dict(entry) for entry in self.override],
        }
        sometimes = {
            "skip": [dict(entry) for entry in self.skip],
            "paper": [asdict(value) for value in self.paper],
            "stand_in": self.stand_in,
            "scale": None if self.scale == 1.0 else self.scale,
        }
        return always | {key: value for key, value in sometimes.items() if value}

    def arms(self) -> list[Arm]:
        """All runs, ordered by seed, so that an interrupted study has complete tables of fewer seeds."""
        return [
            self._arm(workload=workload, trace=trace, rule=rule, seed=seed)
            for seed in self.seeds
            for workload in self.workloads
            for trace in self.traces
            for rule in self.rules
            if not any(_matches(entry, workload=workload, trace=trace, rule=rule, seed=seed) for entry in self.skip)
        ]

    def names(self) -> dict[str, list[Any]]:
        """What tells the arms apart: the names on each axis, by which overrides, skips and `only` select."""
        return {
            "workload": list(self.workloads), "trace": list(self.traces), "rule": list(self.rules),
            "seed": list(self.seeds),
        }  # fmt: skip

    def only(self, chosen: Mapping[str, list[str]]) -> list[Arm]:
        """The arms with one of the chosen names on each of the axes: workload, trace, rule, seed.

        A name that the study does not have is an error, and so is a choice that leaves nothing.
        """
        names = {axis: list(map(str, found)) for axis, found in self.names().items()}
        for axis, values in chosen.items():
            if axis not in names:
                raise ConfigError(f"{axis!r} does not tell arms apart; {nearest(axis, [*names])}")
            if unknown := [value for value in values if value not in names[axis]]:
                raise ConfigError(f"{self.source} has no {axis} {unknown[0]!r}; {nearest(unknown[0], names[axis])}")
        found = [
            arm
            for arm in self.arms()
            if _matches(
                chosen, workload=arm.config.workload, trace=arm.config.label, rule=arm.config.rule,
                seed=str(arm.config.seed),
            )
        ]  # fmt: skip
        if not found:
            asked = ", ".join(f"{axis}={value}" for axis, values in chosen.items() for value in values)
            raise ConfigError(f"{self.source} has no arm with {asked}: [[skip]] leaves it out")
        return found

    def overridden(self, name: str) -> list[Any]:
        """What the [[override]] tables say of a setting, for each run of which they do."""
        entries = [entry for entry in self.override if name in entry["set"]]
        found = []
        for config in (arm.config for arm in self.arms()):
            chosen = {"workload": config.workload, "trace": config.label, "rule": config.rule, "seed": config.seed}
            found += [entry["set"][name] for entry in entries if _matches(entry, **chosen)][-1:]  # the last one holds
        return found

    def _arm(self, *, workload: str, trace: str, rule: str, seed: int) -> Arm:
        settings = dict(self.settings)
        for entry in self.override:
            if _matches(entry, workload=workload, trace=trace, rule=rule, seed=seed):
                settings |= entry["set"]
        if wrong := sorted(_AXES.keys() & settings.keys()):
            place = _AXES[wrong[0]]
            raise ConfigError(f"{self.source}: {wrong[0]} is not a setting, it is given by {place}; change it there")
        values = {**settings, "workload": workload, "trace": self.traces[trace], "rule": rule, "seed": seed}
        config = RunConfig.from_mapping({**values, "label": trace}, where=self.source)
        readable = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-") for text in (workload, trace, rule))
        digest = hashlib.sha256(f"{config.label} {config.fingerprint()}".encode()).hexdigest()[:6]
        return Arm(id=f"{readable[:80]}_s{seed}_{digest}", config=config)


def _matches(entry: Mapping[str, Any], **chosen: Any) -> bool:
    """Whether the selectors of an [[override]] or [[skip]] match a run: each is a value, or a list of values."""
    return all(chosen[key] in _values(value) for key, value in entry.items() if key != "set")


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def recipe_names() -> list[str]:
    """The names of the studies that come with the package."""
    folder = resources.files("ebbflow.studies").joinpath("recipes")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """The file of a recipe, from which a user can start a study of their own."""
    if name not in recipe_names():
        raise ConfigError(f"{name!r} is not a recipe; {nearest(name, recipe_names())}")
    return resources.files("ebbflow.studies").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")


def study_text(study: Study) -> str:
    """The file of a study that was made from another: the TOML from which `parse_study` makes the same runs.

    Stand-ins are for the study as it was written, so that one on a stand-in, or a scaled one, has none. It says instead
    how it was made, since published values are not comparable with its runs.
    """
    seeds: Any = list(study.seeds)
    head = {
        "name": study.name, "summary": study.summary, "workloads": list(study.workloads), "rules": list(study.rules),
        "seeds": len(seeds) if seeds == list(range(len(seeds))) else seeds,
    }  # fmt: skip
    published: dict[tuple[str, ...], dict[str, PublishedValue]] = {}
    for value in study.paper:
        row = (value.source, value.workload, value.rule, value.what)
        published.setdefault(row, {})[value.trace] = value.value
    paper = [
        dict(zip(("source", "workload", "rule", "what"), row, strict=True)) | {"values": values}
        for row, values in published.items()
    ]
    made_from = {
        **({"scale": study.scale} if study.scale != 1 else {}),
        **({"stand_in": study.stand_in} if study.stand_in is not None else {}),
    }
    parts = [
        _toml_lines({key: value for key, value in head.items() if value != ""}),
        f"[traces]\n{_toml_lines(study.traces)}",
        f"[settings]\n{_toml_lines(study.settings)}" if study.settings else "",
        *(f"[[override]]\n{_toml_lines(entry)}" for entry in study.override),
        *(f"[[skip]]\n{_toml_lines(entry)}" for entry in study.skip),
        *(f"[[paper]]\n{_toml_lines(entry)}" for entry in paper),
        *(
            f"[stand_in.{_toml_key(name)}]\n{_toml_lines(entry)}"
            for name, entry in (() if made_from else study.stand_ins.items())
        ),
        f"[made_from]\n{_toml_lines(made_from)}" if made_from else "",
    ]
    return "\n".join(part for part in parts if part)


def _toml_lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in table.items())


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):  # JSON has neither inf nor nan
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class _StudyLoader(yaml.SafeLoader):
    """YAML as study files need it: a key that is given twice is refused, as in TOML, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; PyYAML would take the last value of a key without a word."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


# PyYAML follows version 1.1, by which a number with an exponent needs a point and a sign: 1.0e-3.
_StudyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_study(text: str | Path) -> Study:
    """A study from a file (.toml, .yaml, .yml), or a recipe that comes with the package."""
    text = str(text)
    if text in recipe_names():
        return parse_study(tomllib.loads(recipe_text(text)), source=text, folder=None)
    path = Path(text)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"{text!r} is neither a study file (.toml, .yaml, .yml) nor a recipe; {nearest(text, recipe_names())}"
        )
    try:
        content = path.read_text(encoding="utf-8-sig")  # editors on Windows put a byte order mark at the beginning
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        values = tomllib.loads(content) if path.suffix == ".toml" else yaml.load(content, _StudyLoader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return parse_study(values, source=str(path), folder=path.parent)


def parse_study(values: Any, *, source: str, folder: Path | None) -> Study:
    """A study from the content of a file, which is checked. Paths in it are relative to the folder of the file."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected the keys {', '.join(_KEYS)}, found {type(values).__name__}")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{source}: unknown key {key!r}; {nearest(str(key), _KEYS)}")
    settings = _table(values, "settings", source)
    override = _selections(values, "override", source)
    for entry in override:
        if not isinstance(entry.get("set"), Mapping):
            raise ConfigError(f"{source}: an override lacks its settings; add set = {{ lr = 0.01 }}")
        entry["set"] = dict(entry["set"])
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
        skip=_selections(values, "skip", source),
        summary=str(values.get("summary", "")),
        source=source,
        **_made_from(values, source),
    )
    _check_selections(study)
    study = replace(
        study, paper=_paper(values.get("paper", []), study), stand_ins=_stand_ins(values, study, folder=folder)
    )
    if not study.arms():  # this also finds wrong settings, before anything is started
        raise ConfigError(f"{source}: skip leaves nothing to run")
    return study


def with_settings(study: Study, texts: Sequence[str]) -> Study:
    """The study with further settings for every run, from texts such as epochs=5 or device=cuda.

    A value is parsed as TOML; a value that is not TOML is a text. The overrides of the study take precedence.
    """
    settings = dict(study.settings)
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"the setting {text!r} has no value; write for example epochs=5 or device=cuda")
        try:
            settings[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[name.strip()] = value.strip()
    changed = replace(study, settings=settings)
    changed.arms()
    return changed


def with_choice(study: Study, choice: Choice) -> Study:
    """The study with the rule of a choice among its rules, whose runs take the choice's base rate.

    The [[override]] tables of the study take precedence.
    """
    changed = replace(
        study,
        rules=tuple(dict.fromkeys((*study.rules, choice.rule))),
        override=({"rule": choice.rule, "set": {"lr": choice.lr}}, *study.override),
    )
    changed.arms()
    return changed


def with_plugins(study: Study, files: Sequence[str]) -> Study:
    """The study with further plugins for every run."""
    plugins = [*study.settings.get("plugins", []), *files]
    return replace(study, settings={**study.settings, "plugins": plugins}) if files else study


def _texts(values: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    if key not in values:
        raise ConfigError(f"{source}: {key} is missing; expected a list of one text or more")
    found = values[key]
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
    """A table from label to trace; in a plain list the texts are their own labels."""
    if "traces" not in values:
        raise ConfigError(f"{source}: traces is missing; expected a table such as static = 'constant(workers=8)'")
    found = values["traces"]
    if isinstance(found, list | str):
        found = {text: text for text in _texts(values, "traces", source)}
    if not isinstance(found, Mapping) or not found or not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(f"{source}: traces is {found!r}; expected a table such as static = 'constant(workers=8)'")
    return dict(found)


def _seeds(found: Any, source: str) -> tuple[int, ...]:
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= _MOST_SEEDS:
        return tuple(range(found))
    if isinstance(found, list) and found and all(isinstance(seed, int) and seed >= 0 for seed in found):
        if len(set(found)) < len(found):
            raise ConfigError(f"{source}: seeds has an entry twice: {found}")
        return tuple(found)
    raise ConfigError(
        f"{source}: seeds is {found!r}; expected how many (3), up to {_MOST_SEEDS:,}, or which ([0, 1, 2])"
    )


def _selections(values: Mapping[str, Any], key: str, source: str) -> tuple[dict[str, Any], ...]:
    """The [[override]] or [[skip]] tables, their keys checked."""
    found = values.get(key, [])
    known = [*_SELECTORS, "set"] if key == "override" else _SELECTORS
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise ConfigError(f"{source}: {key} is {found!r}; expected [[{key}]] tables")
    for entry in found:
        for name in entry:
            if name not in known:
                raise ConfigError(f"{source}: {key}: unknown key {name!r}; {nearest(name, known)}")
    return tuple(dict(entry) for entry in found)


def _check_selections(study: Study) -> None:
    """Refuse selectors that match nothing in the study: with a typo, an override would silently have no effect."""
    known = study.names()
    for kind, entries in (("override", study.override), ("skip", study.skip)):
        for entry in entries:
            for key in set(entry) - {"set"}:
                for value in _values(entry[key]):
                    if value not in known[key]:
                        names = nearest(str(value), [str(name) for name in known[key]])
                        raise ConfigError(f"{study.source}: {kind}: no {key} of the study is {value!r}; {names}")


def _paper(found: Any, study: Study) -> tuple[PaperValue, ...]:
    """The values of the [[paper]] tables; each table holds one row of a published table."""
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise ConfigError(f"{study.source}: paper is {found!r}; expected [[paper]] tables")
    result = []
    cells: set[tuple[str, ...]] = set()
    for entry in found:
        for key in entry:
            if key not in _PAPER_KEYS:
                raise ConfigError(f"{study.source}: paper: unknown key {key!r}; {nearest(key, _PAPER_KEYS)}")
        row = {"workload": study.workloads[0] if len(study.workloads) == 1 else None, "what": "metric", **entry}
        for key, known in (("workload", study.workloads), ("rule", study.rules)):
            if row.get(key) not in known:
                raise ConfigError(f"{study.source}: paper: {key} is {row.get(key)!r}; {nearest('', list(known))}")
        quantity = parse_quantity(row["what"], where=f"{study.source}: paper")
        values = row.get("values")
        if not isinstance(values, Mapping) or not isinstance(row.get("source"), str):
            raise ConfigError(f"{study.source}: paper: a table needs source = '...' and values = {{ trace = 0.95 }}")
        for trace, value in values.items():
            where = f"{study.source}: paper: {trace!r}"
            if trace not in study.traces:
                names = nearest(str(trace), list(study.traces))
                raise ConfigError(f"{where} = {value!r}; expected a trace of the study; {names}")
            cell = (row["workload"], trace, row["rule"], str(quantity))
            if cell in cells:
                raise ConfigError(f"{where}: {row['rule']} has a published value of {quantity} twice; expected one")
            cells.add(cell)
            result.append(
                PaperValue(workload=row["workload"], trace=trace, rule=row["rule"], source=row["source"],
                           value=parse_value(value, quantity, where=where), what=str(quantity))
            )  # fmt: skip
    return tuple(result)


def _made_from(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The [made_from] table: the scale and the stand-in with which the study was made from another."""
    found = _table(values, "made_from", source)
    for key, value in found.items():
        where = f"{source}: made_from"
        if key not in _MADE_FROM_KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, _MADE_FROM_KEYS)}")
        if key == "scale" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1):
            raise ConfigError(f"{where}: scale is {value!r}; expected a fraction of the study, above 0 and at most 1")
        if key == "stand_in" and not (isinstance(value, str) and value):
            raise ConfigError(f"{where}: stand_in is {value!r}; expected the name of a stand-in, such as 'digits'")
    return found


def _stand_ins(values: Mapping[str, Any], study: Study, *, folder: Path | None) -> dict[str, dict[str, Any]]:
    """The [stand_in.NAME] tables: what each replaces is in the study, and its batches can be divided."""
    found = _table(values, "stand_in", study.source)
    for name, entry in found.items():
        where = f"{study.source}: stand_in.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} is {entry!r}; expected a table with the keys {', '.join(_STAND_IN_KEYS)}")
        for key in entry:
            if key not in _STAND_IN_KEYS:
                raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, _STAND_IN_KEYS)}")
        for key, known in (("workloads", study.workloads), ("traces", study.traces)):
            for old in _table(entry, key, where):
                if old not in known:
                    raise ConfigError(f"{where}: {old!r} is not in the {key} of the study; {nearest(old, list(known))}")
        if not isinstance(entry.get("divide", 1), int) or entry.get("divide", 1) < 1:
            raise ConfigError(f"{where}: divide is {entry['divide']!r}; expected a whole number above 0")
        rate = entry.get("lr", 1)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            raise ConfigError(f"{where}: lr is {rate!r}; expected a number above 0")
        traces = {label: _anchor(str(text), folder) for label, text in entry.get("traces", {}).items()}
        found[name] = {**entry, "traces": traces, "settings": _table(entry, "settings", where)}
        _anchor_paths(found[name]["settings"], folder)
    return found


def _anchor(text: str, folder: Path | None) -> str:
    """A path in a study file, which is relative to that file; a text that is not a path is unchanged."""
    try:
        found = folder is not None and (folder / text).exists()
    except OSError:  # too long for a path: it is the text of a trace
        found = False
    return str(folder / text) if folder is not None and found else text


def _anchor_paths(settings: dict[str, Any], folder: Path | None) -> None:
    for key in ("data", "plan"):
        if isinstance(settings.get(key), str):
            settings[key] = _anchor(settings[key], folder)
    if isinstance(settings.get("plugins"), list):
        settings["plugins"] = [_anchor(str(text), folder) for text in settings["plugins"]]


def check_arms(arms: Sequence[Arm]) -> None:
    """Refuse a study before it starts if a rule, trace, optimizer, ... in it cannot be made; reads no data set.

    A typo that is found later would make every arm fail, and their records would keep the corrected study out of its
    folder.
    """
    from ebbflow import workloads  # imports torch, which describing a study does not need
    from ebbflow.run.assemble import check_names

    for arm in arms:
        load_plugins(arm.config.plugins)
    check_names([arm.config for arm in arms])
    for workload in {arm.config.workload for arm in arms}:
        workloads.recipe(workload)
