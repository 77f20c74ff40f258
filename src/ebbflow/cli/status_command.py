"""`ebbflow status`: what a fleet is doing now."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.errors import ConfigError
from ebbflow.live.fleet_status import combine, members_table
from ebbflow.live.protocol import (
    DEFAULT_PORT,
    fetch_lighthouse_status,
    fetch_statuses,
    find_folder,
    find_secret,
    format_address,
    parse_address,
    read_lighthouse_address,
    read_statuses,
)

__all__ = ["status"]


def status(
    fleet: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the lighthouse; or the folder of a job.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the job, as in ebbflow launch. By default it is looked for below runs/, and if it is not "
            "there, each replica is asked.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="USD per hour of one worker: adds what progress costs now.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the replicas of a fleet, its step, batch, rate and samples per second, and, where noise is measured, what a
    further worker is worth."""
    if Path(fleet).is_dir():
        folder = Path(fleet)
        address = read_lighthouse_address(folder)
    else:
        address = format_address(*parse_address(fleet, default_port=DEFAULT_PORT))
    lighthouse = fetch_lighthouse_status(address)
    folder = folder or find_folder(address, Path("runs"))
    if folder is not None:
        statuses = read_statuses(folder)
    else:
        try:
            statuses = fetch_statuses(lighthouse, find_secret(None))
        except ConfigError as problem:
            err.print(f"only the lighthouse was asked, not the replicas: {problem}", markup=False, soft_wrap=True)
            statuses = {}
    found = combine(address, lighthouse, statuses, price=price)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(members_table(found))
