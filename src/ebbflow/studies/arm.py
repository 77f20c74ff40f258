"""One arm of a study in a process of its own: it trains, reports how far it is, and says why it failed."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.signals import StopSignal
from ebbflow.errors import EbbflowError
from ebbflow.record import End, Header, RecordWriter, StepRow, read_record
from ebbflow.studies.study import Arm

__all__ = ["DISK_CACHE", "killed", "record_failure", "run_arm"]

DISK_CACHE = ".kept"
"""Folder of what the arms of a study share while it runs."""
_REPORT_EVERY_S = 0.2


def killed(code: int | None) -> str:
    """Why a process ended without a word.

    >>> killed(-9), killed(1)
    ('its process was killed by SIGKILL (out of memory?)', 'its process ended with code 1')
    """
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name} (out of memory?)"
    return f"its process ended with code {code}"


def record_failure(arm: Arm, folder: Path, text: str) -> None:
    """Say in the record why an arm ended; of an arm that failed before it had one, a record that says only that.

    Whatever was recorded stays, but for a last line that a kill cut in two.
    """
    path = folder / "record.jsonl"
    try:
        if not path.exists() or not path.stat().st_size:
            config = arm.config.as_dict() | {"trace": arm.config.label, "trace_text": arm.config.trace}
            with RecordWriter(path) as record:
                record.write(Header(config=config, device=arm.config.device))
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
        pass  # it cannot be written: the caller reports the failure anyway


def run_arm(arm: Arm, out: Path, options: dict[str, Any], report: Connection) -> None:
    """The body of an arm's process; what becomes of the arm is told through `report`, and in its record.

    When nobody listens any more the study is gone, and the process ends without a word in the record: whoever continues
    the study starts from the checkpoint. (The parent tells nothing: the server that forked it outlives the study.)
    """
    folder = out / "arms" / arm.id
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which then terminates its arms
    keep_freed_memory()
    from ebbflow.run.loop import Callbacks
    from ebbflow.run.training import train
    from ebbflow.workloads.disk_cache import disk_cached_in

    told = 0.0
    total = 1

    def tell(what: str, value: str | float) -> None:
        try:
            report.send((what, value))
        except OSError:
            os._exit(1)

    def on_start(done: int, all_samples: int) -> None:
        nonlocal total
        total = all_samples

    def on_step(row: StepRow) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > _REPORT_EVERY_S:
            told = now
            tell("moved", min(1.0, row.samples / total))  # a run by gain may take more samples

    def trained() -> tuple[str, str]:
        try:
            with disk_cached_in(out / DISK_CACHE), StopSignal(signal.SIGTERM) as stop:
                callbacks = Callbacks(on_start=on_start, on_step=on_step, should_stop=lambda: stop.requested)
                run = train(arm.config, folder, callbacks=callbacks, **options)
            return run.status, run.end.text if run.end else ""
        except Exception as error:  # whatever a user's model raises: the study goes on with the other arms
            text = str(error) if isinstance(error, EbbflowError) else f"{type(error).__name__}: {error}"
            record_failure(arm, folder, text)  # while the folder is held: another study may wait for it
            return "failed", text

    try:
        with _arm_lock(folder):
            what, text = trained()
    except KeyboardInterrupt:
        what, text = "failed", "interrupted"
    except OSError as error:  # the folder itself
        what, text = "failed", f"{type(error).__name__}: {error}"
    tell(what, text)


@contextmanager
def _arm_lock(folder: Path) -> Iterator[None]:
    """Hold the arm's folder; an orphan of a killed study lets go of it at its next report."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
