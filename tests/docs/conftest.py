"""What the tests of the pages share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

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
