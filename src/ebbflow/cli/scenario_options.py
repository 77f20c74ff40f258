"""The options that simulate, compare and whatif share, generated from the fields of `ScenarioSettings`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbflow.cli.common import PluginFiles, command_line, err
from ebbflow.core.plugins import load_plugins
from ebbflow.errors import ConfigError
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.simulation import Simulation

__all__ = ["OutFolder", "numbers", "step_option", "takes_scenario", "write_page"]

OutFolder = Annotated[Path | None, typer.Option("--out", help="Write a page with figures into this folder.")]
_MOST_NUMBERS = 1_000_000


def takes_scenario(
    *, refused: Collection[str] = (), why: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a command of a verb whose first argument is a `ScenarioSettings`: one option per setting.

    Options that the verb declares itself, under the same name, replace the shared ones. Settings that are `refused`
    have no effect on the verb: its help leaves them out, and whoever gives one is told why.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(verb, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(verb).parameters.values())[1:]]
        names = {parameter.name for parameter in own}
        fields = [field for field in dataclasses.fields(ScenarioSettings) if field.name not in names]
        types = typing.get_type_hints(ScenarioSettings)
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=Annotated[
                    types[field.name], _option(field, types[field.name], hidden=field.name in refused)
                ],
            )
            for field in fields
        ]
        plugin = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PluginFiles)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared, plugin)]

        @functools.wraps(verb)
        def command(*, plugin: list[str] | None = None, **given: Any) -> None:
            for name in refused:
                if given[name] is not None:
                    raise ConfigError(f"{_long(name)} {why}; leave it out")
            load_plugins(plugin or [])
            verb(ScenarioSettings(**{field.name: given.pop(field.name) for field in fields}), **given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _option(field: dataclasses.Field[Any], kind: Any, *, hidden: bool) -> Any:
    names = [_long(field.name)] if kind is bool else []  # without these there would be --no-repeat
    shown = field.metadata
    return typer.Option(*names, help=shown["doc"], rich_help_panel=shown["group"], min=shown["minimum"], hidden=hidden)


def _long(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def step_option(name: str) -> Any:
    """The option of one setting of the step model, for a command that takes no whole scenario."""
    (field,) = (field for field in dataclasses.fields(ScenarioSettings) if field.name == name)
    return typer.Option(help=field.metadata["doc"], rich_help_panel="Simulated time")


def numbers(text: str, *, what: str) -> list[int]:
    """Whole numbers from a list and ranges, both ends included.

    >>> numbers("8,16:20:2", what="max_workers")
    [8, 16, 18, 20]
    """
    found: list[int] = []
    for part in text.split(","):
        try:
            edges = [int(edge) for edge in part.split(":")]
        except ValueError:
            edges = []
        if not 1 <= len(edges) <= 3 or min(edges) < 1 or (len(edges) > 1 and edges[1] < edges[0]):
            raise ConfigError(
                f"{what} {part.strip()!r} is not a number or a range; write '16,32,64', '8:64' or '8:64:8'"
            )
        begin, end, step = edges[0], edges[1] if len(edges) > 1 else edges[0], edges[2] if len(edges) > 2 else 1
        if (end - begin) // step > _MOST_NUMBERS:
            raise ConfigError(f"{what} {part.strip()!r} has more than {_MOST_NUMBERS:,} values; give a larger step")
        found += range(begin, end + 1, step)
    return list(dict.fromkeys(found))


def write_page(found: Mapping[str, Simulation], *, folder: Path | None, name: str) -> None:
    """Write the page of the simulations, if a folder is given."""
    if folder is not None:
        # Imported here, since only this needs matplotlib and jinja2, which take long to import.
        from ebbflow.report.simulation_page import write_simulations

        page = write_simulations(found, out=folder, name=name, command=command_line())
        err.print(f"page: {page}", soft_wrap=True)
