"""Runs the arms of a study in parallel processes; the same command after a kill continues where it stopped.

One process an arm: an arm that crashes, runs out of memory or is killed takes no other with it. The processes are
forked from a server that has imported torch once, so starting one costs milliseconds. If the study itself is killed,
its arms notice that they are orphans and stop; a lock on each arm's folder keeps a restarted study from running
beside them.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from ebbflow.errors import ConfigError, EbbflowError, OutputError, RecordError
from ebbflow.files import write_whole
from ebbflow.record import End, RecordWriter, StepRow, read_record
from ebbflow.signals import StopSignal
from ebbflow.studies.study import Arm, Study, check_arms

__all__ = ["Progress", "run_study"]

VERSION = 1
_REPORT_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What happened to an arm, for whoever shows it."""

    arm: str
    what: Literal["found", "started", "moved", "finished", "diverged", "failed"]
    fraction: float = 0.0
    text: str = ""


def run_study(
    study: Study,
    out: Path,
    *,
    jobs: int = 1,
    command: str = "",
    checkpoint_every_s: float = 30.0,
    keep_weights: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run every arm that is not finished yet. The results are the records under `out`/arms.

    Arms that failed in an earlier call are tried again. An arm that fails does not stop the others; its record says
    why. Raises ConfigError if the folder holds another study.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; expected the number of arms to run at once, 1 or more")
    arms = study.arms()
    check_arms(arms)
    with _study_folder(study, out, command):
        waiting = []
        for arm in arms:
            status = _status(out / "arms" / arm.id)
            if status in ("finished", "diverged"):
                on_progress(Progress(arm=arm.id, what="found", fraction=1.0, text=status))
            else:
                waiting.append(arm)
        options = {"command": command, "checkpoint_every_s": checkpoint_every_s, "keep_weights": keep_weights}
        _run_arms(waiting, out, jobs, options, on_progress)


def _status(folder: Path) -> str:
    try:
        return read_record(folder / "record.jsonl").status
    except RecordError:
        return "missing"


@contextmanager
def _study_folder(study: Study, out: Path, command: str) -> Iterator[None]:
    """Create the folder, or check that it holds this very study; keep others out while the study runs."""
    try:
        (out / "arms").mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another study is running in {out}; wait for it or choose another folder") from None
            _check_or_write(out / "study.json", {"version": VERSION, "command": command, "config": study.as_dict()})
            yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}; choose another output folder") from error


def _check_or_write(path: Path, content: dict[str, Any]) -> None:
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["config"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path} is damaged; delete it if its folder holds this study, or choose another"
            ) from None
        wanted = content["config"]
        other = [key for key in wanted if found.get(key) != wanted[key]]
        if other:
            raise ConfigError(
                f"{path.parent} holds a study with another configuration; different are: "
                + "; ".join(f"{key} (now {wanted[key]!r}, was {found.get(key)!r})" for key in other)
                + "; choose another folder with --out, or delete that one"
            )
        return
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def _run_arms(
    waiting: list[Arm],
    out: Path,
    jobs: int,
    options: Mapping[str, Any],
    on_progress: Callable[[Progress], None],
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ebbflow.training"])
    running: dict[Connection, tuple[Arm, BaseProcess]] = {}
    queue = list(reversed(waiting))
    try:
        while queue or running:
            while queue and len(running) < jobs:
                arm = queue.pop()
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(target=_run_arm, args=(arm, out / "arms" / arm.id, dict(options), theirs))
                child.start()
                theirs.close()
                running[ours] = (arm, child)
                on_progress(Progress(arm=arm.id, what="started"))
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                arm, process = running[ready]
                try:
                    what, value = ready.recv()
                except EOFError:  # ended without a word: killed, or out of memory
                    process.join()
                    what, value = "failed", f"its process ended with code {process.exitcode} (out of memory?)"
                    _record_failure(out / "arms" / arm.id, value)
                if what == "moved":
                    on_progress(Progress(arm=arm.id, what="moved", fraction=value))
                    continue
                on_progress(Progress(arm=arm.id, what=what, fraction=1.0, text=value))
                ready.close()
                process.join()
                del running[ready]
    finally:
        for _, process in running.values():
            process.terminate()  # interrupted: each arm writes a checkpoint and leaves
        for _, process in running.values():
            process.join(timeout=10)
            process.kill()


def _record_failure(folder: Path, text: str) -> None:
    """Say in the record why an arm ended, if it has a record and no end of its own."""
    path = folder / "record.jsonl"
    try:
        run = read_record(path)
        if run.end is None and not run.damage:
            with RecordWriter(path, resume_at=path.stat().st_size) as record:
                record.write(End(status="failed", steps=len(run.steps), samples=0, wall_s=0.0, text=text))
    except EbbflowError:
        pass  # nothing was recorded yet, or it cannot be written: the caller reports the failure anyway


def _run_arm(arm: Arm, folder: Path, options: dict[str, Any], report: Connection) -> None:
    """The body of an arm's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which then terminates its arms
    from ebbflow.training import Callbacks, train

    parent = os.getppid()
    told = 0.0
    total = 1

    def on_start(done: int, all_samples: int) -> None:
        nonlocal total
        total = all_samples

    def on_step(row: StepRow) -> None:
        nonlocal told
        if os.getppid() != parent:
            os._exit(1)  # the study is gone; whoever continues it starts from the checkpoint
        now = time.monotonic()
        if now - told > _REPORT_EVERY_S:
            told = now
            report.send(("moved", min(1.0, row.samples / total)))  # a run by gain may take more samples

    try:
        with _arm_lock(folder), StopSignal(signal.SIGTERM) as stop:
            callbacks = Callbacks(on_start=on_start, on_step=on_step, should_stop=lambda: stop.requested)
            run = train(arm.config, folder, callbacks=callbacks, **options)
        text = run.end.text if run.end else ""
        report.send((run.status, text))
    except KeyboardInterrupt:
        report.send(("failed", "interrupted"))
    except EbbflowError as error:
        _record_failure(folder, str(error))
        report.send(("failed", str(error)))
    except Exception as error:  # whatever a user's model raises: the study goes on with the other arms
        text = f"{type(error).__name__}: {error}"
        _record_failure(folder, text)
        report.send(("failed", text))


@contextmanager
def _arm_lock(folder: Path) -> Iterator[None]:
    """Hold the arm's folder; an orphan of a killed study lets go of it within a step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
