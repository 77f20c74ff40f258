"""`ebbflow status`: what a fleet is doing now."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, out, print_json
from ebbflow.core.files import read_text
from ebbflow.errors import ConfigError
from ebbflow.live.address import format_address, parse_address
from ebbflow.live.display import members_table
from ebbflow.live.lighthouse import DEFAULT_PORT
from ebbflow.live.status import combine, fetch_quorum, fetch_statuses, find_folder, read_statuses

__all__ = ["status"]


def status(
    fleet: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of the lighthouse; or the folder of a job.")],
    folder: Annotated[
        Path | None, typer.Option(help="Of the job, if it is here: saves asking each replica. Looked for below runs/.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the members of a fleet, its step, batch, rate and samples per second."""
    if Path(fleet).is_dir():
        folder = Path(fleet)
        address = _lighthouse_of(folder)
    else:
        address = format_address(*parse_address(fleet, default_port=DEFAULT_PORT))
    quorum = fetch_quorum(address)
    folder = folder or find_folder(address, Path("runs"))
    statuses = read_statuses(folder) if folder else fetch_statuses(quorum)
    found = combine(address, quorum, statuses)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(members_table(found))


def _lighthouse_of(folder: Path) -> str:
    path = folder / "fleet.json"
    try:
        address = jsonlib.loads(read_text(path, error=ConfigError))["lighthouse"]
    except (ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, ConfigError):
            raise ConfigError(f"{problem}; expected the folder of a job that ebbflow launch made") from None
        raise ConfigError(f"{path} is damaged; give the lighthouse as HOST:PORT instead") from None
    return str(address)
