"""Commands on the pages: every option that they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ebbflow.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(r"ebbflow ([a-z]+)(?: ([a-z]+))?[^`\n#]*")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
APP: Any = get_command(app)


def options(verb: str, sub: str | None) -> set[str]:
    """The options of a verb; `launch` and `replay` pass those of a replica on."""
    command = APP.commands[verb]
    command = getattr(command, "commands", {}).get(sub, command)
    known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    return known | {"--help"} | (options("replica", None) if verb in ("launch", "replay") else set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_of_a_command_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for found in COMMAND.finditer(text):
        verb, sub = found[1], found[2]
        if verb in APP.commands:
            unknown = set(OPTION.findall(found[0])) - options(verb, sub)
            assert not unknown, f"{page.name}: {found[0].strip()}: {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("verb", APP.commands)
def test_every_option_of_an_example_in_a_help_exists(verb: str) -> None:
    for command in [APP.commands[verb], *getattr(APP.commands[verb], "commands", {}).values()]:
        for found in COMMAND.finditer((command.help or "").replace("\\\n", " ")):
            assert set(OPTION.findall(found[0])) <= options(found[1], found[2])
