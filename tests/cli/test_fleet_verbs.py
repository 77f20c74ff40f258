"""`launch`, `replay`, `status` and `lighthouse` as processes, with replicas that need no torch."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="the live extra is not installed")

from cli.answers import Ebbflow
from cli.conftest import Shell
from live.fakes import FAKE, alive, processes_with, until


@pytest.mark.process
def test_a_fleet_runs_to_its_end_and_is_accounted_for(shell: Shell) -> None:
    code, out, err = shell.run("launch", "--replicas", 2, "--out", "job", "--json", FAKE, "train", 5)
    account = json.loads(out)
    assert code == 0
    assert (account["status"], account["starts"], account["restarts"], account["deaths"]) == ("finished", 2, 0, 0)
    assert account["lighthouse"].startswith("127.0.0.1:")
    assert "r0 started" in err
    assert "r1 finished" in err


@pytest.mark.process
def test_everything_behind_the_script_belongs_to_it(shell: Shell) -> None:
    script = shell.folder / "show.py"
    script.write_text("import sys; print('got', sys.argv[1:])")
    own = ["--seed", "3", "--folder", "f", "--port", "1", "--name", "n", "--json", "--", "x"]
    code, _, _ = shell.run("launch", "--out", "job", script, *own)
    assert code == 4, "it never joined the fleet"
    assert f"got {own}" in (shell.folder / "job" / "replicas" / "r0" / "log.txt").read_text()
    code, _, _ = shell.run("replay", "0s:1 60s", "--out", "job", script, *own)
    assert code == 4
    assert (shell.folder / "job" / "replicas" / "r0" / "log.txt").read_text().count(f"got {own}") == 2


@pytest.mark.process
def test_a_job_that_is_run_from_scratch_keeps_its_old_files(shell: Shell) -> None:
    assert shell.run("launch", "--out", "job", FAKE, "train", 7)[0] == 0
    assert shell.run("launch", "--out", "job", "--from-scratch", FAKE, "train", 5)[0] == 0
    assert [path.name[:14] for path in (shell.folder / "job" / "checkpoints").iterdir()] == ["step-000000005"]
    assert (shell.folder / "job" / "earlier-1" / "checkpoints").is_dir()
    assert (shell.folder / "job" / "earlier-1" / "weights.pt").is_file()


@pytest.mark.process
def test_ctrl_c_lets_the_replicas_leave(shell: Shell) -> None:
    launcher = shell.start("launch", "--replicas", 2, "--out", "job", FAKE, "train")
    until(lambda: shell.training("r0", "r1"))
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 3
    assert "not finished; the same command continues" in out
    assert shell.status("r0")["state"] == shell.status("r1")["state"] == "left"


@pytest.mark.process
def test_a_second_ctrl_c_kills_those_who_do_not_leave(shell: Shell) -> None:
    launcher = shell.start("launch", "--out", "job", FAKE, "stubborn")
    until(lambda: shell.training("r0"))
    pid = shell.status("r0")["pid"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    until(lambda: "told to leave" in launcher.stderr.readline())  # type: ignore[union-attr]
    time.sleep(0.2)  # sooner, it would be taken for the first one that is passed on
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 3
    assert not alive(pid)


@pytest.mark.process
def test_not_even_kill_9_of_the_launcher_leaves_a_process_behind(shell: Shell) -> None:
    launcher = shell.start("launch", "--replicas", 2, "--out", "job", FAKE, "stubborn")
    until(lambda: shell.training("r0", "r1"))
    assert len(processes_with(f"{shell.folder}/job")) == 3  # two replicas and the lighthouse
    launcher.kill()
    launcher.wait()
    until(lambda: not processes_with(f"{shell.folder}/job"))
    # And the folder is free again.
    assert shell.run("launch", "--out", "job", FAKE, "train", 1)[0] == 0


@pytest.mark.process
def test_a_script_with_a_bug_ends_the_launch_with_the_end_of_its_log(shell: Shell) -> None:
    code, _, err = shell.run("launch", "--out", "job", "--max-failures", 2, FAKE, "crash")
    assert code == 1
    assert "r0 gave up: exit code 3, 2 times in a row without a step" in err
    assert "r0 died: exit code 3 (ZeroDivisionError: the bug of this script); starting again" in err
    assert err.rstrip().endswith("\n    ZeroDivisionError: the bug of this script"), "the end of its log, once"
    assert err.count("ZeroDivisionError: the bug of this script") == 2


@pytest.mark.process
def test_a_killed_lighthouse_comes_back_at_its_address(shell: Shell) -> None:
    launcher = shell.start("launch", "--out", "job", FAKE, "train")
    until(lambda: shell.training("r0"))
    address = json.loads((shell.folder / "job" / "fleet.json").read_text())["lighthouse"]
    (lighthouse,) = (pid for pid in processes_with(f"{shell.folder}/job/lighthouse/address"))
    os.kill(lighthouse, signal.SIGKILL)
    assert launcher.stderr is not None
    until(lambda: "lighthouse restarted" in launcher.stderr.readline())  # type: ignore[union-attr]
    assert shell.run("status", address)[0] == 0
    (lighthouse,) = (pid for pid in processes_with(f"--bind\0{address}"))
    os.kill(lighthouse, signal.SIGSTOP)
    _, _, shown = shell.run("status", "job")
    assert "no lighthouse answers" in shown and "r0       training" in shown, "what the files of the replicas say"
    os.kill(lighthouse, signal.SIGKILL)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=120)


@pytest.mark.process
def test_one_replica_joins_a_fleet_elsewhere(shell: Shell) -> None:
    address = shell.folder / "address"
    lighthouse = shell.start("lighthouse", "--bind", "127.0.0.1:0", "--address-file", address)
    until(address.exists)
    joined = shell.start("launch", "--join", address.read_text(), "--name", "node 7", "--out", "job", FAKE, "train")
    until(lambda: shell.training("node-7"))
    environment = Path(f"/proc/{shell.status('node-7')['pid']}/environ").read_text().split("\0")
    assert f"EBBFLOW_LIGHTHOUSE={address.read_text()}" in environment
    assert "EBBFLOW_BIND=127.0.0.1" in environment  # the way to the lighthouse is loopback
    same = shell.run("launch", "--join", address.read_text(), "--name", "node 7", "--out", "job", FAKE, "train")
    assert same[0] == 2
    assert "is in use by another launcher" in same[2]
    joined.send_signal(signal.SIGTERM)  # what a cloud sends
    joined.communicate(timeout=120)
    assert shell.status("node-7")["state"] == "left"
    lighthouse.send_signal(signal.SIGTERM)
    assert lighthouse.wait(timeout=120) == 0


def listening(pid: int) -> set[str]:
    """Local addresses, in the kernel's hexadecimal form, on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            sockets.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and inode in sockets:
                found.add(local.partition(":")[0])
    return found


@pytest.mark.process
def test_the_lighthouse_listens_on_the_address_it_is_told_alone(shell: Shell) -> None:
    address = shell.folder / "address"
    lighthouse = shell.start("lighthouse", "--bind", "127.0.0.1:0", "--address-file", address)
    until(address.exists)
    assert listening(lighthouse.pid) == {"0100007F"}  # 127.0.0.1


@pytest.mark.process
def test_a_replay_follows_the_trace_with_real_processes(shell: Shell) -> None:
    # Two for a second, one for a second, nobody for half a second, two to the end: 2 + 2 starts, 2 losses.
    trace = "0s:2 60s:1 120s:0 150s:2 240s"
    code, out, _ = shell.run(
        "replay", trace, "--speed", 60, "--signal", "kill", "--out", "job", "--json", FAKE, "train"
    )
    account = json.loads(out)
    assert code == 4, "the trace is over, and the job is not done"
    assert (account["status"], account["trace_over"]) == ("trace over", True)
    assert (account["starts"], account["kills"], account["notices"], account["deaths"]) == (4, 2, 0, 0)


@pytest.mark.process
def test_a_replay_ends_when_the_job_is_done(shell: Shell) -> None:
    code, out, _ = shell.run("replay", "--out", "job", "0s:2 600s", "--json", FAKE, "train", 5)
    account = json.loads(out)
    assert (code, account["status"], account["trace_over"]) == (0, "finished", False)


@pytest.mark.parametrize("verb", ["launch", "status", "replay", "lighthouse"])
def test_every_verb_helps(verb: str, ebbflow: Ebbflow) -> None:
    assert f"ebbflow {verb}" in ebbflow(verb, "--help").text


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["launch"], ["nothing to run", "--workload"]),
        (["launch", "--replcas", "4", "x.py"], ["unknown option --replcas"]),
        (["launch", "no.py"], ["no.py: no such file"]),
        (["launch", "-m"], ["-m needs the name of a module"]),
        (["launch", "--replicas", "0", FAKE], ["replicas is 0; expected at least 1"]),
        (["launch", "--max-failures", "0", FAKE], ["max-failures is 0; expected at least 1"]),
        (["replay", "0s:1 9s", "--max-failures", "-1", FAKE], ["max-failures is -1; expected at least 1"]),
        (["launch", "--heartbeat-timeout", "500", FAKE], ["has no unit"]),
        (["launch", "--heartbeat-timeout", "0s", FAKE], ["heartbeat-timeout is 0s; expected at least 300ms"]),
        (["launch", "--join", "127.0.0.1:1", "--from-scratch", FAKE], ["give a new --out to all replicas"]),
        (["launch", "--workload", "digits-mlp", FAKE], ["runs without a script"]),
        (["launch", "--name", "x", FAKE], ["--name belongs to --join"]),
        (["launch", "--join", "somewhere", "--replicas", "2", FAKE], ["--join starts one replica"]),
        (["launch", "--join", "10.0.0.1:x", FAKE], ["'10.0.0.1:x' is not an address", "HOST:PORT"]),
        (["launch", "--join", "192.0.2.1:1", "--bind", "127.0.0.1", FAKE], ["cannot be reached by the others"]),
        (["launch", "--bind", "192.0.2.1", FAKE, "train"], ["the lighthouse did not start", "cannot listen on"]),
        (["launch", "--bind", "0.0.0.0", FAKE], ["--bind 0.0.0.0 means every network of this machine"]),
        (["launch", "--join", "10.0.0.7", "--bind", "10.0.0.7:80", FAKE], ["expected an address without a port"]),
        (["lighthouse", "--bind", "0.0.0.0:0"], ["--bind 0.0.0.0 means every network of this machine"]),
        (["lighthouse", "--bind", "[::]:0"], ["--bind :: means every network of this machine"]),
        (["lighthouse", "--bind", "192.0.2.1:0"], ["cannot listen on 192.0.2.1:0", "choose another"]),
        (["status", "127.0.0.1:1"], ["no lighthouse answers at 127.0.0.1:1", "is the fleet running"]),
        (["status", "."], ["fleet.json: no such file", "ebbflow launch"]),
        (["status", "runs/mistyped"], ["runs/mistyped: no such folder", "HOST:PORT"]),
        (["replay", "nothing.csv", FAKE], ["nothing.csv"]),
        (["replay", "0s:1 9s", "--signal", "hup", FAKE], ["signal is 'hup'; expected kill, term or mixed"]),
        (["replay", "0s:1 9s", "--speed", "0", FAKE], ["speed is 0"]),
    ],
)
def test_bad_input_is_explained(arguments: list[object], messages: list[str], ebbflow: Ebbflow) -> None:
    ebbflow(*arguments).assert_refused(*messages)


@pytest.mark.process
def test_more_gpus_than_there_are_for_all_replicas_are_refused(
    ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica without one would train on a CPU, or fail with a message about something else."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    ran = ebbflow("launch", "--replicas", "2", "--gpus", "2", FAKE, "train")
    ran.assert_refused("2 replicas with 2 GPUs each (--gpus) need 4, and CUDA_VISIBLE_DEVICES has 3: 4,5,6")


@pytest.mark.process
def test_a_number_of_ranks_that_a_replica_cannot_have_is_named(shell: Shell) -> None:
    code, _, err = shell.run("launch", "--ranks-per-replica", 0, FAKE, "train")
    assert code == 2 and "ranks-per-replica is 0; expected at least 1" in err
    code, _, err = shell.run("launch", "--ranks-per-replica", 2, "--gpus", 1, FAKE, "train")
    assert code == 2 and "a replica has 2 ranks (--ranks-per-replica) and 1 GPUs" in " ".join(err.split())
