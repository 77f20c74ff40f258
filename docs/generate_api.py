"""Writes `docs/api.md`, the reference of the public names, from their signatures and docstrings: `make docs`.

Signatures and documented fields are taken from the source text, so that the page is the same for every Python version.
A test compares the page with what this script would write.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import ebbflow
from ebbflow.cli import replica_command, train_command
from ebbflow.core.spec import Registry
from ebbflow.run.config import FRONT_ENDS, RunConfig, settings_of

PAGE = Path(__file__).with_name("api.md")

SECTIONS = {
    "A whole training": ("train", "RunConfig", "Session", "choose"),
    "In a training loop": ("Trace", "BatchPlan", "ElasticSampler", "ElasticOptimizer", "PreemptionNotice"),
    "Rules": ("make_rule", "StepContext", "Scaling"),
    "Extensions": tuple(name for name in ebbflow.__all__ if name.startswith("register_")),
    "Records and errors": ("read_record", "EbbflowError"),
}
"""The public names of `ebbflow` itself, in the order of the page."""

MORE = {
    "train": ("ebbflow.run.loop", "Callbacks"),
    "Session": ("ebbflow.run.session", "SessionStep"),
    "choose": ("ebbflow.studies.tournament", "Chosen"),
    "read_record": ("ebbflow.record", "Run"),
    "sklearn": ("ebbflow.estimators.net", "EbbflowNet"),
}
"""What a public name or package gives to the user, takes or is built on: described right after it."""

DESCRIBED = ("Session", "EbbflowNet")
"""Classes whose members the page does not repeat for their subclasses."""

HOOKS = ("initialize_", "get_", "fit_loop")
"""Beginnings of methods by which skorch calls an estimator, not its user."""

INTRODUCTION = """# API reference

The public names of Ebbflow. This page is generated from their docstrings by `make docs`; edit the docstrings instead.
[guide.md](guide.md) shows how to use them, and [glossary.md](glossary.md) explains the words.
"""

SETTINGS = """## Settings of a run

Every setting is a field of `RunConfig`. The other front ends are generated from these fields: options of `ebbflow
train` and keys of study files (command), options of `ebbflow launch --workload` (replica), arguments of
`ebbflow.Session` and `ebbflow.live.join` (session), and parameters of the estimators. A dash means that the front end
does not offer the setting. "Recipe" means that the recipe of the workload decides; a session and an estimator have no
recipe.
"""


def page() -> str:
    """The whole text of `docs/api.md`."""
    missing = {*ebbflow.__all__} - {"__version__"} - {name for names in SECTIONS.values() for name in names}
    assert not missing, f"public names without a section of the API reference: {', '.join(sorted(missing))}"
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += [_described(f"ebbflow.{name}", getattr(ebbflow, name)), *_more(name)]
    parts.insert(1 + next(i for i, part in enumerate(parts) if part.startswith("### ebbflow.run.session")), _settings())
    for package in ebbflow._PACKAGES:
        module = importlib.import_module(f"ebbflow.{package}")
        names = tuple(sorted({*module.__all__} - {*ebbflow.__all__}))
        parts.append(f"## ebbflow.{package}\n\n{_text(inspect.getdoc(module))}\n")
        parts += [_described(f"ebbflow.{package}.{name}", getattr(module, name)) for name in names]
        parts += _more(package)
    return "\n".join(parts)


def _more(name: str) -> list[str]:
    if name not in MORE:
        return []
    module, other = MORE[name]
    return [_described(f"{module}.{other}", getattr(importlib.import_module(module), other))]


# Names ------------------------------------------------------------------------------------------------------------


def _described(name: str, found: Any) -> str:
    """A heading, the signature, the docstring, and the public members of a class."""
    heading = f"### {name}\n"
    if isinstance(found, Registry):
        return f"{heading}\nThe known names of a {found.noun}: {', '.join(f'`{one}`' for one in found.names())}.\n"
    node = _node(found)
    if isinstance(node, ast.FunctionDef):
        return f"{heading}\n{_code(_signature(name.rpartition('.')[2], node))}\n{_text(inspect.getdoc(found))}\n"
    assert isinstance(node, ast.ClassDef)
    lines = [heading]
    own = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    if "__init__" in own and found is not RunConfig:
        lines.append(_code(_signature(node.name, own["__init__"])))
    lines.append(_text(inspect.getdoc(found)) + "\n")
    if "__init__" in own and (doc := ast.get_docstring(own["__init__"])):
        lines.append(_text(doc) + "\n")
    if found is RunConfig:
        return "\n".join(lines)
    members = [*_fields(node), *_methods(found, node), *_inherited(found)]
    if members:
        lines.append("\n".join(members) + "\n")
    bases = [base.__name__ for base in found.__bases__ if base.__name__ in DESCRIBED]
    if bases:
        lines.append(f"It has the members of `{bases[0]}`, too.\n")
    return "\n".join(lines)


@functools.cache
def _module(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _node(found: Any) -> ast.AST:
    """The definition of a class or function in the source."""
    path = inspect.getsourcefile(found)
    assert path is not None
    names = found.__qualname__.split(".")
    node: ast.AST = _module(path)
    for name in names:
        node = next(
            part
            for part in ast.iter_child_nodes(node)
            if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name
        )
    return node


def _signature(name: str, node: ast.FunctionDef) -> str:
    """The call as the source has it, without self, on one line if it fits into 100 columns."""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if arguments.args.args and arguments.args.args[0].arg in ("self", "cls"):
        del arguments.args.args[0]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    parts = [*_arguments(arguments.args)]
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """One text per argument."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    keyword = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for one, default in zip(positional, defaults, strict=True):
        yield _argument(one, default)
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif keyword:
        yield "*"
    for one, default in keyword:
        yield _argument(one, default)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(one)
    space = " " if one.annotation is not None else ""
    return f"{ast.unparse(one)}{space}={space}{ast.unparse(default)}"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The public fields of a class, each with the string below it."""
    for part, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        if part.target.id.startswith("_") or ast.unparse(part.annotation).startswith("ClassVar"):
            continue
        default = "" if part.value is None or isinstance(part.value, ast.Call) else f" = {ast.unparse(part.value)}"
        doc = ""
        if isinstance(part.value, ast.Call) and ast.unparse(part.value.func) == "param":
            default = f" = {ast.unparse(part.value.args[0])}" if part.value.args else ""
            (text,) = [one.value for one in part.value.keywords if one.arg == "doc"]
            doc = f": {ast.literal_eval(text)}" if isinstance(text, ast.Constant) else ""
        elif (
            isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        ):
            doc = f": {_inline(below.value.value)}"
        yield f"- `{part.target.id}: {ast.unparse(part.annotation)}{default}`{doc}"


def _methods(found: type, node: ast.ClassDef, without: Collection[str] = ()) -> Iterator[str]:
    """The public methods and properties of a class."""
    for part in node.body:
        if not isinstance(part, ast.FunctionDef) or part.name.startswith("_") or part.name in without:
            continue
        kinds = {ast.unparse(decorator) for decorator in part.decorator_list}
        if any(kind.endswith((".setter", "overload")) for kind in kinds):
            continue
        if found.__name__ == "EbbflowNet" and part.name.startswith(HOOKS):
            continue
        shown = part.name if kinds & {"property", "cached_property"} else _call(part)
        doc = ast.get_docstring(part)
        yield f"- `{shown}`" + (f": {_inline(doc)}" if doc else "")


def _inherited(found: type) -> Iterator[str]:
    """The public methods and properties that a class has from one of this package that the page does not describe."""
    seen = set(vars(found))
    for base in found.__mro__[1:]:
        if base.__module__.startswith("ebbflow.") and base.__name__ not in DESCRIBED:
            node = _node(base)
            assert isinstance(node, ast.ClassDef)
            yield from _methods(base, node, seen)
            seen |= set(vars(base))


def _call(node: ast.FunctionDef) -> str:
    """A method with the names of its arguments only."""
    arguments = node.args
    names = [one.arg for one in [*arguments.posonlyargs, *arguments.args] if one.arg not in ("self", "cls")]
    if arguments.vararg is not None:
        names.append(f"*{arguments.vararg.arg}")
    names += [f"{one.arg}=" for one in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        names.append(f"**{arguments.kwarg.arg}")
    return f"{node.name}({', '.join(names)})"


# Texts ------------------------------------------------------------------------------------------------------------


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```\n"


def _text(doc: str | None) -> str:
    """A docstring as Markdown: examples of doctest and indented code become blocks of code."""
    assert doc is not None, "a public name without a docstring"
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    shown = []
    for paragraph in paragraphs:
        code = paragraph.startswith((">>>", "    "))
        listed = re.match(r"    [\w.]+   ", paragraph)  # the modules of a package
        shown.append(_code(textwrap.dedent(paragraph), "text" if listed else "python").rstrip() if code else paragraph)
    return "\n\n".join(shown).replace("```\n\n```python\n", "\n")


def _inline(doc: str) -> str:
    """The sentences of a docstring on one line, without its examples."""
    paragraphs = [one for one in inspect.cleandoc(doc).split("\n\n") if not one.startswith((">>>", "    "))]
    return " ".join(" ".join(paragraphs).split())


def _settings() -> str:
    """The table of all settings, and why some front ends and engines lack some of them."""
    offered = {front_end: {field: name for name, field in settings_of(front_end).items()} for front_end in FRONT_ENDS}
    verbs = {"command": train_command.train, "replica": replica_command.replica}
    lines = [SETTINGS, f"| setting | default | meaning | {' | '.join(FRONT_ENDS)} |", "|:--|:--|:--|:--|:--|:--|:--|"]
    reasons: dict[str, tuple[list[str], list[str]]] = {}
    for name, field in RunConfig.model_fields.items():
        told: Any = field.json_schema_extra or {}
        extra = told.get("ebbflow", {})
        default = "required" if field.is_required() else "recipe" if extra.get("recipe") else f"`{field.default!r}`"
        cells = []
        for front_end in FRONT_ENDS:
            shown = offered[front_end].get(name)
            if front_end in verbs:
                shown = _option(name) if name in inspect.signature(verbs[front_end]).parameters else None
            cells.append(f"`{shown}`" if shown is not None else "-")
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning} | {' | '.join(cells)} |")
        for kind, reason in extra.get("not_for", {}).items():
            names, kinds = reasons.setdefault(reason, ([], []))
            names += [name] if name not in names else []
            kinds += [kind] if kind not in kinds else []
    lines.append("\nWhy a front end or an engine does not have a setting:\n")
    for reason, (names, kinds) in reasons.items():
        lines.append(f"- {', '.join(f'`{name}`' for name in names)} ({', '.join(kinds)}): {reason}.")
    return "\n".join(lines) + "\n"


def _option(name: str) -> str:
    """The option of the command for a setting; the workload is an argument of `train`."""
    return f"--{name.removesuffix('s') if name == 'plugins' else name.replace('_', '-')}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
