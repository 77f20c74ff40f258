"""torchrun is told to stop, and a rank is killed: the example of docs/torchrun.md goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp_torchrun.py"
# The example with another number of epochs; each of 1500 samples in steps of 64 has 24 updates.
SCRIPT = f"""
import runpy, sys
import torch.distributed as dist
main = runpy.run_path({str(EXAMPLE)!r})["main"]
main.__globals__["EPOCHS"] = int(sys.argv.pop())
dist.init_process_group("gloo")
main(*sys.argv[1:])
dist.destroy_process_group()
"""


def start(folder: Path, ranks: int, epochs: int, *options: str) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    # Otherwise ranks that were started again find the gloo addresses of those before them (torch 2.13).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    arguments = [str(script), str(folder / "saved"), str(epochs)]
    return subprocess.Popen([*command, *arguments], env={**environment, "OMP_NUM_THREADS": "1"})


def end(launch: subprocess.Popen[bytes]) -> None:
    if launch.poll() is None:
        for process in [*psutil.Process(launch.pid).children(recursive=True), psutil.Process(launch.pid)]:
            process.kill()
        launch.wait()


def wait_for(condition: Callable[[], bool], launch: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert launch.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def saved(folder: Path) -> list[int]:
    """The updates of the complete checkpoints."""
    return sorted(int(path.parent.name) for path in (folder / "saved").glob("*/.metadata"))


def test_torchrun_passes_sigterm_on_and_all_ranks_save_the_same_step(tmp_path: Path) -> None:
    launch = start(tmp_path, 3, 10**6)
    try:
        wait_for(lambda: len(saved(tmp_path)) >= 2, launch)
        launch.send_signal(signal.SIGTERM)
        launch.wait(timeout=120)
    finally:
        end(launch)
    stopped = saved(tmp_path)[-1]
    epochs = stopped // 24 + 2
    launch = start(tmp_path, 2, epochs)
    try:
        assert launch.wait(timeout=200) == 0
    finally:
        end(launch)
    assert saved(tmp_path)[-1] == 24 * epochs
    assert stopped in saved(tmp_path)


def test_a_killed_rank_makes_torchrun_start_all_of_them_again_from_the_checkpoint(tmp_path: Path) -> None:
    launch = start(tmp_path, 2, 60, "--max-restarts=1")
    first = tmp_path / "saved" / "000024" / ".metadata"
    try:
        wait_for(lambda: len(saved(tmp_path)) >= 2, launch)
        written = first.stat().st_mtime_ns
        ranks = psutil.Process(launch.pid).children()
        victims = [rank for rank in ranks if "script.py" in " ".join(rank.cmdline())]
        victims[-1].kill()
        assert launch.wait(timeout=280) == 0
    finally:
        end(launch)
    assert saved(tmp_path)[-1] == 24 * 60
    assert first.stat().st_mtime_ns == written, "the first epoch was not trained again"
