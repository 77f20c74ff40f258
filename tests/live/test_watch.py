from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from ebbflow.core.signals import StopSignal
from ebbflow.live import supervisor as supervising
from ebbflow.live.protocol import read_status
from ebbflow.live.supervisor import FleetEvent, Job, Outcome, RestartPolicy, Supervisor, supervise

MakeJob = Callable[..., Job]


def run(fleet: Supervisor, *, stop_when: Callable[[], object] = bool) -> tuple[Outcome, list[tuple[str, str]]]:
    """Watch a fleet; `stop_when` stands for the user, who presses Ctrl-C once it is true."""
    seen: list[FleetEvent] = []
    with fleet, StopSignal() as stop:

        def on_poll() -> None:
            if not stop.requested and stop_when():
                signal.raise_signal(signal.SIGINT)

        outcome = supervise(fleet, stop=stop, grace_s=20, on_event=seen.append, on_poll=on_poll)
    return outcome, [(event.replica, event.what) for event in seen]


def test_a_finished_job_ends_for_those_who_have_not_noticed(fake_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_OTHERS_MAY_FINISH_S", 0.1)
    fleet = Supervisor(fake_job("first", 5))
    fleet.request("r0")
    fleet.request("r1")
    outcome, seen = run(fleet)
    assert outcome == "finished"
    assert seen[2:] == [("r0", "finished"), ("r1", "told to leave"), ("r1", "left")]


def test_a_fleet_whose_replicas_are_all_given_up_has_failed(fake_job: MakeJob) -> None:
    fleet = Supervisor(fake_job("crash"), policy=RestartPolicy(max_failures=1))
    fleet.request("r0")
    assert run(fleet) == ("failed", [("r0", "started"), ("r0", "gave up")])


def test_a_signal_lets_everybody_leave(fake_job: MakeJob) -> None:
    fleet = Supervisor(fake_job("train"))
    fleet.request("r0")
    outcome, seen = run(fleet, stop_when=lambda: fleet.replicas["r0"].progressed)
    assert (outcome, seen[1:]) == ("stopped", [("r0", "told to leave"), ("r0", "left")])
    status = read_status(fleet.job.fleet.folder, "r0")
    assert status is not None
    assert status.state == "left"


def test_a_replica_that_left_by_itself_is_not_called_back(fake_job: MakeJob) -> None:
    """As after the notice of a cloud: the machine is about to go."""
    fleet = Supervisor(fake_job("train"))
    fleet.request("r0")
    told: list[bool] = []

    def tell_it_once() -> bool:
        replica = fleet.replicas["r0"]
        if not told and replica.progressed and replica.child:
            told.append(True)
            replica.child.send(signal.SIGTERM)
        return False

    assert run(fleet, stop_when=tell_it_once) == ("left", [("r0", "started"), ("r0", "left")])
