"""A replica without torch, for tests of what supervises replicas: does as its first argument says.

train      write a status, count steps, leave on SIGTERM, finish after --steps
stubborn   the same, but ignore SIGTERM
full       the same as train, but cannot save the state when it leaves
past       the same as train, with a clock that was set back by an hour
import     need a package that is not there, and end with a warning that is never the same
usage      refuse its options
crash      exit with code 3 before the first step
again      exit with code 75, at the third start finish
ending     finish after --steps, and end only when it is told to leave
first      r0 finishes after --steps, the others do not
nested     start a child of its own, then train
never      exit with 0 and write no status
break      leave the loop after three steps and exit with 0
vanish     exit with 0 in the middle of a step
unsaved    finish after three steps, of which the first is in a checkpoint
diverge    end with a loss that is no number
raise      commit three steps, then raise
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

leaving = False
late = 0.0


def write_status(own: Path, state: str, step: int, *, reason: str = "") -> None:
    if os.environ.get("RANK", "0") != "0":  # of a replica of several ranks, the first writes its status
        return
    body = {
        "pid": os.getpid(), "incarnation": "a", "step": step, "epoch": 0, "position": step, "members": 2, "batch": 64,
        "lr": 0.2, "multiplier": 2.0, "samples_per_s": 640.0, "loss": 0.5, "time": time.time() - late, "state": state,
        "reason": reason,
    }  # fmt: skip
    new = own / "status.new"
    new.write_text(json.dumps(body))
    new.replace(own / "status.json")


def save_final_state(job: Path, step: int) -> None:
    """What a launcher looks for: a checkpoint of the last step, and the final weights."""
    checkpoint = job / "checkpoints" / f"step-{step:09d}-{0:012x}-{0:08x}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "ebbflow.json").touch()
    (job / "weights.pt").touch()


def on_notice(*_: object) -> None:
    global leaving
    leaving = True


def main(mode: str, steps: int) -> int:
    own = Path(os.environ["EBBFLOW_FOLDER"]) / "replicas" / os.environ["EBBFLOW_REPLICA"]
    print(f"mode {mode}")
    if mode == "past":
        global late
        late = 3600.0
    if mode == "import":
        try:
            import no_such_package  # noqa: F401
        finally:
            atexit.register(lambda: print(f"[W {time.time()}] Warning: the process group was not destroyed"))
    if mode == "usage":
        argparse.ArgumentParser().parse_args(["--no-such-option"])
    if mode == "crash":
        print("ZeroDivisionError: the bug of this script")
        return 3
    if mode == "again":
        starts = own / "starts"
        count = len(starts.read_text()) if starts.exists() else 0
        starts.write_text("x" * (count + 1))
        write_status(own, "finished" if count == 2 else "joining", 1)
        return 0 if count == 2 else 75
    if mode == "never":
        return 0
    if mode in ("break", "vanish", "unsaved", "diverge", "raise"):
        for step in range(3):
            write_status(own, "training", step)
            time.sleep(0.15)  # longer than the launcher's pause between two looks
        if mode == "unsaved":
            save_final_state(own.parents[1], 1)
        state, reason = {
            "break": ("incomplete", "the loop ended after step 3"), "vanish": ("training", ""),
            "unsaved": ("finished", ""), "diverge": ("diverged", "Diverged: the training loss is nan"),
            "raise": ("failed", "ValueError: no such metric"),
        }[mode]  # fmt: skip
        write_status(own, state, 3, reason=reason)
        return 1 if mode in ("diverge", "raise") else 0
    if mode == "nested":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (own / "child").write_text(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else on_notice)
    if mode == "first" and own.name != "r0":
        steps = 10**9
    write_status(own, "starting", 0)
    for step in range(steps):
        write_status(own, "training", step)
        time.sleep(0.02)
        if leaving:
            write_status(own, "left", step + 1, reason="step 7 could not be saved" if mode == "full" else "")
            return 0
    save_final_state(own.parents[1], steps)
    if mode == "ending":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    write_status(own, "finished", steps)
    if mode == "ending":
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10**9))
