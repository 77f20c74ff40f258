"""`ebbflow train`: one run."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ebbflow.cli.common import AsJson, command_line, err, interruptible, out, print_json
from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.signals import StopSignal
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.record import Run, StepRow, ValidationRow
from ebbflow.run.config import RunConfig

__all__ = ["train"]


def train(
    workload: Annotated[str, typer.Argument(help="What to train; ebbflow workloads lists them.")],
    rule: Annotated[str, typer.Option(help="The rule; ebbflow rules lists them.")] = "linear",
    trace: Annotated[str, typer.Option(help="A trace file, or a generator such as 'gcp-a100-like(seed=1)'.")] = (
        "constant(workers=8)"
    ),
    plan: Annotated[str | None, typer.Option(help="A step,batchsize file instead of a trace.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default: the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Base rate at the reference batch; default: the recipe's.")] = None,
    ref_batch: Annotated[
        int | None, typer.Option(help="The batch that the rate was tuned at; default: the recipe's.")
    ] = None,
    local_batch: Annotated[
        int | None, typer.Option(help="Samples a worker takes in a step; default: the recipe's.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="Such as 'sgd(momentum=0.9)'; default: the recipe's.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Such as 'multistep(30ep, 60ep)'; default: the recipe's.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="How the batch follows: follow, fixed(N), capped(max_batch=N); or grows: 'geo(60ep, 5)'."),
    ] = "follow",
    step_time: Annotated[str, typer.Option(help="Such as 0.6s; fit: the run spans the whole trace.")] = "fit",
    offset: Annotated[str, typer.Option(help="Begin at this time of the trace, such as 30min.")] = "0s",
    on_change: Annotated[str, typer.Option(help="A step that a change cuts: finish or lose.")] = "finish",
    repeat: Annotated[bool, typer.Option("--repeat", help="Play the trace again when it ends too early.")] = False,
    micro_batch: Annotated[
        int | None, typer.Option(help="At most so many samples of a worker together; default: all.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Workers one after another (loop), many at a time (fused), or auto.")
    ] = "auto",
    chunk: Annotated[
        int | None, typer.Option(help="Samples a backward pass of the fused engine; default: the fastest.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    batch_norm: Annotated[str, typer.Option(help="Over a worker (local), the step (sync), or frozen.")] = "local",
    compile: Annotated[bool | None, typer.Option(help="Compile the model. Default: on a GPU, for long runs.")] = None,
    memory_steps: Annotated[
        float, typer.Option(help="Reference steps that noise and signal are averaged over.")
    ] = 1000.0,
    measure_every: Annotated[
        int, typer.Option(help="Steps between two measurements of noise and signal, at most; 1: every step.")
    ] = 4,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a step's mean gradient; default: any.")] = None,
    on_nonfinite: Annotated[str, typer.Option(help="A step with a NaN or infinite gradient: stop or skip.")] = "stop",
    ema: Annotated[
        float | None, typer.Option(help="Average the weights; the part kept in a reference step, such as 0.999.")
    ] = None,
    bn_follows_batch: Annotated[
        bool, typer.Option("--bn-follows-batch", help="Batch-norm statistics follow the batch.")
    ] = False,
    validate_every: Annotated[int, typer.Option(help="Epochs between validations.")] = 1,
    data: Annotated[str | None, typer.Option(help="The data set, for workloads that need one.")] = None,
    loader_workers: Annotated[
        int | None, typer.Option(help="Processes that read data ahead that is not in memory. Default: idle cores.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    plugin: Annotated[
        list[str] | None, typer.Option(help="A Python file with your own rules or workloads; repeatable.")
    ] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run; default: below runs/.")] = None,
    checkpoint_every: Annotated[str, typer.Option(help="Time between checkpoints.")] = "60s",
    json: AsJson = False,
) -> None:
    """Train one workload on one trace by one rule. The same command continues a run that was interrupted."""
    config = RunConfig(
        workload=workload, rule=rule, trace=trace, plan=plan, seed=seed, epochs=epochs, lr=lr, ref_batch=ref_batch,
        local_batch=local_batch, optimizer=optimizer, schedule=schedule, policy=policy, step_time=step_time,
        offset=offset, on_change=on_change, repeat=repeat, micro_batch=micro_batch, engine=engine, chunk=chunk,
        precision=precision, batch_norm=batch_norm, compile=compile, memory_steps=memory_steps,
        measure_every=measure_every, clip=clip, on_nonfinite=on_nonfinite, ema=ema,
        bn_follows_batch=bn_follows_batch, validate_every=validate_every, data=data,
        loader_workers=loader_workers, device=device, threads=threads,
        plugins=tuple(plugin or ()),
    )  # fmt: skip
    every = parse_seconds(checkpoint_every)
    from ebbflow.run import torchrun, training

    here = torchrun.place(os.environ)
    speaks = here is None or here.rank == 0
    folder = out_folder or Path("runs") / _slug(f"{workload}_{plan or trace}_{rule}_s{seed}")
    with (
        interruptible(tell=speaks),
        StopSignal() as stop,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not speaks,
        ) as bar,
    ):
        task = bar.add_task("preparing", total=None)
        shown: dict[str, str] = {}

        def describe() -> None:
            bar.update(task, description="  ".join(f"{key} {value}" for key, value in shown.items()))

        def on_start(done: int, total: int) -> None:
            bar.update(task, total=total, completed=done)

        def on_step(row: StepRow) -> None:
            shown["workers"] = f"{row.workers:3d}"
            shown["loss"] = f"{row.loss:.3f}" if row.loss is not None else "nan"
            describe()
            bar.update(task, completed=row.samples)

        def on_validation(row: ValidationRow) -> None:
            for name, value in row.metrics.items():
                if name != "loss":
                    shown[name] = f"{value:.4f}" if value is not None else "nan"
            describe()

        callbacks = training.Callbacks(
            on_start=on_start, on_step=on_step, on_validation=on_validation, should_stop=lambda: stop.requested
        )
        keep_freed_memory()
        run = training.train(config, folder, command=command_line(), callbacks=callbacks, checkpoint_every_s=every)
    if not speaks:
        return
    answer = _answer(run, folder)
    if json:
        print_json(answer)
        return
    out.print(f"[bold]{run.status}[/] after {answer['steps']} steps, {answer['samples']:,} samples, "
              f"{format_seconds(answer['wall_s'])} of computing")  # fmt: skip
    if run.end is not None and run.end.text:
        out.print(run.end.text, markup=False, soft_wrap=True)
    for name, value in answer["metrics"].items():
        out.print(f"  {name:10s} {value:.4f}" if value is not None else f"  {name:10s} not a number")
    # On one line each, whatever the terminal's width, and quoted: the command is there to be copied.
    out.print(f"record: {run.path}", markup=False, soft_wrap=True)
    out.print(f"report: [bold]{escape(shlex.join(['ebbflow', 'report', str(folder)]))}[/]", soft_wrap=True)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-")


def _answer(run: Run, folder: Path) -> dict[str, Any]:
    assert run.end is not None  # train() returns runs that came to an end
    return {
        "status": run.status,
        "steps": run.end.steps,
        "samples": run.end.samples,
        "wall_s": run.end.wall_s,
        "metrics": dict(run.validations[-1].metrics) if run.validations else {},
        "weights_sha256": run.end.weights_sha256,
        "folder": str(folder),
    }
