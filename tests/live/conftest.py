"""Fleets of replicas without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.live.protocol import FleetConfig
from ebbflow.live.supervisor import Job
from live.fakes import FAKE, processes_with


@pytest.fixture
def fake_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Jobs of fake replicas in a folder of their own; after the test, none of their processes is left."""

    def make(*arguments: object) -> Job:
        command = (sys.executable, str(FAKE), *map(str, arguments))
        fleet = FleetConfig(job="fake", folder=tmp_path / "job", lighthouse="127.0.0.1:1")
        return Job(command=command, fleet=fleet)

    yield make
    assert processes_with(f"EBBFLOW_FOLDER={tmp_path}") == []
