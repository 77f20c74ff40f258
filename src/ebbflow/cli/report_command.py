"""`ebbflow report`: the table, the page and the figures of a study or a run, from its records."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, PluginFiles, err, out, print_json
from ebbflow.cli.scenario_options import step_option
from ebbflow.core.endings import Ending
from ebbflow.core.plugins import load_plugins
from ebbflow.errors import ConfigError, InputError, OutputError
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.step_models import NETWORKS

__all__ = ["report", "show_report", "show_report_of"]

_HIGHEST_PRICE = 1e9


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study or a run, or one record file.")],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the report. Default: 'report' beside the records.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A score to reach, such as 0.95 for 95 % accuracy, or 0.99x for 99 % of the score at the reference "
            "batch: shows epochs, updates and times to it. Repeat it for several. Default: the targets that were "
            "published, if the study has some, and is neither scaled nor on a stand-in."
        ),
    ] = None,
    spot_price: Annotated[
        float | None, typer.Option(help="USD per hour of one worker: shows the cost in USD, too.", min=0)
    ] = None,
    step_time: Annotated[str | None, step_option("step_time")] = None,
    profile: Annotated[Path | None, step_option("profile")] = None,
    compute_step: Annotated[str | None, step_option("compute_step")] = None,
    compute_sample: Annotated[str | None, step_option("compute_sample")] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(NETWORKS.names())}, with a name in front: fast=ring(megabytes=11, gbps=800). Repeat "
            f"it to compare several.",
            rich_help_panel="Simulated time",
        ),
    ] = None,
    overlap: Annotated[float, step_option("overlap")] = 0.0,
    micro_batch: Annotated[int | None, step_option("micro_batch")] = None,
    plugin: PluginFiles = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: AsJson = False,
) -> None:
    """Make the report of a study or a run: the table, one self-contained HTML page, figures as SVG and PNG.

    It reads records only, so it can be made while a study is running, after a crash, and again at any time. With a step
    model (--step-time, --profile or --compute-sample, and --network) it also shows how long the steps of the records
    would have taken with it.

    ebbflow report runs/study --target 0.95
    """
    load_plugins(plugin or [])
    settings = ScenarioSettings(
        samples=1, epochs=1, step_time=step_time, profile=profile, compute_step=compute_step,
        compute_sample=compute_sample, overlap=overlap, micro_batch=micro_batch,
    )  # fmt: skip
    asked = any((step_time, profile, compute_step, compute_sample, network, overlap, micro_batch))
    page = show_report(
        folder, out_folder=out_folder, as_json=json, targets=target or (), usd_per_hour=spot_price,
        step_model=(settings, network or ()) if asked else None,
    )  # fmt: skip
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def show_report_of(folder: Path, ended: Ending, *, as_json: bool) -> Ending:
    """Show the report of a study that has `ended`; return how the command ends.

    That is how the study ended, also if the report cannot be made; only where all else went well, the command failed.
    """
    try:
        show_report(folder, as_json=as_json)
    except (InputError, OutputError) as error:
        err.print(f"error: the report could not be made: {error}", soft_wrap=True, markup=False)
        return Ending.FAILED if ended is Ending.FINISHED else ended
    return ended


def show_report(
    folder: Path, *, out_folder: Path | None = None, as_json: bool = False, targets: Sequence[str] = (),
    usd_per_hour: float | None = None, step_model: tuple[ScenarioSettings, Sequence[str]] | None = None,
) -> Path:  # fmt: skip
    """Write the report and print its table and conclusions, or the cells as JSON; returns the path of the page.

    `step_model`: what `make_clocks` takes, for simulated times.
    """
    # Imported here, since only this needs matplotlib and jinja2, which take long to import.
    from ebbflow.report.clocks import make_clocks
    from ebbflow.report.conclusions import takeaways
    from ebbflow.report.export import terminal
    from ebbflow.report.report_page import write_report

    if usd_per_hour is not None and not usd_per_hour <= _HIGHEST_PRICE:
        raise ConfigError(f"the price is {usd_per_hour:g} USD per hour; expected a number from 0 to {_HIGHEST_PRICE:g}")
    clocks = make_clocks(*step_model) if step_model else ()
    paths = write_report(folder, out=out_folder, targets=targets, clocks=clocks, usd_per_hour=usd_per_hour)
    for problem in paths.results.problems:
        err.print(f"warning: {problem}", soft_wrap=True)
    if as_json:
        print_json(paths.summary.as_json())
        return paths.page
    out.print(terminal(paths.summary, width=out.width))
    for text in takeaways(paths.summary):
        out.print(text)
    for workload in paths.summary.workloads:
        for line in paths.results.left_out(workload):
            out.print(f"{workload}: left out of the data, or changed: {line}", soft_wrap=True)
    out.print(f"\nreport: {paths.page}", soft_wrap=True)
    return paths.page
