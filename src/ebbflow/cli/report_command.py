"""`ebbflow report`: the table, the page and the figures of a study or a run, from its records."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, err, out, print_json

__all__ = ["report", "show_report"]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study or a run, or one record file.")],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the report. Default: 'report' beside the records.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Also show the time, worker-hours and samples to this score, such as 0.95 for 95 % accuracy."
        ),
    ] = None,
    spot_price: Annotated[
        float | None, typer.Option(help="USD per hour of one worker: shows the cost in USD, too.", min=0)
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: AsJson = False,
) -> None:
    """Make the report of a study or a run: the table, one self-contained HTML page, figures as SVG and PNG.

    It reads records only, so it can be made while a study is running, after a
    crash, and again at any time.
    """
    page = show_report(folder, out_folder=out_folder, as_json=json, target=target, usd_per_hour=spot_price)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def show_report(
    folder: Path, *, out_folder: Path | None = None, as_json: bool = False, target: float | None = None,
    usd_per_hour: float | None = None,
) -> Path:  # fmt: skip
    """Write the report and print its table and conclusions, or the cells as JSON; returns the path of the page."""
    # Imported here, since only this needs matplotlib and jinja2, which take long to import.
    from ebbflow.report.conclusions import takeaways
    from ebbflow.report.export import terminal
    from ebbflow.report.report_page import write_report

    paths = write_report(folder, out=out_folder, target=target, usd_per_hour=usd_per_hour)
    for problem in paths.results.problems:
        err.print(f"warning: {problem}", markup=False, soft_wrap=True)
    if as_json:
        print_json(paths.summary.as_json())
        return paths.page
    out.print(terminal(paths.summary, width=out.width))
    for text in takeaways(paths.summary):
        out.print(text, markup=False)
    out.print(f"\nreport: {paths.page}", markup=False, soft_wrap=True)
    return paths.page
