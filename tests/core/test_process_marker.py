"""The marker `process` is true: a test without it that starts something fails."""

from __future__ import annotations

import multiprocessing
import shutil
import socket
import subprocess
import sys

import pytest

REFUSED = pytest.raises(pytest.fail.Exception, match=r"mark it with pytest\.mark\.process")


def test_a_test_without_the_marker_starts_no_process_and_no_server() -> None:
    with REFUSED:
        subprocess.run([sys.executable, "-c", ""], check=False)
    for method in ("fork", "spawn", "forkserver"):
        with REFUSED:
            multiprocessing.get_context(method).Process(target=print).start()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        with REFUSED:
            server.listen()


@pytest.mark.process
def test_a_test_with_the_marker_may() -> None:
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
    with socket.create_server(("127.0.0.1", 0)):
        pass


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_git_may_be_asked_for_the_commit() -> None:
    assert subprocess.run(["git", "--version"], capture_output=True, check=False).returncode == 0
