"""`ebbflow status`: what a fleet is doing now."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.status_server import serve_page
from ebbflow.errors import ConfigError
from ebbflow.live.fleet_status import FleetStatus, combine, members_table
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
from ebbflow.report.fleet_page import FleetHistory, fleet_page, fleet_view

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
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page that refreshes while the job runs, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any that is free.")] = 8765,
    bind: Annotated[
        str, typer.Option(help="Address of the page. Everybody who reaches it can read the status; nobody is asked.")
    ] = "127.0.0.1",
    json: AsJson = False,
) -> None:
    """Show the replicas of a fleet, its step, batch, rate and samples per second.

    Where noise is measured, it also says what a further worker is worth. Exit code 2: no lighthouse answers, and the
    job is not finished; the key "problem" of --json says so, which is null otherwise.

    ebbflow status runs/train
    ebbflow status 10.0.0.7:29510 --json
    """
    if Path(fleet).is_dir():
        folder = Path(fleet)
        address = read_lighthouse_address(folder)
    elif "/" in fleet.removeprefix("http://").rstrip("/"):
        raise ConfigError(f"{fleet}: no such folder; expected the folder of a job, or HOST:PORT of its lighthouse")
    else:
        address = format_address(*parse_address(fleet, default_port=DEFAULT_PORT))
    folder = folder or find_folder(address, Path("runs"))
    if serve:
        history = FleetHistory(folder)

        def view() -> dict[str, Any]:
            history.read()
            found = _ask(address, folder, price=price)
            if found.problem and not found.members:
                raise ConfigError(found.problem)
            note = "the job is finished" if found.finished else found.problem or ""
            return fleet_view(found, history, price=price, note=note)

        def tell(url: str) -> None:
            err.print(f"the page is at {url}; Ctrl-C ends it, the job goes on", soft_wrap=True)

        name = folder.name if folder else address
        with contextlib.suppress(KeyboardInterrupt):
            serve_page(fleet_page(name), view, bind=bind, port=port, on_start=tell)
        return
    found = _ask(address, folder, price=price)
    if json:
        print_json(dataclasses.asdict(found))
    elif found.members or not found.problem:
        (err if found.problem else out).print(members_table(found))
    if found.problem:
        raise ConfigError(found.problem)


def _ask(address: str, folder: Path | None, *, price: float | None) -> FleetStatus:
    """What the lighthouse and the replicas say now.

    If no lighthouse answers, it is what the files of the job say, if there are some, with the problem. One replica that
    has trained to the end is enough for the job to be finished, which is no problem.
    """
    try:
        lighthouse = fetch_lighthouse_status(address)
    except ConfigError as problem:
        found = combine(address, None, read_statuses(folder) if folder is not None else {}, price=price)
        states = {member.state for member in found.members}
        if "finished" in states:
            return dataclasses.replace(found, finished=True)
        text = str(problem)
        if states == {"left"}:
            known = "since the job was stopped; the command that started it continues it"
            text = f"no lighthouse answers at {address}, {known}"
        return dataclasses.replace(found, problem=text)
    if folder is not None:
        return combine(address, lighthouse, read_statuses(folder), price=price)
    try:
        statuses = fetch_statuses(lighthouse, find_secret(None))
    except ConfigError as problem:
        err.print(f"only the lighthouse was asked, not the replicas: {problem}", soft_wrap=True)
        statuses = {}
    return combine(address, lighthouse, statuses, price=price)
