"""Whose an exception is: the plugin's, with its line, or Ebbflow's, whose whole traceback is wanted."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.plugins import load_plugins, raised_in_plugin
from ebbflow.core.preemption import PreemptionNotice
from ebbflow.errors import ConfigError

PLUGIN = """
import json
import torch
from ebbflow import Trace
from ebbflow.core.preemption import NoticeSource
from ebbflow.core.units import format_seconds
from ebbflow.errors import ConfigError

def of_the_plugin():
    return {}["x"]

def of_a_library():
    return json.loads("{")

def of_ebbflow():
    return format_seconds("x")

def on_purpose():
    raise ConfigError("explained")

def of_the_memory():
    raise MemoryError

def of_a_device():
    raise torch.OutOfMemoryError

class Notice(NoticeSource):
    def check(self):
        return of_the_plugin()

    def __str__(self):
        return "notice"
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    """The module of a plugin that registers nothing."""
    before = set(sys.modules)
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    (name,) = (name for name in set(sys.modules) - before if name.startswith("ebbflow_plugin_"))
    yield sys.modules[name]
    del sys.modules[name]


def line(text: str) -> int:
    return PLUGIN.splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [("of_the_plugin", '    return {}["x"]'), ("of_a_library", '    return json.loads("{")')],
)
def test_an_exception_of_a_plugin_or_of_a_library_under_it_has_the_line_of_the_plugin(
    plugin: Any, function: str, expected: str
) -> None:
    with pytest.raises((KeyError, ValueError)) as caught:
        getattr(plugin, function)()
    said = raised_in_plugin(caught.value)
    assert said.startswith(f"{type(caught.value).__name__}: {caught.value} (")
    assert said.endswith(f"{plugin.__file__}:{line(expected)}, in {function})")


@pytest.mark.parametrize("function", ["of_ebbflow", "on_purpose", "of_the_memory", "of_a_device"])
def test_a_defect_of_ebbflow_an_explained_error_and_a_lack_of_memory_are_not_of_the_plugin(
    plugin: Any, function: str
) -> None:
    with pytest.raises((TypeError, ConfigError, MemoryError, RuntimeError)) as caught:
        getattr(plugin, function)()
    assert raised_in_plugin(caught.value) == ""


def test_an_exception_without_a_plugin_is_not_of_one() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert raised_in_plugin(caught.value) == ""


def test_a_notice_of_a_plugin_that_raises_is_logged_with_its_line(
    plugin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    until = time.monotonic() + 10
    with caplog.at_level(logging.WARNING), PreemptionNotice(plugin.Notice(), every_s=0.01):
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
    number = line('    return {}["x"]')
    where = f"{plugin.__file__}:{number}, in of_the_plugin"
    assert [record.getMessage() for record in caplog.records] == [
        f"notice could not be asked for a notice (KeyError: 'x' ({where})); it is asked again"
    ]
