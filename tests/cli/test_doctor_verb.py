"""`ebbflow doctor`: what is installed, and what an extra lacks."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from cli.answers import Ebbflow
from ebbflow.cli import doctor_command
from ebbflow.cli.doctor_command import Found, extras_of, look_for

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> list[str]:
    """What an installed package's metadata says, as the project file has it."""
    extras = PROJECT["optional-dependencies"]
    return [
        *PROJECT["dependencies"],
        *(f"{package}; extra == '{extra}'" for extra, packages in extras.items() for package in packages),
    ]


def test_extras_within_extras_are_resolved() -> None:
    found = extras_of(requirements())
    assert {package.name for package in found["live"]} == {"torchft", "tornado"}
    assert {"torchft", "skorch", "timm"} <= {package.name for package in found["all"]}
    assert {"torch", "numpy"} <= {package.name for package in found[""]}
    assert not any(package.name == "ebbflow" for packages in found.values() for package in packages)


def test_a_package_is_there_too_old_or_missing() -> None:
    version = importlib.metadata.version("numpy")
    assert look_for(Requirement("numpy>=1")) == Found("numpy", version, "")
    assert look_for(Requirement("numpy>=999")) == Found("numpy", version, ">=999 is needed")
    assert look_for(Requirement("no-such-package")) == Found("no-such-package", "", "not installed")


def test_doctor_shows_versions_devices_and_what_an_extra_lacks(
    ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["numpy>=1", "no-such-package>=3; extra == 'live'", "rich; extra == 'dask'"]
    monkeypatch.setattr(doctor_command.metadata, "requires", lambda name: needs)
    lines = ebbflow("doctor", width=80).text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert torch.__version__ in lines[0]
    assert any(line.split()[:3] == ["live", "incomplete", "no-such-package"] for line in lines)
    assert any(line.split()[:2] == ["dask", "ready"] for line in lines)
    answer = ebbflow("doctor", "--json").json
    assert answer["devices"][0].startswith("CPU")
    assert answer["extras"]["live"] == [{"package": "no-such-package", "version": "", "problem": "not installed"}]


def test_doctor_fails_if_ebbflow_itself_lacks_something(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command.metadata, "requires", lambda name: ["no-such-package"])
    answer = ebbflow("doctor")
    assert answer.code == 1
    assert "no-such-package (not installed)" in answer.out
