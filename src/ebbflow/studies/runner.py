"""Runs the arms of a study in parallel processes; after a kill the same command continues where it stopped.

Every arm has its own process, so an arm that crashes, runs out of memory or is killed does not affect the others. The
processes are forked from a server that has imported torch once, so starting one takes milliseconds. If the study itself
is killed, its arms notice that nobody receives their reports and stop; a lock on the folder of each arm keeps a
restarted study from running the same arm beside them. Data that takes long to read is decoded once for all arms
(`workloads/disk_cache.py`).
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.files import hold_lock, write_whole
from ebbflow.core.folders import check_folder
from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.plugins import raised_in_plugin
from ebbflow.core.signals import StopSignal
from ebbflow.core.wording import called
from ebbflow.errors import CodeChanged, ConfigError, DataError, EbbflowError, OutputError, RecordError
from ebbflow.record import End, Header, RecordWriter, Run, StepRow, read_record
from ebbflow.run.config import recipe_settings
from ebbflow.studies.forecast import ArmPace, StudyForecast
from ebbflow.studies.grid import Arm, Study, check_arms

__all__ = ["ArmProgress", "default_jobs", "record_failure", "run_arm", "run_study"]

_LOG = logging.getLogger(__name__)

VERSION = 1
"""Version of study.json."""
JOBS_ON_A_GPU = 3
"""Without MPS three arms share the time of a GPU and gain none (H200, ResNet-18: one alone 76,160 images/s, three
together 75,978), but one of them is always starting, reading, compiling or validating."""
_DISK_CACHE = ".kept"
"""The folder with data that the arms of a study share while it runs."""
_REPORT_EVERY_S = 0.2
_END_WITHIN_S = 10.0
"""How long arms that are interrupted may take for their checkpoints, all together."""
_ASK_EVERY_S = 1.0
"""How often `should_stop` is asked while no arm reports anything."""


@dataclass(frozen=True, kw_only=True)
class ArmProgress:
    """What happened to an arm, for showing it to the user."""

    arm: str
    what: Literal["found", "started", "moved", "finished", "diverged", "failed"]
    fraction: float = 0.0
    text: str = ""
    other_data: str = ""
    """For an arm that was found: where its data was, if its data is somewhere else now."""
    left_s: float | None = None
    """How long the whole study will still take, if that can be estimated (`forecast.py`)."""


# -- the study ---------------------------------------------------------------------------------------------------------


def default_jobs(arms: Sequence[Arm], *, cores: int) -> int:
    """How many arms to run at once: as many as fill a GPU, or the cores of the machine."""
    if any(arm.config.device.startswith("cuda") for arm in arms):
        fitting = JOBS_ON_A_GPU
    else:
        fitting = cores // max((arm.config.threads for arm in arms), default=1)
    return max(1, min(fitting, len(arms)))


def run_study(
    study: Study,
    out: Path | str,
    *,
    jobs: int | None = None,
    command: str = "",
    checkpoint_every_s: float = 30.0,
    keep_weights: bool = False,
    only: Collection[str] | None = None,
    within_s: float = math.inf,
    on_progress: Callable[[ArmProgress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    train: Callable[..., Run] | None = None,
) -> None:
    """Run every arm that has not finished yet, by default as many at once as fill the device.

    The results are the records under `out`/arms. Seeds are run one after another, so that an interrupted study has
    complete tables of fewer seeds; among the arms of one seed those that take longest are started first. Arms that
    failed in an earlier call are tried again. An arm that fails does not stop the others; its record says why. The
    folder may hold a part of the study: seeds, rules, traces and workloads can be added. Arms whose plugins or recipe
    have changed since are run again, and their earlier records are kept apart, below `out`/earlier. Raises ConfigError
    if it holds runs that the study does not have.

    `only`: the ids of the arms to run in this call; the others stay as they are. `within_s`: how long this call may
    take. An arm that would not end by then, at the speed of those before it, is not started, and those that run when
    the time is over write checkpoints and end.

    `should_stop` is asked at least once a second: if it says so, the arms that run write checkpoints and end, and no
    others are started. `train`: what trains an arm instead of `ebbflow.train`, with the same arguments; it is sent to
    other processes.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; expected the number of arms to run at once, 1 or more")
    from ebbflow.run import torchrun  # imports torch, which describing a study does not need

    if torchrun.rank_info(os.environ) is not None:
        raise ConfigError("a study starts the processes of its arms itself; run it without torchrun")
    until = time.monotonic() + within_s
    out, arms = Path(out), study.arms()
    check_folder(out, "study")
    check_arms(arms)
    arms = [arm for arm in arms if only is None or arm.id in only]
    jobs = jobs or default_jobs(arms, cores=available_cores())
    _check_data(arms, out)
    with _study_folder(study, out, command):
        waiting = []
        aside: defaultdict[str, list[Path]] = defaultdict(list)
        for arm in arms:
            status, recorded = _earlier_result(out / "arms" / arm.id)
            if "task" in recorded and (changes := _code_changes(arm, recorded)):
                aside[changes].append(_set_aside(out, arm))
                status = "missing"
            if status in ("finished", "diverged"):
                other = arm.config.other_data(recorded)
                on_progress(ArmProgress(arm=arm.id, what="found", fraction=1.0, text=status, other_data=other))
            else:
                waiting.append(arm)
        for changes, places in aside.items():
            _LOG.warning("%s", _kept_apart(changes, places))
        options = {"command": command, "checkpoint_every_s": checkpoint_every_s, "keep_weights": keep_weights}
        _run_arms(waiting, out, jobs, options, on_progress, should_stop, until, train)
        shutil.rmtree(out / _DISK_CACHE, ignore_errors=True)


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_data(arms: Sequence[Arm], out: Path) -> None:
    """Refuse to begin if there are data for none of the arms; where there are for some, these run, and others fail.

    Arms that have ended need no data any more.
    """
    from ebbflow.workloads import WORKLOADS  # imports torch, which describing a study does not need

    asked = {(arm.config.workload, arm.config.data) for arm in arms}
    problems = {(name, data): WORKLOADS.make(name).missing_data(data) for name, data in asked}
    if not any(problems.values()):
        return
    waiting = [arm for arm in arms if _earlier_result(out / "arms" / arm.id)[0] not in ("finished", "diverged")]
    texts = dict.fromkeys(problems[arm.config.workload, arm.config.data] for arm in waiting)
    if waiting and all(texts):
        count = "the arm" if len(waiting) == 1 else f"all {len(waiting)} arms"
        raise DataError(f"{'; '.join(texts)}. Nothing was started, since {count} would fail")


def _earlier_result(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """How an arm ended in an earlier call, and the settings in its record."""
    try:
        run = read_record(folder / "record.jsonl")
    except RecordError:
        return "missing", {}
    return run.status, run.header.config


def _code_changes(arm: Arm, recorded: Mapping[str, Any]) -> str:
    """What has changed in the code of an arm since it was recorded: its plugins, the recipe of its workload."""
    from ebbflow.run.assemble import resolve  # imports torch, which describing a study does not need

    by_recipe = [name for name in recipe_settings() if getattr(arm.config, name) is None]
    return "; ".join(resolve(arm.config).code_differences(recorded, by_recipe=by_recipe))


def _set_aside(out: Path, arm: Arm) -> Path:
    """Move what an arm has written to `out`/earlier/1 (2, ... for later ones), which `ebbflow report` can read."""
    folder = out / "arms" / arm.id
    number = next(n for n in count(1) if not (out / "earlier" / str(n) / "arms" / arm.id).exists())
    place = out / "earlier" / str(number)
    (place / "arms" / arm.id).mkdir(parents=True)
    with hold_lock(folder / ".run.lock"):  # an arm of a killed study writes until its next report
        for path in folder.iterdir():
            if not path.name.endswith(".lock"):
                path.rename(place / "arms" / arm.id / path.name)
    return place


def _kept_apart(changes: str, places: Sequence[Path]) -> str:
    """What is said about earlier runs of other code.

    >>> _kept_apart("plugin mine.py has changed", [Path("runs/mine/earlier/1")] * 3)
    'plugin mine.py has changed: its 3 earlier runs are kept apart in runs/mine/earlier/1, and new ones are made'
    """
    where = ", ".join(str(place) for place in dict.fromkeys(places))
    runs = "its earlier run is" if len(places) == 1 else f"its {len(places)} earlier runs are"
    return f"{changes}: {runs} kept apart in {where}, and new ones are made"


@contextmanager
def _study_folder(study: Study, out: Path, command: str) -> Iterator[None]:
    """Create the folder, or check that it holds this study or a part of it; hold it while the study runs."""
    try:
        (out / "arms").mkdir(parents=True, exist_ok=True)
        with hold_lock(out / ".lock", busy=f"another study is running in {out}; wait for it or choose another folder"):
            _check_and_write(study, out, command)
            yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}; choose another output folder") from error


def _check_and_write(study: Study, out: Path, command: str) -> None:
    """Refuse a folder with runs that the study does not have, which would enter its tables; write study.json."""
    path = out / "study.json"
    own = {arm.id for arm in study.arms()}
    unknown = sorted(folder.name for folder in (out / "arms").iterdir() if folder.is_dir() and folder.name not in own)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ConfigError(
            f"{out} holds runs that are not in this study: {', '.join(unknown[:3])}{more}{_differences(study, path)}; "
            f"a study may grow, but runs that exist must stay in it: choose another folder with "
            f"{called('out')}, or delete those under {out / 'arms'}"
        )
    content = {"version": VERSION, "command": command, "config": study.as_dict()}
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def _differences(study: Study, path: Path) -> str:
    """The keys in which the study differs from the one that was run in the folder, if that can still be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["config"]
        wanted = study.as_dict()
        other = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        parts = [f"{key} (now {wanted.get(key)!r}, was {found.get(key)!r})" for key in other]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"; different are {', '.join(parts)}" if parts else "; a trace or plan was edited since"


def _run_arms(
    waiting: list[Arm],
    out: Path,
    jobs: int,
    options: Mapping[str, Any],
    on_progress: Callable[[ArmProgress], None],
    should_stop: Callable[[], bool],
    until: float,
    train: Callable[..., Run] | None,
) -> None:
    """`until`: on the monotonic clock."""
    context = multiprocessing.get_context("forkserver")
    _start_server(context)
    running: dict[Connection, tuple[Arm, BaseProcess]] = {}
    queue = {arm.id: arm for arm in waiting}
    forecast = StudyForecast(waiting={arm.id: _pace(arm) for arm in waiting})

    def report(progress: ArmProgress) -> None:
        on_progress(replace(progress, left_s=forecast.remaining_s(jobs)))

    try:
        while time.monotonic() < until and not should_stop():
            while len(running) < jobs and not (running and should_stop()):
                name = _next_arm(queue, forecast, until - time.monotonic())
                if name is None:
                    break
                arm = queue.pop(name)
                forecast.start(arm.id)
                ours, theirs = context.Pipe(duplex=False)
                config = arm.config.with_loader_workers(cores=available_cores(), processes=jobs)
                arguments = (replace(arm, config=config), out, dict(options), theirs, train)
                child = context.Process(target=run_arm, args=arguments)
                child.start()
                theirs.close()
                running[ours] = (arm, child)
                report(ArmProgress(arm=arm.id, what="started"))
            if not running:
                break
            for ready in wait(list(running), timeout=min(_ASK_EVERY_S, max(0.0, until - time.monotonic()))):
                assert isinstance(ready, Connection)
                arm, process = running[ready]
                try:
                    what, value = ready.recv()
                except EOFError:  # the process ended without a report: killed, or out of memory
                    process.join()
                    what, value = "failed", _why_ended(process.exitcode)
                    record_failure(arm, out / "arms" / arm.id, value)
                if what == "moved":
                    forecast.move(arm.id, value, time.monotonic())
                    report(ArmProgress(arm=arm.id, what="moved", fraction=value))
                    continue
                forecast.end(arm.id)
                report(ArmProgress(arm=arm.id, what=what, fraction=1.0, text=value))
                ready.close()
                process.join()
                del running[ready]
    finally:
        for _, process in running.values():
            process.terminate()  # interrupted or stopped: each arm writes a checkpoint and exits
        ended_by = time.monotonic() + _END_WITHIN_S
        too_slow = 0
        for _, process in running.values():
            process.join(timeout=max(0.0, ended_by - time.monotonic()))
            too_slow += process.is_alive()
            process.kill()
        if too_slow:
            _LOG.warning(
                "%d of %d arms did not come to the end of a step within %g s and were killed; they go on from their "
                "latest checkpoints, if they have written any",
                too_slow, len(running), _END_WITHIN_S,
            )  # fmt: skip


def _start_server(context: ForkServerContext) -> None:
    """Start the process that the arms are forked from, with SIGINT ignored from the beginning.

    It ignores SIGINT by itself, but only after its imports; until then Ctrl-C would give a traceback.
    """
    # torch imports torch._dynamo, which takes longer than the rest, when the first optimizer is made.
    context.set_forkserver_preload(["ebbflow.run.training", "torch._dynamo"])
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new process inherits that a signal is ignored
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _next_arm(queue: Mapping[str, Arm], forecast: StudyForecast, left_s: float) -> str | None:
    """The arm to start next: of those that may end in time and have the first seed, the one that takes longest."""
    fitting = [arm for name, arm in queue.items() if forecast.fits(name, left_s)]
    if not fitting:
        return None
    return forecast.longest([arm.id for arm in fitting if arm.config.seed == fitting[0].config.seed])


def _pace(arm: Arm) -> ArmPace:
    from ebbflow import workloads  # imports torch, which describing a study does not need

    config = arm.config
    epochs = config.epochs or workloads.recipe(config.workload).epochs
    return ArmPace(epochs=epochs, kind=(config.workload, config.label))


# -- one arm -----------------------------------------------------------------------------------------------------------


def run_arm(
    arm: Arm, out: Path, options: dict[str, Any], report: Connection, train: Callable[..., Run] | None = None
) -> None:
    """The main function of an arm's process; how the arm ends is sent through `report` and written into its record.

    If nobody receives the reports any more, the study has ended, and the process exits without an entry in the record:
    whoever continues the study starts from the checkpoint. (The parent process is no sign of that: it is the server
    that forked this process, and it outlives the study.)
    """
    folder = out / "arms" / arm.id
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which then terminates its arms
    keep_freed_memory()
    from ebbflow.run import training
    from ebbflow.run.loop import Callbacks
    from ebbflow.workloads.disk_cache import disk_cached_in

    train = train or training.train
    reported = 0.0
    total = 1

    def send(what: str, value: str | float) -> None:
        try:
            report.send((what, value))
        except OSError:
            os._exit(1)

    def on_start(done: int, all_samples: int) -> None:
        nonlocal total
        total = all_samples

    def on_step(row: StepRow) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > _REPORT_EVERY_S:
            reported = now
            send("moved", min(1.0, row.samples / total))  # a run whose length follows the gain may take more samples

    def train_arm() -> tuple[str, str]:
        try:
            with disk_cached_in(out / _DISK_CACHE), StopSignal(signal.SIGTERM) as stop:
                callbacks = Callbacks(on_start=on_start, on_step=on_step, should_stop=lambda: stop.requested)
                try:
                    run = train(arm.config, folder, callbacks=callbacks, **options)
                except CodeChanged:  # the number of parameters, which is known once the model is built
                    _set_aside(out, arm)
                    run = train(arm.config, folder, callbacks=callbacks, **options)
            return run.status, run.end.text if run.end else ""
        except Exception as error:  # whatever a user's model raises: the study goes on with the other arms
            named = raised_in_plugin(error) or f"{type(error).__name__}: {error}"
            text = str(error) if isinstance(error, EbbflowError) else named
            record_failure(arm, folder, text)  # while the folder is held, since another study may wait for it
            return "failed", text

    try:
        with hold_lock(folder / ".lock"):  # an arm of a killed study releases the folder at its next report
            what, text = train_arm()
    except KeyboardInterrupt:
        what, text = "failed", "interrupted"
    except OSError as error:  # the folder itself
        what, text = "failed", f"{type(error).__name__}: {error}"
    send(what, text)


def record_failure(arm: Arm, folder: Path, text: str) -> None:
    """Write into the record why an arm failed; an arm that failed before it had a record gets one that says only that.

    All rows are kept, except for a last line that was cut off when the process was killed.
    """
    path = folder / "record.jsonl"
    try:
        if not path.exists() or not path.stat().st_size:
            config = arm.config.as_dict() | {"trace": arm.config.label, "trace_text": arm.config.trace}
            with RecordWriter(path) as record:
                record.write(Header(config=config | _metric(arm), device=arm.config.device))
        run = read_record(path)
        if run.status in ("finished", "diverged"):
            return
        steps = run.steps
        end = End(
            status="failed", steps=len(steps), text=text,
            samples=steps[-1].samples if steps else 0, wall_s=steps[-1].wall_s if steps else 0.0,
        )  # fmt: skip
        with RecordWriter(path, resume_at=path.read_bytes().rfind(b"\n") + 1) as record:
            record.write(end)
    except (EbbflowError, OSError):
        pass  # the record cannot be written; the caller reports the failure anyway


def _metric(arm: Arm) -> dict[str, Any]:
    """By what the runs of an arm's workload are compared, as headers have it; empty if there is no such workload."""
    from ebbflow import workloads  # imports torch

    try:
        recipe = workloads.recipe(arm.config.workload)
    except EbbflowError:
        return {}
    return {"metric": recipe.metric, "higher_is_better": recipe.higher_is_better}


def _why_ended(code: int | None) -> str:
    """Why a process ended without a report.

    >>> _why_ended(-9), _why_ended(1)
    ('its process was killed by SIGKILL (out of memory?)', 'its process ended with code 1')
    """
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name} (out of memory?)"
    return f"its process ended with code {code}"
