"""Which replicas are started again, how they are started and stopped, and how a fleet ends."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ebbflow.core.endings import Ending
from ebbflow.core.signals import StopSignal
from ebbflow.errors import ConfigError
from ebbflow.live import supervisor as supervising
from ebbflow.live.launcher import run_fleet
from ebbflow.live.processes import LighthouseOptions, LighthouseProcess
from ebbflow.live.protocol import FleetConfig, fetch_lighthouse_status, parse_address, read_status
from ebbflow.live.supervisor import FleetEvent, Job, ProcessEnd, RestartPolicy, Supervisor, supervise
from live.fakes import alive, processes_with, until

pytestmark = pytest.mark.process

MakeJob = Callable[..., Job]
QUICK = RestartPolicy(max_failures=3, first_pause_s=0.05, longest_pause_s=0.1)


# When a replica is started again --------------------------------------------------------------------------------------


def endings(*codes: int, progressed: bool = False, policy: RestartPolicy | None = None) -> list[tuple[str, float]]:
    policy, failures, verdicts = policy or RestartPolicy(max_failures=5), 0, []
    for code in codes:
        ending = ProcessEnd(code=code, state="training", progressed=progressed)
        failures = policy.failures(failures, ending)
        verdicts.append(policy.judge(ending, failures))
    return verdicts


def test_pauses_double_and_the_fifth_death_without_a_step_is_the_last() -> None:
    assert endings(1, 1, -9, 1, 1) == [
        ("restart", 0.0), ("restart", 1.0), ("restart", 2.0), ("restart", 4.0), ("gave up", 0.0),
    ]  # fmt: skip


def test_pauses_have_an_end() -> None:
    policy = RestartPolicy(max_failures=100, first_pause_s=1, longest_pause_s=5)
    assert [pause for _, pause in endings(*[1] * 7, policy=policy)] == [0, 1, 2, 4, 5, 5, 5]


def test_a_replica_that_commits_steps_between_its_deaths_is_never_given_up() -> None:
    assert endings(*[-9] * 50, progressed=True) == [("restart", 0.0)] * 50


def test_asking_to_be_restarted_for_ever_is_given_up_too() -> None:
    assert endings(*[75] * 5)[-1] == ("gave up", 0.0)
    assert endings(75) == [("restart", 0.0)]


def test_code_0_is_the_end_and_the_status_says_which() -> None:
    policy = RestartPolicy()
    says = {"finished": "finished", "left": "left", "leaving": "left", "diverged": "diverged", "refused": "refused"}
    for state, verdict in [*says.items(), ("training", "incomplete"), ("joining", "incomplete"), (None, "incomplete")]:
        assert policy.judge(ProcessEnd(code=0, state=state, progressed=True), 0) == (verdict, 0.0)


def given_up_after(policy: RestartPolicy, *ends: ProcessEnd) -> int | None:
    """How many of these ends it takes until a replica is given up."""
    failures, repeats, last = 0, 0, None
    for number, end in enumerate(ends, start=1):
        failures, repeats, last = policy.failures(failures, end), policy.repeats(repeats, last, end), end
        if policy.judge(end, failures, repeats)[0] == "gave up":
            return number
    return None


def raised(error: str, *, step: int | None = 100, state: str | None = "failed", code: int = 1) -> ProcessEnd:
    return ProcessEnd(code=code, state=state, progressed=step is not None, step=step, error=error)


def test_the_same_exception_at_the_same_step_is_final_at_the_third_time_although_steps_were_committed() -> None:
    policy = RestartPolicy(max_failures=5)
    assert given_up_after(policy, *[raised("ValueError: no")] * 9) == 3
    assert given_up_after(RestartPolicy(max_failures=1), raised("ValueError: no")) == 1
    # Another error, or the same one further on, is another failure; and a kill is nobody's failure.
    assert given_up_after(policy, *(raised("ValueError: no", step=step) for step in range(50))) is None
    assert given_up_after(policy, *(raised(f"ValueError: {number % 2}") for number in range(50))) is None
    assert given_up_after(policy, *[raised("Killed", code=-9)] * 50) is None


def test_the_same_failure_before_joining_is_final_at_the_second_time() -> None:
    bug = raised("NameError: name 'x' is not defined", step=None, state=None)
    assert given_up_after(RestartPolicy(max_failures=5), *[bug] * 5) == 2


@pytest.mark.parametrize(
    "end",
    [
        raised("SyntaxError: invalid syntax", step=None, state=None),
        raised("ModuleNotFoundError: No module named 'timm'", step=None, state=None),
        raised("ebbflow.errors.MissingExtra: ebbflow launch needs torchft", step=None, state=None),
        raised("ebbflow.errors.DataError: /data: no such folder", step=None, state=None),
        raised("ImportError: cannot import name 'x'", step=100, state="failed"),
        raised("error: unrecognized arguments: --lrr", step=None, state=None, code=2),
    ],
    ids=lambda end: end.error.partition(":")[0],
)
def test_an_error_that_another_start_would_repeat_is_final_at_once(end: ProcessEnd) -> None:
    assert RestartPolicy(max_failures=5).judge(end, 1, 1) == ("refused", 0.0)


def test_an_error_that_may_pass_is_not_final() -> None:
    for end in (
        raised("ebbflow.errors.StorageUnreachable: s3://b: cannot be listed", step=None, state=None),
        raised("OSError: [Errno 28] No space left on device"),
        raised("ebbflow.errors.OutputError: weights.pt cannot be written", code=2, state="training"),
        raised("ModuleNotFoundError: No module named 'x'", code=-9),
        raised("DataError: sample 70 of Images cannot be read: OSError: Stale file handle", code=2),
    ):
        assert RestartPolicy(max_failures=5).judge(end, 1, 1) == ("restart", 0.0)


@pytest.mark.parametrize("code", [1, 2, 75])
def test_a_disk_that_is_full_and_a_bucket_that_is_away_are_waited_for_with_growing_pauses(code: int) -> None:
    """Pauses of 0, 1, 2, 4, 8, 16 and 30 s, for ever."""
    policy = RestartPolicy(max_failures=5, first_pause_s=1.0, longest_pause_s=30.0)
    full = "OutputError: /job/replicas/r0: cannot be written: No space left on device"
    away = "ebbflow.errors.StorageUnreachable: s3://b: cannot be listed"
    for error in (full, away):
        end = raised(error, step=None, state=None, code=code)
        assert given_up_after(policy, *[end] * 50) is None
        assert policy.judge(end, 1, 1) == ("restart", 0.0) and policy.judge(end, 40, 40) == ("restart", 30.0)


# The supervisor -------------------------------------------------------------------------------------------------------


class Seen(list[FleetEvent]):
    """Events so far."""

    def of(self, replica: str) -> list[str]:
        return [event.what for event in self if event.replica == replica]


def poll_until(fleet: Supervisor, seen: Seen, condition: Callable[[], object]) -> None:
    def look() -> object:
        seen.extend(fleet.poll())
        return condition()

    until(look)


def training(fleet: Supervisor, name: str) -> bool:
    return fleet.replicas[name].progressed and fleet.replicas[name].running


def test_replicas_run_until_they_finish(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("train", 5)) as fleet:
        fleet.request("r0")
        fleet.request("r1")
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == seen.of("r1") == ["started", "finished"]
    assert [replica.deaths for replica in fleet.replicas.values()] == [0, 0]


def test_a_killed_replica_is_started_again_and_the_other_is_left_alone(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("train")) as fleet:
        fleet.request("r0")
        fleet.request("r1")
        poll_until(fleet, seen, lambda: training(fleet, "r0") and training(fleet, "r1"))
        child = fleet.replicas["r0"].child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        poll_until(fleet, seen, lambda: fleet.replicas["r0"].incarnations == 2 and training(fleet, "r0"))
    assert seen.of("r0") == ["started", "died", "started"]
    assert seen.of("r1") == ["started"]
    assert [event.text for event in seen if event.what == "died"] == ["killed by SIGKILL; starting again"]


def test_a_script_with_a_bug_is_given_up_with_the_end_of_its_log(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("crash"), policy=QUICK) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == ["started", "died", "started", "gave up"]
    why = "exit code 3 (ZeroDivisionError: the bug of this script); starting again"
    assert seen[1].text == why, "who looks at the screen sees why"
    assert "exit code 3, 2 times in a row with ZeroDivisionError: the bug of this script" in seen[-1].text
    assert seen[-1].lines[-1] == "ZeroDivisionError: the bug of this script"
    log = (fleet.job.fleet.folder / "replicas" / "r0" / "log.txt").read_text()
    assert log.count("the bug of this script") == 2
    assert "replica r0, incarnation 2" in log


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("import", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("usage", "fake_replica.py: error: unrecognized arguments: --no-such-option"),
    ],
)
def test_a_missing_package_or_a_wrong_option_ends_at_once_with_the_message(
    fake_job: MakeJob, mode: str, reason: str
) -> None:
    seen = Seen()
    with Supervisor(fake_job(mode)) as fleet, StopSignal() as stop:
        fleet.request("r0")
        ending, text = supervise(fleet, stop=stop, grace_s=20, on_event=seen.append, on_poll=lambda: None)
    assert seen.of("r0") == ["started", "refused"]
    assert (ending, text) == (Ending.WRONG_INPUT, f"r0: {reason}")
    assert reason in seen[-1].lines


def test_code_75_asks_to_be_started_again(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("again"), policy=QUICK) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == ["started", "died", "started", "died", "started", "finished"]
    assert "asked to be started again" in seen[1].text


def test_a_replica_that_is_told_to_leave_leaves_by_itself_and_stays_away(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("train")) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        seen.extend(fleet.stop("r0"))
        assert fleet.stop("r0") == []  # once is enough
        poll_until(fleet, seen, lambda: not fleet.active)
        status = read_status(fleet.job.fleet.folder, "r0")
    assert seen.of("r0") == ["started", "told to leave", "left"]
    assert status is not None
    assert status.state == "left"


def test_a_replica_that_is_told_to_leave_when_it_has_just_finished_has_finished(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("ending", 3)) as fleet:
        fleet.request("r0")
        r0 = fleet.replicas["r0"]
        poll_until(fleet, seen, lambda: r0.status is not None and r0.status.state == "finished")
        seen.extend(fleet.stop("r0"))
        poll_until(fleet, seen, lambda: not fleet.active)
        assert supervising.judge_fleet(fleet, stopped=True) == (Ending.FINISHED, "")
    assert seen.of("r0") == ["started", "told to leave", "finished"]


def test_a_clock_that_was_set_back_does_not_turn_left_into_finished(fake_job: MakeJob) -> None:
    """The job finished once before, with fewer epochs, and its status is still there, from the future as it seems."""
    job = fake_job("past")
    old = job.fleet.folder / "replicas" / "r0" / "status.json"
    old.parent.mkdir(parents=True)
    old.write_text(f'{{"state": "finished", "step": 10, "batch": 64, "time": {time.time() + 3600}}}')
    seen = Seen()
    with Supervisor(job) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        seen.extend(fleet.stop("r0"))
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == ["started", "told to leave", "left"]


def test_the_status_of_an_earlier_run_says_nothing_about_a_replica_that_writes_none(fake_job: MakeJob) -> None:
    job = fake_job("never")
    old = job.fleet.folder / "replicas" / "r0" / "status.json"
    old.parent.mkdir(parents=True)
    old.write_text(f'{{"state": "finished", "step": 10, "batch": 64, "time": {time.time() + 3600}}}')
    seen = Seen()
    with Supervisor(job) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == ["started", "incomplete"]


def test_a_replica_whose_log_cannot_be_written_runs_without_one(fake_job: MakeJob) -> None:
    job = fake_job("train", 5)
    log = job.fleet.folder / "replicas" / "r1" / "log.txt"
    log.mkdir(parents=True)  # what is in the way of the log
    seen = Seen()
    with Supervisor(job) as fleet:
        fleet.request("r0")
        fleet.request("r1")
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == seen.of("r1") == ["started", "finished"]
    (started,) = [event for event in seen if event.replica == "r1" and event.what == "started"]
    assert f"{log} cannot be written (Is a directory): what it prints is lost" in started.text


def test_a_replica_that_cannot_be_started_does_not_end_the_others(
    fake_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    with Supervisor(fake_job("train"), policy=QUICK) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        no_memory = OSError(errno.EAGAIN, "Resource temporarily unavailable")
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(no_memory))
            fleet.request("r1")
            seen.extend(fleet.poll())
        assert seen.of("r1") == ["died"] and "cannot be run: Resource temporarily unavailable" in seen[-1].text
        poll_until(fleet, seen, lambda: training(fleet, "r1"))
        assert training(fleet, "r0")


def test_a_lighthouse_whose_port_is_taken_at_a_restart_does_not_end_the_fleet(
    fake_job: MakeJob, tmp_path: Path
) -> None:
    pytest.importorskip("torchft", reason="the lighthouse is torchft's: pip install 'ebbflow[live]'")
    lighthouse = LighthouseProcess(tmp_path / "lighthouse", LighthouseOptions())
    host, port = parse_address(lighthouse.address)
    seen = Seen()

    def free() -> bool:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return True
        return False

    with Supervisor(fake_job("train"), lighthouse) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        lighthouse._child.kill()
        until(free)
        with socket.create_server((host, port)):
            poll_until(fleet, seen, lambda: "lighthouse down" in seen.of(""))
        poll_until(fleet, seen, lambda: "lighthouse restarted" in seen.of(""))
        assert fetch_lighthouse_status(lighthouse.address).quorum_id == 0
        assert training(fleet, "r0") and seen.of("r0") == ["started"]
    down = next(event.text for event in seen if event.what == "lighthouse down")
    assert "cannot listen on" in down and "the next try is in 1 s" in down


def test_a_lighthouse_that_is_killed_again_and_again_is_down_because_of_the_signal(tmp_path: Path) -> None:
    """Its log says nothing but that it listens."""
    pytest.importorskip("torchft", reason="the lighthouse is torchft's: pip install 'ebbflow[live]'")
    lighthouse = LighthouseProcess(tmp_path / "lighthouse", LighthouseOptions())
    told: list[tuple[str, str]] = []

    def happened() -> bool:
        event = lighthouse.restart_if_dead()
        told.extend(filter(None, [event]))
        return event is not None

    try:
        for _ in range(2):
            lighthouse._child.kill()
            until(happened)
    finally:
        lighthouse.close()
    assert told == [("lighthouse restarted", ""), ("lighthouse down", "killed by SIGKILL; the next try is in 1 s")]


def test_a_replica_that_does_not_leave_in_time_is_killed(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("stubborn")) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        seen.extend(fleet.stop("r0", grace_s=0.1))
        poll_until(fleet, seen, lambda: not fleet.active)
    assert seen.of("r0") == ["started", "told to leave", "killed", "left"]


def test_a_replica_that_is_requested_again_while_it_leaves_comes_back(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("train")) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        seen.extend(fleet.stop("r0"))
        fleet.request("r0")
        poll_until(fleet, seen, lambda: fleet.replicas["r0"].incarnations == 2 and training(fleet, "r0"))
        seen.extend(fleet.stop("r0", kill=True))
        fleet.request("r0")  # as in a trace whose next change is due at once
        poll_until(fleet, seen, lambda: fleet.replicas["r0"].incarnations == 3 and training(fleet, "r0"))
        seen.extend(fleet.stop("r0", kill=True))
        poll_until(fleet, seen, lambda: not fleet.active)
    ends = ["told to leave", "left", "started", "killed", "left", "started", "killed", "left"]
    assert seen.of("r0") == ["started", *ends]
    assert fleet.replicas["r0"].deaths == 0


def test_a_stopped_process_is_killed_too(fake_job: MakeJob) -> None:
    seen = Seen()
    with Supervisor(fake_job("train")) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        child = fleet.replicas["r0"].child
        assert child is not None
        child.send(signal.SIGSTOP)
    assert not alive(child.pid)


@pytest.mark.parametrize("how", ["killed by us", "killed by someone", "at the end"])
def test_what_a_replica_started_goes_with_it(fake_job: MakeJob, how: str) -> None:
    seen = Seen()
    with Supervisor(fake_job("nested")) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: training(fleet, "r0"))
        grandchild = int((fleet.job.fleet.folder / "replicas" / "r0" / "child").read_text())
        assert alive(grandchild)
        if how == "killed by us":
            fleet.stop("r0", kill=True)
        elif how == "killed by someone":
            child = fleet.replicas["r0"].child
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
        if how != "at the end":
            poll_until(fleet, seen, lambda: not alive(grandchild))
    until(lambda: not alive(grandchild))


def test_progress_is_a_step_of_this_incarnation_not_the_state_its_peers_gave_it(fake_job: MakeJob) -> None:
    """A replica that dies whenever it has joined must be given up one day, however far its peers are."""
    fleet = Supervisor(fake_job("train"))
    fleet.request("r0")
    replica = fleet.replicas["r0"]
    folder = fleet.job.fleet.folder / "replicas" / "r0"
    folder.mkdir(parents=True)
    with fleet:
        fleet.poll()
        assert replica.child is not None
        replica.child.kill()
        for state, step, progressed in [("joining", 0, False), ("training", 500, False), ("training", 501, True)]:
            (folder / "status.json").write_text(f'{{"state": "{state}", "step": {step}, "time": {time.time()}}}')
            fleet._check(replica, _Running(replica.child.began))  # type: ignore[arg-type]
            assert replica.progressed == progressed


class _Running:
    def __init__(self, began: float) -> None:
        self.began = began

    def exit_code(self) -> None:
        return None


def test_a_program_that_is_not_there_is_an_error_of_ours(fake_job: MakeJob, tmp_path: Path) -> None:
    fleet_config = FleetConfig(job="x", folder=tmp_path / "job", lighthouse="127.0.0.1:1")
    job = Job(command=("/no/such/program",), fleet=fleet_config)
    with Supervisor(job) as fleet:
        fleet.request("r0")
        with pytest.raises(ConfigError, match="/no/such/program cannot be run"):
            fleet.poll()


# The loop around it ---------------------------------------------------------------------------------------------------


def run_to_the_end(
    fleet: Supervisor, *, stop_when: Callable[[], object] = bool
) -> tuple[Ending, list[tuple[str, str]]]:
    """Supervise a fleet to its end; `stop_when` stands for the user, who presses Ctrl-C once it is true."""
    seen: list[FleetEvent] = []
    with fleet, StopSignal() as stop:

        def on_poll() -> None:
            if not stop.requested and stop_when():
                signal.raise_signal(signal.SIGINT)

        ending, _ = supervise(fleet, stop=stop, grace_s=20, on_event=seen.append, on_poll=on_poll)
    return ending, [(event.replica, event.what) for event in seen]


def test_replicas_that_do_not_finish_with_the_others_are_told_to_leave(
    fake_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_OTHERS_MAY_FINISH_S", 0.1)
    fleet = Supervisor(fake_job("first", 5))
    fleet.request("r0")
    fleet.request("r1")
    outcome, seen = run_to_the_end(fleet)
    assert outcome is Ending.FINISHED
    assert seen[2:] == [("r0", "finished"), ("r1", "told to leave"), ("r1", "left")]


def test_a_fleet_whose_replicas_are_all_given_up_has_failed(fake_job: MakeJob) -> None:
    fleet = Supervisor(fake_job("crash"), policy=RestartPolicy(max_failures=1))
    fleet.request("r0")
    assert run_to_the_end(fleet) == (Ending.FAILED, [("r0", "started"), ("r0", "gave up")])


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "ending", "starts", "reason"),
    [
        ("never", Ending.INCOMPLETE, 1, "r0: the script ended without joining the fleet"),
        ("break", Ending.INCOMPLETE, 1, "r0: the loop ended after step 3"),
        ("vanish", Ending.INCOMPLETE, 1, "r0: the script ended while training"),
        ("unsaved", Ending.INCOMPLETE, 1, "the final state, of step 3, was not saved: the newest checkpoint is of"),
        ("diverge", Ending.DIVERGED, 1, "r0: Diverged: the training loss is nan"),
        ("raise", Ending.FAILED, 3, "r0: ValueError: no such metric"),
    ],
)  # fmt: skip
def test_a_job_is_judged_by_its_files_and_not_by_the_exit_code_of_the_script(
    fake_job: MakeJob, mode: str, ending: Ending, starts: int, reason: str
) -> None:
    fleet = Supervisor(fake_job(mode), policy=RestartPolicy(first_pause_s=0.05), lighthouse=_NoLighthouse())  # type: ignore[arg-type]
    fleet.request("r0")
    with fleet, StopSignal() as stop:
        found = supervise(fleet, stop=stop, grace_s=20, on_event=lambda event: None, on_poll=lambda: None)
    assert found[0] is ending
    assert found[1].startswith(reason)
    assert fleet.replicas["r0"].incarnations == starts


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("train", "not finished; the same command continues"),
        ("full", "not finished; the same command continues; step 7 could not be saved"),
    ],
)
def test_a_fleet_that_is_stopped_says_what_was_not_saved(fake_job: MakeJob, mode: str, line: str) -> None:
    fleet = Supervisor(fake_job(mode))
    for name in ("r0", "r1"):
        fleet.request(name)
    with fleet, StopSignal() as stop:

        def stop_when_all_train() -> None:
            if all(one.status is not None and one.status.state == "training" for one in fleet.replicas.values()):
                stop.request()

        found = supervise(fleet, stop=stop, grace_s=20, on_event=lambda event: None, on_poll=stop_when_all_train)
    assert found == (Ending.STOPPED, line)


@pytest.mark.process
@pytest.mark.parametrize("saved", [False, True])
def test_a_fleet_whose_disk_is_full_is_told_what_it_will_repeat_although_no_replica_can_say_so(
    fake_job: MakeJob, saved: bool
) -> None:
    """The launcher compares the newest checkpoint with the last status that was written."""
    fleet = Supervisor(fake_job("train"), lighthouse=_NoLighthouse())  # type: ignore[arg-type]
    fleet.request("r0")
    if saved:
        checkpoint = fleet.job.fleet.folder / "checkpoints" / f"step-{10**8}-{0:012x}-{0:08x}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "ebbflow.json").touch()
    with fleet, StopSignal() as stop:

        def stop_when_trained() -> None:
            if fleet.replicas["r0"].progressed:
                stop.request()

        ending, line = supervise(fleet, stop=stop, grace_s=20, on_event=lambda event: None, on_poll=stop_when_trained)
    assert ending is Ending.STOPPED
    told = "was not saved: there is no checkpoint; the steps since will be repeated"
    assert line.endswith("the same command continues" if saved else told)


class _NoLighthouse:
    """One that runs on this machine and never dies."""

    def restart_if_dead(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.process
def test_a_trace_is_not_played_on_without_replicas(fake_job: MakeJob) -> None:
    fleet = Supervisor(fake_job("crash"), policy=RestartPolicy(max_failures=1))
    fleet.request("r0")
    with fleet, StopSignal() as stop:
        ending, _ = supervise(
            fleet, stop=stop, grace_s=20, on_event=lambda event: None, on_poll=lambda: None, act=lambda: []
        )
    assert ending is Ending.FAILED


def test_a_signal_tells_all_replicas_to_leave(fake_job: MakeJob) -> None:
    fleet = Supervisor(fake_job("train"))
    fleet.request("r0")
    outcome, seen = run_to_the_end(fleet, stop_when=lambda: fleet.replicas["r0"].progressed)
    assert (outcome, seen[1:]) == (Ending.STOPPED, [("r0", "told to leave"), ("r0", "left")])
    status = read_status(fleet.job.fleet.folder, "r0")
    assert status is not None
    assert status.state == "left"


@pytest.mark.parametrize("what", ["nobody reads it", "its disk is full"])
def test_what_a_launcher_cannot_show_does_not_end_its_fleet(fake_job: MakeJob, what: str) -> None:
    reader, writer = os.pipe() if what == "nobody reads it" else (os.open(os.devnull, 0), os.open("/dev/full", 1))
    os.close(reader)
    shown = os.fdopen(writer, "w")
    with Supervisor(fake_job("train", 5)) as fleet:
        fleet.request("r0")
        run = run_fleet(fleet, grace_s=20, console=Console(file=shown), title=lambda: "")
    with contextlib.suppress(OSError):  # what it could not write
        shown.close()
    assert (run.ending, run.counts["finished"]) == (Ending.FINISHED, 1)


def test_a_terminal_that_is_closed_tells_all_replicas_to_leave(fake_job: MakeJob) -> None:
    """The shell and the system may both say so: the second time does not kill them."""

    def when_trained() -> tuple[()]:
        if fleet.replicas["r0"].progressed:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        return ()

    console = Console(file=io.StringIO())
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests themselves ignore it
    try:
        with Supervisor(fake_job("train", 10**6)) as fleet:
            fleet.request("r0")
            run = run_fleet(fleet, grace_s=20, console=console, title=lambda: "", act=when_trained)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (run.ending, run.signalled, run.counts["left"]) == (Ending.STOPPED, True, 1)


def test_a_replica_that_left_by_itself_is_not_started_again(fake_job: MakeJob) -> None:
    """As when a cloud sends SIGTERM: the machine is about to be taken away."""
    fleet = Supervisor(fake_job("train"))
    fleet.request("r0")
    sent: list[bool] = []

    def send_it_once() -> bool:
        replica = fleet.replicas["r0"]
        if not sent and replica.progressed and replica.child:
            sent.append(True)
            replica.child.send(signal.SIGTERM)
        return False

    assert run_to_the_end(fleet, stop_when=send_it_once) == (Ending.STOPPED, [("r0", "started"), ("r0", "left")])


def test_the_ranks_of_a_replica_end_and_start_together(fake_job: MakeJob, tmp_path: Path) -> None:
    def ranks() -> dict[str, int]:
        found = {}
        for process in processes_with(f"EBBFLOW_FOLDER={tmp_path}"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                said = Path(f"/proc/{process}/environ").read_text().split("\0")
                found |= {part: process for part in said if part.startswith("RANK=")}
        return found

    seen = Seen()
    with Supervisor(dataclasses.replace(fake_job("train"), ranks=3), policy=QUICK) as fleet:
        fleet.request("r0")
        poll_until(fleet, seen, lambda: len(ranks()) == 3 and fleet.replicas["r0"].progressed)
        first = ranks()
        assert sorted(first) == ["RANK=0", "RANK=1", "RANK=2"]
        os.kill(first["RANK=2"], signal.SIGKILL)
        poll_until(fleet, seen, lambda: seen.of("r0").count("started") == 2 and len(ranks()) == 3)
        assert seen.of("r0") == ["started", "died", "started"] and "SIGKILL" in seen[1].text
        assert set(ranks().values()).isdisjoint(first.values()) and not any(map(alive, first.values()))
        fleet.stop("r0")
        poll_until(fleet, seen, lambda: not fleet.active)  # all of them got the signal
    folder = tmp_path / "job" / "replicas" / "r0"
    assert sorted(path.name for path in folder.glob("log*.txt")) == ["log-rank1.txt", "log-rank2.txt", "log.txt"]
