"""One child process: its log, its signals, and its death when its parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ebbflow.errors import ConfigError, OutputError

__all__ = ["Child"]

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 20_000


def _hear_signals() -> None:
    """A launcher that blocks signals hands that on to its children; a replica must hear them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _die_with_parent() -> Callable[[], None]:
    """What a child does before it runs its program, so that not even kill -9 of its parent leaves it behind.

    Linux only; elsewhere a killed launcher leaves its children to themselves.
    """
    if not sys.platform.startswith("linux"):
        return _hear_signals
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: after the fork, as little as possible
    parent = os.getpid()

    def tell_the_kernel() -> None:
        _hear_signals()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return tell_the_kernel


class Child:
    """A running program in a session of its own, so that Ctrl-C reaches only the launcher.

    Signals go to the program; `kill` goes to its whole process group, so that what it started (data loading
    processes, say) goes with it.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, title: str) -> None:
        self.log = log
        self.began = time.time()
        """In seconds since 1970."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                self._log_began = file.tell()
                file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n".encode())
                file.flush()
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
        except FileNotFoundError as problem:
            raise ConfigError(f"{command[0]} cannot be run: {problem.strerror}") from None
        except OSError as problem:
            raise OutputError(f"{log} or {command[0]}: {problem.strerror}") from problem

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """As `subprocess` has it: negative for a signal; None while the program runs.

        What is left of its process group is killed with it.
        """
        before = self._process.returncode
        code = self._process.poll()
        if code is not None and before is None:
            self._kill_group()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program and everything in its process group, and wait until it is gone."""
        self._kill_group()
        self._process.wait()

    def last_words(self, lines: int = 15) -> list[str]:
        """The last lines that this program wrote to its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_began, self.log.stat().st_size - _TAIL_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group has the number of its first process
