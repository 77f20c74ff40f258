"""`ebbflow plan`: how many steps a training takes on a trace, how long it takes, and how large its batches are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ebbflow.cli.common import TRACE, AsJson, FormatName, PluginFiles, out, print_json
from ebbflow.core.plugins import load_plugins
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.errors import PlanError
from ebbflow.plan.batch_plan import BatchPlan, PlanSummary
from ebbflow.plan.fitted_plans import plan_for, plan_growing
from ebbflow.plan.policies import POLICIES, GrowingPolicy, make_policy
from ebbflow.plan.steptime import StepTime, make_step_time
from ebbflow.run.config import RunConfig
from ebbflow.traces import Trace
from ebbflow.traces.synthetic import load

__all__ = ["plan"]


def plan(
    *,
    trace: Annotated[str | None, TRACE] = None,
    samples: Annotated[int, typer.Option(help="Samples in an epoch.", min=1)],
    epochs: Annotated[int, typer.Option(help="Epochs to train.", min=1)],
    step_time: Annotated[str, typer.Option(help="How long a step takes, such as 0.6s.")],
    local_batch: Annotated[int | None, typer.Option(help="Samples that a worker takes per step.")] = None,
    policy: Annotated[str, typer.Option(help=f"How the batch follows the workers: {', '.join(POLICIES.names())}.")] = (
        "follow"
    ),
    ref_batch: Annotated[int | None, typer.Option(help="The batch that a growing policy begins with.")] = None,
    offset: Annotated[str, typer.Option(help="Time of the trace at which training begins, such as 30min.")] = "0s",
    repeat: Annotated[bool, typer.Option("--repeat", help="Repeat the trace until the epochs are completed.")] = False,
    on_change: Annotated[
        str, typer.Option(help="What happens to the current step when the workers change: finish or lose.")
    ] = "finish",
    across_epochs: Annotated[
        bool,
        typer.Option(
            "--across-epochs",
            help="Continue steps across the ends of epochs instead of ending each epoch with a smaller step.",
        ),
    ] = False,
    batch_plan: Annotated[Path | None, typer.Option("--plan", help=RunConfig.model_fields["plan"].description)] = None,
    format: FormatName = None,
    plugin: PluginFiles = None,
    json: AsJson = False,
) -> None:
    r"""Print how many steps a training takes on a trace, how long it takes, and how large its batches are.

    ebbflow plan spot.csv --local-batch 128 --step-time 0.6s \
        --samples 1281167 --epochs 90 --repeat
    """
    load_plugins(plugin or [])
    model = make_step_time(step_time)
    if batch_plan is not None:
        if trace is not None:
            raise PlanError(f"give a trace ({trace}) or a batch plan (--plan {batch_plan}), one of the two")
        if local_batch is None:
            raise PlanError(
                "a batch plan needs --local-batch, since a batch is computed by batch / local batch workers"
            )
        of_a_trace = {
            "--policy": policy != "follow",
            "--ref-batch": ref_batch is not None,
            "--offset": parse_seconds(offset) > 0,
            "--repeat": repeat,
            "--on-change": on_change != "finish",
            "--format": format is not None,
        }
        if given := [option for option, value in of_a_trace.items() if value]:
            raise PlanError(f"{given[0]} is for a trace, but the steps are those of the file {batch_plan}, whatever it "
                            f"says; leave it out, or give a trace instead of the file")  # fmt: skip
        made = BatchPlan.read(batch_plan, local_batch, model)
    elif trace is None:
        raise PlanError("nothing to plan for; give a trace, or a batch plan with --plan FILE")
    else:
        loaded, chosen, begin = load(trace, format=format), make_policy(policy, local_batch), parse_seconds(offset)
        if isinstance(chosen, GrowingPolicy):
            made = _growing(loaded, chosen, model, ref_batch, samples=samples, epochs=epochs, offset=begin,
                            repeat=repeat, on_change=on_change)  # fmt: skip
        elif repeat:
            made = plan_for(
                loaded, chosen, model, samples=samples, epochs=epochs, offset=begin, repeat=True, on_change=on_change
            )
        else:
            made = BatchPlan.from_trace(loaded, chosen, model, offset=begin, on_change=on_change)
    found = made.for_epochs(samples, epochs, cut=not across_epochs)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(trace or str(batch_plan), style="bold", soft_wrap=True)
        out.print(_table(found))
        if str(made.source.get("policy", "")).startswith("drop("):
            out.print("samples and batches: what steps cover, with the samples that are dropped", style="dim")


def _growing(trace: Trace, policy: GrowingPolicy, model: StepTime, ref_batch: int | None, **options: Any) -> BatchPlan:
    """The steps of a growing policy, if they are known before training."""
    if not policy.passive:
        raise PlanError(
            f"the policy {policy} depends on losses or gradients, so its steps are not known before training; a plan "
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
    table.add_row("smallest batch", f"{found.batch_min:,} samples")
    table.add_row("mean batch", f"{found.batch_mean:,.0f} samples")
    table.add_row("largest batch", f"{found.batch_max:,} samples")
    table.add_row("changes", f"{found.changes:,}")
    return table
