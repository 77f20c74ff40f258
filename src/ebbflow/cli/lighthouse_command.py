"""`ebbflow lighthouse`: the meeting point of a fleet, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.fleet_options import Heartbeat, MinReplicas, heartbeat_milliseconds, milliseconds, positive
from ebbflow.live.processes import LighthouseOptions, serve_lighthouse
from ebbflow.live.protocol import DEFAULT_PORT, HEARTBEAT_TIMEOUT_MS, LOOPBACK, parse_address, parse_bind
from ebbflow.live.torchft_api import require_torchft

__all__ = ["lighthouse"]


def lighthouse(
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS[:PORT]", help="Where to listen; port 0 stands for any free one.")
    ] = f"{LOOPBACK}:{DEFAULT_PORT}",
    min_replicas: MinReplicas = 1,
    heartbeat_timeout: Heartbeat = f"{HEARTBEAT_TIMEOUT_MS}ms",
    join_timeout: Annotated[
        str, typer.Option(help="How long the others wait for a replica that is alive and late.")
    ] = "10s",
    address_file: Annotated[Path | None, typer.Option(help="Write HOST:PORT here once it listens.")] = None,
) -> None:
    """Serve the meeting point of a fleet until it is stopped; replicas join it with ebbflow launch --join.

    Its port asks for no secret: whoever reaches it can delay the fleet, though not change what it trains. Bind it to an
    address of the fleet's own network.

    ebbflow lighthouse --bind 10.0.0.7:29510
    """
    require_torchft("ebbflow lighthouse")
    host, port = parse_address(bind, default_port=DEFAULT_PORT)
    options = LighthouseOptions(
        bind=parse_bind(host),
        port=port,
        min_replicas=positive(min_replicas, "min-replicas"),
        heartbeat_timeout_ms=heartbeat_milliseconds(heartbeat_timeout),
        join_timeout_ms=milliseconds(join_timeout),
    )
    serve_lighthouse(options, address_file=address_file)
