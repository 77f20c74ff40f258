"""What all tests share."""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

import drawing_examples as drawing_examples  # registers the profiles

settings.load_profile("ebbflow")

# Files of tests that run at the same time share the cores: threads that wait for each other would spin.
if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

# A shell script starts what it puts in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

# The marker `process` is kept true -----------------------------------------------------------------------------------

may_start_processes = True
"""Whether the present test carries the marker `process`; between tests, everything is allowed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the documentation, and skip those that take minutes, unless they are asked for.

    The commands of the pages and the examples are run as a user runs them, each in a process of its own; the evidence
    is unpacked and read as a whole.
    """
    asked_for = config.option.markexpr or config.option.keyword or any("::" in argument for argument in config.args)
    for item in items:
        if not asked_for and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run it by name, or all of them with -m long"))
    markers = {"test_examples.py": "process", "test_guide.py": "process", "test_evidence.py": "slow"}
    for item in items:
        if item.path.parent == ROOT / "tests" / "docs" and item.path.name in markers:
            item.add_marker(markers[item.path.name])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch a test without the marker, its fixtures included."""
    global may_start_processes
    may_start_processes = item.get_closest_marker("process") is not None
    try:
        return (yield)
    finally:
        may_start_processes = True


def _only_with_the_marker(owner: type, method: str, what: str) -> None:
    original: Callable[..., Any] = getattr(owner, method)

    @wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # The header of a record asks git for the commit, which takes milliseconds.
        asks_git = args[1:] and isinstance(args[1], list) and args[1][0] == "git"
        if not (may_start_processes or asks_git):
            pytest.fail(f"this test starts {what}; mark it with pytest.mark.process, so that `make quick` omits it")
        return original(*args, **kwargs)

    setattr(owner, method, checked)


_only_with_the_marker(subprocess.Popen, "__init__", "a subprocess")
_only_with_the_marker(multiprocessing.process.BaseProcess, "start", "a process")
_only_with_the_marker(socket.socket, "listen", "a server")


# What all tests share -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Weights and orders that a test leaves to chance are the same in every run, whatever ran before in its process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and data sets that may lie beside the project; tests that need it skip without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"real traces and data sets are not there: no folder {folder.name!r} beside the project")
    return folder


# Plugins -------------------------------------------------------------------------------------------------------------

REGISTRIES = {
    "ebbflow.rules.rule": "RULES",
    "ebbflow.plan.policies": "POLICIES",
    "ebbflow.optim.schedules": "SCHEDULES",
    "ebbflow.optim.optimizers": "OPTIMIZERS",
    "ebbflow.traces.synthetic": "GENERATORS",
    "ebbflow.simulate.prices": "PRICES",
    "ebbflow.workloads": "WORKLOADS",
    "ebbflow.engines.base": "ENGINES",
}
PLUGIN = "ebbflow_plugin_"
"""How the names of modules begin that plugins are imported as."""


@pytest.fixture
def forget_plugins() -> Iterator[None]:
    """Afterwards, what plugins have registered is gone; what Ebbflow itself registered meanwhile stays."""
    yield
    for module, name in REGISTRIES.items():
        entries = getattr(importlib.import_module(module), name)._entries
        for key in [key for key, entry in entries.items() if entry.make.__module__.startswith(PLUGIN)]:
            del entries[key]
    formats = importlib.import_module("ebbflow.traces.formats").FORMATS
    for key in [key for key, found in formats.items() if found.read.__module__.startswith(PLUGIN)]:
        del formats[key]
    for name in [name for name in sys.modules if name.startswith(PLUGIN)]:
        del sys.modules[name]
