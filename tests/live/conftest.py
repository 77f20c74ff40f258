"""Fleets of real replicas, and of replicas without torch; after a test none of their processes is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.live.protocol import FleetConfig
from ebbflow.live.supervisor import Job
from live.fakes import FAKE, processes_with, until


@pytest.fixture
def fake_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Jobs of fake replicas in a folder of their own; after the test, none of their processes is left."""

    def make(*arguments: object) -> Job:
        command = (sys.executable, str(FAKE), *map(str, arguments))
        fleet = FleetConfig(job="fake", folder=tmp_path / "job", lighthouse="127.0.0.1:1")
        return Job(command=command, fleet=fleet)

    yield make
    until(lambda: not processes_with(f"EBBFLOW_FOLDER={tmp_path}"))


@pytest.fixture
def open_fleet(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Fleets whose replicas run a function in processes of their own; see `TestFleet`."""
    from live.harness import TestFleet

    made: list[TestFleet] = []

    def make(*arguments: Any, **options: Any) -> TestFleet:
        made.append(TestFleet(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def fleet(open_fleet: Callable[..., Any]) -> Callable[..., Any]:
    """Fleets that train the tiny model of the contract suite, with these arguments."""
    from live import replicas

    def make(join_timeout_ms: int = 10_000, **arguments: Any) -> Any:
        return open_fleet(replicas.tiny, arguments, join_timeout_ms=join_timeout_ms)

    return make
