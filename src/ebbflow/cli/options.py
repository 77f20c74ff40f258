"""Options of the command that are generated from the settings of a run."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from ebbflow.cli.common import err
from ebbflow.core.choices import Choice, read_choice
from ebbflow.core.plugins import load_plugins
from ebbflow.rules.chosen import check_choice
from ebbflow.run.config import FrontEnd, RunConfig, fields_of, recipe_settings, settings_of

__all__ = ["ChoiceFile", "compared", "takes_settings"]

ChoiceFile = Annotated[
    Path | None,
    typer.Option("--choice", help="A choice.toml of `ebbflow choose`: its rule and base rate, unless they are given."),
]


def takes_settings(
    front_end: FrontEnd, *, argument: str | None = None, leave_out: tuple[str, ...] = (), choice: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a verb whose first parameter is a RunConfig: it gets one option for every setting instead.

    `argument`: the setting that is a positional argument. `leave_out`: settings that this verb does not offer.
    `choice`: whether a file of `ebbflow choose` may say what was not given.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        first, *own = inspect.signature(verb, eval_str=True).parameters.values()
        names = settings_of(front_end)
        generated = [_option(name, field, argument) for name, field in fields_of(front_end) if name not in leave_out]

        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in [*values] if name in names and name not in leave_out}
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
            chosen = {name: value for name, value in given.items() if value is not None}
            if choice:
                chosen |= _from_choice(values.pop("choice"), front_end, chosen, values.pop("context"))
            verb(RunConfig.for_front_end(front_end, chosen), **values)

        if choice:
            kind = inspect.Parameter.KEYWORD_ONLY
            generated += [
                inspect.Parameter("choice", kind, default=None, annotation=ChoiceFile),
                inspect.Parameter("context", kind, annotation=typer.Context),  # knows which options were typed
            ]
        parameters = [*generated, *own]
        command.__doc__ = verb.__doc__
        command.__name__ = verb.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        assert first.name not in command.__annotations__
        return command

    return decorate


def _from_choice(
    path: Path | None, front_end: FrontEnd, given: dict[str, Any], context: typer.Context
) -> dict[str, Any]:
    """The settings of a choice, without those that stand on the command line; says which are used and which are not."""
    if path is None:
        return {}
    choice = read_choice(path)
    typed = [
        name
        for name in choice.settings
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    used = {name: value for name, value in choice.settings.items() if name not in typed}
    texts = [f"{name} {value}" for name, value in used.items()]
    texts += [f"not {name} {choice.settings[name]}, since {given[name]} was given" for name in typed]
    if (workload := choice.source.get("workload")) not in (None, given.get("workload")):
        texts.append(f"chosen for another workload, {workload}")
    if used:
        texts += compared(choice, RunConfig.for_front_end(front_end, given), origin=str(path), rate="lr" in used)
    err.print(f"{path}: {'; '.join(texts)}", soft_wrap=True)
    return used


def compared(choice: Choice, config: RunConfig, *, origin: str, rate: bool = True) -> list[str]:
    """What is to be said about a choice where these settings are trained; a ConfigError if it does not suit them.

    `rate`: whether its base rate is used, and not only its rule.
    """
    from ebbflow.optim.optimizers import name_of_text
    from ebbflow.run.assemble import resolve

    load_plugins(config.plugins)
    whole = resolve(config)
    assert whole.optimizer is not None  # resolve() filled it in
    return check_choice(
        choice,
        origin=origin,
        optimizer=whole.optimizer,
        named=name_of_text(whole.optimizer),
        ref_batch=whole.ref_batch if rate else None,
    )


def _option(name: str, field: FieldInfo, argument: str | None) -> inspect.Parameter:
    """A setting as a parameter that Typer turns into an option."""
    text = f"{field.description}" + (" Default: the recipe's." if name in recipe_settings() else "")
    kind = _kind(field.annotation)
    default = inspect.Parameter.empty if field.is_required() else field.default
    declared: Any
    if name == argument:
        declared, default = typer.Argument(help=text), inspect.Parameter.empty
    elif kind is bool:
        declared = typer.Option(f"--{name.replace('_', '-')}", help=text)
    elif typing.get_origin(kind) is list:
        declared, kind, default = (
            typer.Option(f"--{name.removesuffix('s')}", help=f"{text} Repeatable."),
            kind | None,
            None,
        )
    else:
        declared = typer.Option(help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _kind(annotation: Any) -> Any:
    """The type of an option for a setting of this type; RunConfig checks choices and suggests the nearest."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is Literal:
        return str
    if origin is tuple:
        return list[str]
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(option) for option in typing.get_args(annotation)]
        plain = [kind for kind in kinds if kind is not type(None)]
        one = float if float in plain else plain[0]
        return one | None if type(None) in kinds else one
    return annotation
