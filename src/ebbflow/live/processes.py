"""Child processes of a launcher: any program, the ranks of a replica, and the lighthouse, where replicas meet.

torchft's lighthouse listens on the address that it is given and on no other. It asks for no secret: whoever reaches
that port can take a place in quorums and so delay the fleet (docs/security.md), so it belongs on loopback or on a
network of the fleet alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from ebbflow.core.files import write_whole
from ebbflow.errors import ConfigError, OutputError
from ebbflow.live.protocol import EXIT_RESTART, HEARTBEAT_TIMEOUT_MS, LOOPBACK, format_address, parse_address
from ebbflow.live.torchft_api import start_lighthouse

__all__ = [
    "ChildProcess", "LighthouseOptions", "LighthouseProcess", "ReplicaProcesses", "describe_exit", "hold_port",
    "listen", "rank_environment", "serve_lighthouse",
]  # fmt: skip

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 20_000
_LIGHTHOUSE_START_S = 60.0
_LIGHTHOUSE_STAYS_S = 60.0  # one that ran for so long was not ended by what ends it at its start
_LONGEST_PAUSE_S = 30.0
_LISTENS = "lighthouse at"


# Any program ----------------------------------------------------------------------------------------------------------


def _unblock_signals() -> None:
    """Undo the signal mask of the launcher, which its children inherit: a replica must receive SIGTERM."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _end_with_parent() -> Callable[[], None]:
    """Make what a child runs before its program, so that not even kill -9 of its parent leaves it behind.

    This works on Linux only; elsewhere the children of a killed launcher go on.
    """
    if not sys.platform.startswith("linux"):
        return _unblock_signals
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: after the fork, as little as possible
    parent = os.getpid()

    def before_exec() -> None:
        _unblock_signals()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return before_exec


class ChildProcess:
    """A running program in a session of its own, so that Ctrl-C reaches only the launcher.

    Signals are sent to the program alone; `kill` kills its whole process group, with all that it started (processes
    that load data, for example).
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, title: str) -> None:
        self.log = log
        self.began = time.time()
        """When it was started, in seconds since 1970."""
        self.log_problem = ""
        """Why what it prints is lost, if its log cannot be written."""
        try:
            with self._open_log(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n") as file:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent(),
                )
        except FileNotFoundError as problem:
            raise ConfigError(f"{command[0]} cannot be run: {problem.strerror}") from None
        except OSError as problem:
            raise OutputError(f"{command[0]} cannot be run: {problem.strerror}") from problem

    def _open_log(self, first_line: str) -> IO[bytes]:
        """Open the log, or, since a program without a log is better than none, the null device."""
        self._log_start = 0
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            file = self.log.open("ab", buffering=0)
            self._log_start = file.tell()
            try:
                file.write(first_line.encode())
            except OSError:
                file.close()
                raise
        except OSError as problem:
            self.log_problem = f"{self.log} cannot be written ({problem.strerror}): what it prints is lost"
            return Path(os.devnull).open("ab")
        return file

    @property
    def pid(self) -> int:
        """Process number of the program."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Give the exit code as `subprocess` does, negative for a signal; None while the program runs.

        When the program has ended, the rest of its process group is killed.
        """
        before = self._process.returncode
        code = self._process.poll()
        if code is not None and before is None:
            self._kill_group()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program and everything in its process group, and wait for its end."""
        self._kill_group()
        self._process.wait()

    def log_tail(self, lines: int = 15) -> list[str]:
        """Read the last lines that this program wrote to its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group has the number of its first process


def describe_exit(code: int) -> str:
    """Describe an exit code for people.

    >>> describe_exit(-9), describe_exit(75), describe_exit(1)
    ('killed by SIGKILL', 'asked to be started again', 'exit code 1')
    """
    if code == EXIT_RESTART:
        return "asked to be started again"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# The ranks of a replica -----------------------------------------------------------------------------------------------


def rank_environment(rank: int, ranks: int, *, port: int) -> dict[str, str]:
    """The variables by which the ranks of a replica on one machine find each other, as torchrun sets them.

    >>> rank_environment(1, 2, port=29500)["LOCAL_RANK"]
    '1'
    """
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def hold_port() -> socket.socket:
    """Hold a free port of loopback for a program that is about to listen on it with SO_REUSEADDR, as torch does.

    While the socket is open, nobody else is given the port, and a server can still bind it, since this one does not
    listen. A port that was only looked for may be taken before the program has imported torch.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, 0))
    return holder


class ReplicaProcesses:
    """The processes of one replica, one per rank, which end together: when one fails, the others are killed.

    Signals are sent to all of them. Rank 0 writes to `log`, rank 1 to `log-rank1.txt` beside it, and so on.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, title: str, ranks: int = 1
    ) -> None:
        self.log = log
        self._ranks: list[ChildProcess] = []
        self._failed: int | None = None
        self._port = hold_port() if ranks > 1 else None
        try:
            for rank in range(ranks):
                own = rank_environment(rank, ranks, port=self._port.getsockname()[1]) if self._port is not None else {}
                self._ranks.append(
                    ChildProcess(
                        command,
                        environment={**environment, **own},
                        log=log.with_name(f"log-rank{rank}.txt") if rank else log,
                        title=f"{title}, rank {rank}" if ranks > 1 else title,
                    )
                )
        except BaseException:
            self.kill()
            raise

    @property
    def log_problem(self) -> str:
        """Why what a rank prints is lost, if its log cannot be written."""
        return next((process.log_problem for process in self._ranks if process.log_problem), "")

    @property
    def began(self) -> float:
        """When the first process was started, in seconds since 1970."""
        return self._ranks[0].began

    @property
    def pid(self) -> int:
        """Process number of rank 0."""
        return self._ranks[0].pid

    def exit_code(self) -> int | None:
        """None while the replica runs, 0 if all ranks ended with it, else the code of the rank that failed first.

        Of several that failed since the last call, one that a signal ended comes first: the others end because of it.
        """
        codes = [process.exit_code() for process in self._ranks]
        if self._failed is None:
            failed = [(code, rank) for rank, code in enumerate(codes) if code]
            if failed:
                self._failed = min(failed)[1]
                self.kill()
        if self._failed is not None:
            return codes[self._failed]
        if None in codes:
            return None
        self._release_port()
        return 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that still run."""
        for process in self._ranks:
            process.send(number)

    def kill(self) -> None:
        """Kill all ranks, with all that they started, and wait for their end."""
        for process in self._ranks:
            process.kill()
        self._release_port()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()

    def log_tail(self, lines: int = 15) -> list[str]:
        """Read the last lines of the log of the rank that failed, or of rank 0."""
        return self._ranks[self._failed or 0].log_tail(lines)


# The lighthouse -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseOptions:
    """How a lighthouse forms quorums."""

    bind: str = LOOPBACK
    port: int = 0
    """0 stands for any free port."""
    min_replicas: int = 1
    """It forms no quorum of fewer replicas."""
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    """A replica whose last heartbeat is older is dead; a kill costs the others about this long and 0.1 s."""
    join_timeout_ms: int = 10_000
    """How long it waits for a replica that sends heartbeats and has not asked for a quorum."""
    quorum_tick_ms: int = 50
    """How often it checks whether a quorum can be formed."""


def serve_lighthouse(options: LighthouseOptions, *, address_file: Path | None = None) -> None:
    """Serve a lighthouse until SIGINT or SIGTERM. Its address is printed, and written to `address_file` if given."""
    signals = {signal.SIGINT, signal.SIGTERM}
    # Blocked before the lighthouse starts its threads, so that they cannot receive the signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        server = listen(options)
        # The address that it reports has the host name in it, whatever it listens on.
        address = format_address(options.bind, int(str(server.address()).rpartition(":")[2]))
        if address_file is not None:
            write_whole(address_file, address.encode())
        print(f"{_LISTENS} {address}", flush=True)
        signal.sigwait(signals)
        server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen(options: LighthouseOptions) -> Any:
    """Start torchft's lighthouse in this process."""
    address = format_address(options.bind, options.port)
    try:
        return start_lighthouse(
            address,
            min_replicas=options.min_replicas,
            join_timeout_ms=options.join_timeout_ms,
            quorum_tick_ms=options.quorum_tick_ms,
            heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        )
    except RuntimeError as problem:
        raise ConfigError(
            f"the lighthouse cannot listen on {address}: {problem}; choose another port, or an address of this machine"
        ) from None


class LighthouseProcess:
    """A lighthouse as a child process. When it is restarted, it keeps its address."""

    def __init__(self, folder: Path, options: LighthouseOptions) -> None:
        """Start it and wait until it listens; a ConfigError if it does not."""
        self.folder = folder
        self.options = options
        self._failures = 0  # starts in a row after which it did not stay
        self._restart_at: float | None = None
        self._restarted = False  # and it was not seen to listen yet
        address_file = folder / "address"
        address_file.unlink(missing_ok=True)
        self._child = self._start("--address-file", str(address_file))
        deadline = time.monotonic() + _LIGHTHOUSE_START_S
        while not address_file.exists():
            if self._child.exit_code() is not None or time.monotonic() > deadline:
                self._child.kill()
                raise ConfigError("the lighthouse did not start:\n" + "\n".join(self._child.log_tail(5)))
            time.sleep(0.02)
        self.address = address_file.read_text()
        self.options = replace(options, port=parse_address(self.address)[1])

    def _start(self, *more: str) -> ChildProcess:
        options = self.options
        self._began = time.monotonic()
        return ChildProcess(
            [
                sys.executable, "-m", "ebbflow", "lighthouse",
                "--bind", format_address(options.bind, options.port),
                "--min-replicas", str(options.min_replicas),
                "--heartbeat-timeout", f"{options.heartbeat_timeout_ms}ms",
                "--join-timeout", f"{options.join_timeout_ms}ms",
                *more,
            ],
            environment=os.environ, log=self.folder / "log.txt", title="lighthouse",
        )  # fmt: skip

    def restart_if_dead(self) -> tuple[Literal["lighthouse restarted", "lighthouse down"], str] | None:
        """Start it again, on the same port, if it has died: at once, then after pauses. What happened, or None.

        This neither waits nor fails: replicas go on for a while without a lighthouse, and a port that somebody else has
        taken may become free again.
        """
        code = self._child.exit_code()
        if code is None:
            problem = self._child.log_problem
            if self._restarted and (problem or any(line.startswith(_LISTENS) for line in self._child.log_tail())):
                self._restarted = False
                return "lighthouse restarted", problem
            return None
        now = time.monotonic()
        if self._restart_at is None:
            self._failures = 1 if now - self._began > _LIGHTHOUSE_STAYS_S else self._failures + 1
            pause = min(_LONGEST_PAUSE_S, 2.0 ** (self._failures - 2)) if self._failures > 1 else 0.0
            self._restart_at = now + pause
            if pause:
                said = (line for line in self._child.log_tail() if line.strip())
                words = [line for line in said if not line.startswith(("--- ", _LISTENS))]
                reason = words[-1] if words else describe_exit(code)
                return "lighthouse down", f"{reason}; the next try is in {pause:g} s"
        if now < self._restart_at:
            return None
        self._restart_at = None
        try:
            self._child, self._restarted = self._start(), True
        except (OutputError, ConfigError) as error:
            self._restart_at = now + _LONGEST_PAUSE_S
            return "lighthouse down", f"{error}; the next try is in {_LONGEST_PAUSE_S:g} s"
        return None

    def close(self) -> None:
        """End it."""
        self._child.kill()
