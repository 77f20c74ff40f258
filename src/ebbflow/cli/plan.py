"""`ebbflow plan`: how many steps a training takes on a trace, and how long."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ebbflow.cli.common import AsJson, out, print_json
from ebbflow.cli.trace import FormatName, TraceText
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.errors import PlanError
from ebbflow.plan.fitting import plan_for
from ebbflow.plan.growing import Growing
from ebbflow.plan.growth import plan_growing
from ebbflow.plan.plan import BatchPlan, PlanSummary
from ebbflow.plan.policies import POLICIES, make_policy
from ebbflow.plan.steptime import StepTime, make_step_time
from ebbflow.traces import Trace
from ebbflow.traces.synthetic import load

__all__ = ["plan"]


def plan(
    file: TraceText,
    samples: Annotated[int, typer.Option(help="Samples of an epoch.", min=1)],
    epochs: Annotated[int, typer.Option(help="Epochs to train.", min=1)],
    step_time: Annotated[str, typer.Option(help="How long a step takes, such as 0.6s.")],
    local_batch: Annotated[int | None, typer.Option(help="Samples a worker takes in a step.")] = None,
    policy: Annotated[str, typer.Option(help=f"How the batch follows the workers: {', '.join(POLICIES.names())}.")] = (
        "follow"
    ),
    ref_batch: Annotated[int | None, typer.Option(help="The batch that a growing policy begins with.")] = None,
    offset: Annotated[str, typer.Option(help="Begin at this time of the trace, such as 30min.")] = "0s",
    repeat: Annotated[bool, typer.Option("--repeat", help="Repeat the trace until the epochs are done.")] = False,
    on_change: Annotated[
        str, typer.Option(help="What happens to the step under way when the workers change: finish or lose.")
    ] = "finish",
    across_epochs: Annotated[
        bool, typer.Option("--across-epochs", help="Let steps run across epoch ends instead of cutting them there.")
    ] = False,
    batches: Annotated[
        bool, typer.Option("--batches", help="FILE is a batch plan (step,batchsize), not a trace.")
    ] = False,
    format: FormatName = None,
    json: AsJson = False,
) -> None:
    """Say how many steps a training takes on a trace, how long, and how large its batches are."""
    model = make_step_time(step_time)
    if batches:
        if local_batch is None:
            raise PlanError(
                "a batch plan needs --local-batch: a batch is shared by as many workers as it holds of them"
            )
        made = BatchPlan.read(Path(file), local_batch, model)
    else:
        trace, chosen, begin = load(file, format=format), make_policy(policy, local_batch), parse_seconds(offset)
        if isinstance(chosen, Growing):
            made = _growing(trace, chosen, model, ref_batch, samples=samples, epochs=epochs, offset=begin,
                            repeat=repeat, on_change=on_change)  # fmt: skip
        elif repeat:
            made = plan_for(
                trace, chosen, model, samples=samples, epochs=epochs, offset=begin, repeat=True, on_change=on_change
            )
        else:
            made = BatchPlan.from_trace(trace, chosen, model, offset=begin, on_change=on_change)
    found = made.for_epochs(samples, epochs, cut=not across_epochs)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(file, style="bold", markup=False, soft_wrap=True)
        out.print(_table(found))


def _growing(trace: Trace, policy: Growing, model: StepTime, ref_batch: int | None, **options: Any) -> BatchPlan:
    """The steps of a policy that can be told beforehand."""
    if not policy.passive:
        raise PlanError(
            f"the policy {policy} depends on what training shows, so its steps cannot be counted beforehand; a plan "
            f"with fixed({policy.initial or ref_batch or 128}) counts those of a batch that never grows"
        )
    if policy.initial is None and ref_batch is None:
        raise PlanError(f"the policy {policy} begins with the reference batch; give it with --ref-batch, or initial=")
    return plan_growing(trace, policy, model, ref_batch=ref_batch or policy.initial or 1, **options).foreseen


def _table(found: PlanSummary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("steps", f"{found.steps:,}")
    table.add_row("time", format_seconds(found.time_s))
    table.add_row("samples", f"{found.samples:,}")
    table.add_row("least batch", f"{found.batch_min:,} samples")
    table.add_row("mean batch", f"{found.batch_mean:,.0f} samples")
    table.add_row("greatest batch", f"{found.batch_max:,} samples")
    table.add_row("changes", f"{found.changes:,}")
    return table
