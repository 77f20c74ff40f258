"""`ebbflow demo`: a small study that answers a real question in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, err
from ebbflow.cli.report_command import show_report_of
from ebbflow.cli.study_command import Jobs, run_with_progress
from ebbflow.studies.grid import load_study

__all__ = ["demo"]


def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("ebbflow-demo"),
    jobs: Jobs = None,
    json: AsJson = False,
) -> None:
    """Compare three rules on two spot traces and a static fleet, on handwritten digits: about two minutes."""
    study = load_study("demo")
    err.print(
        f"Which learning-rate rule suits a small network when its workers come and go?\n"
        f"{len(study.arms())} runs: {', '.join(study.rules)} on {', '.join(study.traces)}; "
        f"{len(study.seeds)} seeds each.",
    )
    ended = run_with_progress(study, out_folder, jobs=jobs)
    raise typer.Exit(show_report_of(out_folder, ended, as_json=json).code)
