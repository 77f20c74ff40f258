"""Runs the arms of a study in parallel processes; the same command after a kill continues where it stopped.

One process an arm: an arm that crashes, runs out of memory or is killed takes no other with it. The processes are
forked from a server that has imported torch once, so starting one costs milliseconds. If the study itself is killed,
its arms notice that they are orphans and stop; a lock on each arm's folder keeps a restarted study from running
beside them. What takes long to read is read once for all arms (`workloads/disk_cache.py`).
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.files import write_whole
from ebbflow.errors import ConfigError, OutputError, RecordError
from ebbflow.record import read_record
from ebbflow.studies.arm import DISK_CACHE, killed, record_failure, run_arm
from ebbflow.studies.forecast import Board, Timed
from ebbflow.studies.study import Arm, Study, check_arms

__all__ = ["Progress", "default_jobs", "run_study"]

VERSION = 1
JOBS_ON_A_GPU = 3
"""Without MPS they share the GPU's time and gain none of it (H200, ResNet-18: one alone 76,160 images/s, three together
75,978), but one is always starting, reading, compiling or validating."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What happened to an arm, for whoever shows it."""

    arm: str
    what: Literal["found", "started", "moved", "finished", "diverged", "failed"]
    fraction: float = 0.0
    text: str = ""
    other_data: str = ""
    """Of an arm that was found: where its data was, if that is not where it is now."""
    left_s: float | None = None
    """How long the whole study will still take, as far as that can be told (`forecast.py`)."""


def default_jobs(arms: Sequence[Arm], *, cores: int) -> int:
    """Arms to run at once: what fills a GPU, or the cores of the machine, and no more than there are.

    Arms on a GPU take turns on it while one of them reads, validates or waits for Python.
    """
    if any(arm.config.device.startswith("cuda") for arm in arms):
        fitting = JOBS_ON_A_GPU
    else:
        fitting = cores // max((arm.config.threads for arm in arms), default=1)
    return max(1, min(fitting, len(arms)))


def run_study(
    study: Study,
    out: Path,
    *,
    jobs: int | None = None,
    command: str = "",
    checkpoint_every_s: float = 30.0,
    keep_weights: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run every arm that is not finished yet, by default as many at once as fill the device.

    The results are the records under `out`/arms. Seeds come one after the other, so that an interrupted study has whole
    tables of fewer seeds; of a seed's arms those that take longest come first. Arms that failed in an earlier call are
    tried again. An arm that fails does not stop the others; its record says why. A folder may hold a part of the study:
    seeds, rules, traces and workloads can be added. Raises ConfigError if it holds runs that the study does not have.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; expected the number of arms to run at once, 1 or more")
    from ebbflow.run import torchrun  # imports torch, which describing a study does not need

    if torchrun.rank_info(os.environ) is not None:
        raise ConfigError("a study starts the processes of its arms itself; run it without torchrun")
    arms = study.arms()
    check_arms(arms)
    jobs = jobs or default_jobs(arms, cores=_cores())
    with _study_folder(study, out, command):
        waiting = []
        for arm in arms:
            status, recorded = _found(out / "arms" / arm.id)
            if status in ("finished", "diverged"):
                other = arm.config.other_data(recorded)
                on_progress(Progress(arm=arm.id, what="found", fraction=1.0, text=status, other_data=other))
            else:
                waiting.append(arm)
        options = {"command": command, "checkpoint_every_s": checkpoint_every_s, "keep_weights": keep_weights}
        _run_arms(waiting, out, jobs, options, on_progress)
        shutil.rmtree(out / DISK_CACHE, ignore_errors=True)


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _found(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """What became of an arm in an earlier call, and the settings that its record tells."""
    try:
        run = read_record(folder / "record.jsonl")
    except RecordError:
        return "missing", {}
    return run.status, run.header.config


@contextmanager
def _study_folder(study: Study, out: Path, command: str) -> Iterator[None]:
    """Create the folder, or check that it holds this study or part of it; keep others out while the study runs."""
    try:
        (out / "arms").mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another study is running in {out}; wait for it or choose another folder") from None
            _check_and_write(study, out, command)
            yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}; choose another output folder") from error


def _check_and_write(study: Study, out: Path, command: str) -> None:
    """A study may grow by seeds, rules, traces and workloads; runs that it does not have would enter its tables."""
    path = out / "study.json"
    own = {arm.id for arm in study.arms()}
    strange = sorted(folder.name for folder in (out / "arms").iterdir() if folder.is_dir() and folder.name not in own)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise ConfigError(
            f"{out} holds runs that are not in this study: {', '.join(strange[:3])}{more}{_changed(study, path)}; "
            f"a study may grow, but what was run stays as it was: choose another folder with --out, or delete those "
            f"under {out / 'arms'}"
        )
    content = {"version": VERSION, "command": command, "config": study.as_dict()}
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def _changed(study: Study, path: Path) -> str:
    """In which keys the study differs from the one that was run in the folder, if that can still be read."""
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
    on_progress: Callable[[Progress], None],
) -> None:
    context = multiprocessing.get_context("forkserver")
    _start_server(context)
    running: dict[Connection, tuple[Arm, BaseProcess]] = {}
    queue = {arm.id: arm for arm in waiting}
    board = Board(waiting={arm.id: _timed(arm) for arm in waiting})

    def tell(progress: Progress) -> None:
        on_progress(replace(progress, left_s=board.remaining_s(jobs)))

    try:
        while queue or running:
            while queue and len(running) < jobs:
                arm = queue.pop(_next(queue, board))
                board.start(arm.id)
                ours, theirs = context.Pipe(duplex=False)
                with_loader_workers = replace(
                    arm, config=arm.config.with_loader_workers(cores=_cores(), processes=jobs)
                )
                child = context.Process(target=run_arm, args=(with_loader_workers, out, dict(options), theirs))
                child.start()
                theirs.close()
                running[ours] = (arm, child)
                tell(Progress(arm=arm.id, what="started"))
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                arm, process = running[ready]
                try:
                    what, value = ready.recv()
                except EOFError:  # ended without a word: killed, or out of memory
                    process.join()
                    what, value = "failed", killed(process.exitcode)
                    record_failure(arm, out / "arms" / arm.id, value)
                if what == "moved":
                    board.move(arm.id, value, time.monotonic())
                    tell(Progress(arm=arm.id, what="moved", fraction=value))
                    continue
                board.end(arm.id)
                tell(Progress(arm=arm.id, what=what, fraction=1.0, text=value))
                ready.close()
                process.join()
                del running[ready]
    finally:
        for _, process in running.values():
            process.terminate()  # interrupted: each arm writes a checkpoint and leaves
        for _, process in running.values():
            process.join(timeout=10)
            process.kill()


def _start_server(context: ForkServerContext) -> None:
    """Start the process that the arms are forked from, deaf to Ctrl-C from its first moment on.

    It would become so by itself, but only after the imports, and until then answer Ctrl-C with a traceback.
    """
    # torch imports the second one, which takes longer than the rest, when the first optimizer is made.
    context.set_forkserver_preload(["ebbflow.run.training", "torch._dynamo"])
    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is ignored stays so in a program that is started
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _next(queue: Mapping[str, Arm], board: Board) -> str:
    """The arm to start next: of the first seed that is left, the one that takes longest."""
    seed = next(iter(queue.values())).config.seed
    return board.longest([name for name, arm in queue.items() if arm.config.seed == seed])


def _timed(arm: Arm) -> Timed:
    from ebbflow import workloads  # imports torch, which describing a study does not need

    config = arm.config
    epochs = config.epochs or workloads.recipe(config.workload).epochs
    return Timed(work=epochs, kind=(config.workload, config.label))
