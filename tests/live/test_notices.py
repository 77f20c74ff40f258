"""A preemption notice ends a fleet of this machine, and a replica, as SIGTERM does."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ebbflow.core.endings import Ending
from ebbflow.core.preemption import FileNotice
from ebbflow.live.launcher import run_fleet
from ebbflow.live.supervisor import Job, Supervisor


@pytest.mark.process
def test_a_notice_tells_all_replicas_of_the_launcher_to_leave(fake_job: Callable[..., Job], tmp_path: Path) -> None:
    notice = tmp_path / "stop"
    with Supervisor(fake_job("train", 10**6)) as fleet:
        fleet.request("r0")

        def when_trained() -> tuple[()]:
            status = fleet.replicas["r0"].status
            if status is not None and status.step:
                notice.touch()
            return ()

        console, notices = Console(file=io.StringIO()), [FileNotice(str(notice))]
        run = run_fleet(fleet, grace_s=20, console=console, title=lambda: "", act=when_trained, notices=notices)
    assert (run.ending, run.signalled, run.counts["left"]) == (Ending.STOPPED, True, 1)


@pytest.mark.process
@pytest.mark.long
def test_a_notice_ends_a_real_fleet_that_goes_on_afterwards(tmp_path: Path) -> None:
    notice, out = tmp_path / "stop", tmp_path / "job"
    command = [
        sys.executable, "-m", "ebbflow", "launch", "--workload", "digits-mlp", "--out", str(out), "--notice",
        f"file({notice})", "--json", "--epochs", "100000",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(out.glob("replicas/*/record.jsonl")) and time.monotonic() < deadline:
                time.sleep(0.1)
            notice.touch()
            said, _ = process.communicate(timeout=120)
        finally:
            process.terminate()
    assert process.returncode == Ending.STOPPED.code
    assert json.loads(said)["status"] == Ending.STOPPED.word
    assert any((out / "checkpoints").iterdir())
