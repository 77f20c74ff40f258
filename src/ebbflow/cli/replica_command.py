"""`ebbflow replica`: the ready-made replica that `ebbflow launch --workload` starts."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from ebbflow.cli.common import err
from ebbflow.cli.fleet_options import Notices
from ebbflow.cli.options import takes_settings
from ebbflow.core.endings import Ending
from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.plugins import load_plugins
from ebbflow.core.preemption import NOTICES, watching
from ebbflow.core.units import parse_seconds
from ebbflow.errors import OutputError, StorageUnreachable
from ebbflow.live.protocol import EXIT_RESTART
from ebbflow.run.config import RunConfig

__all__ = ["replica"]


@takes_settings("replica", choice=True)
def replica(
    config: RunConfig,
    *,
    checkpoint_every: Annotated[str, typer.Option(help="Time between checkpoints.")] = "60s",
    notice: Notices = None,
) -> None:
    """Train a workload as a replica of the fleet that the environment describes; ebbflow launch --workload starts
    it."""
    every = parse_seconds(checkpoint_every)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    import torch

    from ebbflow.live.live_session import join_workload

    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # denormal numbers late in training slow a CPU down several times
    keep_freed_memory()
    load_plugins(config.plugins)
    notices = [NOTICES.make(text) for text in notice or ()]
    try:
        with join_workload(config, checkpoint_every_s=every) as fleet, watching(notices, fleet.leave):
            fleet.run()
    except (OutputError, StorageUnreachable) as error:
        # For other commands this is wrong input. The launcher of this one, which knows it by its name, tries again.
        err.print(f"{type(error).__name__}: {error}", soft_wrap=True)
        raise typer.Exit(EXIT_RESTART) from None
    raise typer.Exit((Ending.STOPPED if fleet.left else Ending.FINISHED).code)
