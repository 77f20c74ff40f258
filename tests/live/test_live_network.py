"""Replicas in network namespaces, whose links are cut or blocked, and restored: never do two lineages both go on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live.harness import CONTEXT, HEARTBEAT_MS, TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS
from ebbflow.live.accounting import read_fleet
from live import replicas

pytestmark = pytest.mark.process

HUB = f"ebb{os.getpid() % 10_000}h"
ENDS = {name: f"ebb{os.getpid() % 10_000}{name}" for name in ("r0", "r1", "r2")}
ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate(ENDS, start=10)}
NOWHERE = "10.77.0.99"


def ip(*words: str, inside: str | None = None) -> None:
    command = ["ip", *(["netns", "exec", inside, "ip"] if inside else []), *words]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """A namespace with a bridge and the lighthouse, and one for each replica, linked to it."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the program ip, and root")
    try:
        ip("netns", "add", HUB)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", "bridge", "type", "bridge", inside=HUB)
        ip("addr", "add", "10.77.0.1/24", "dev", "bridge", inside=HUB)
        ip("link", "set", "bridge", "up", inside=HUB)
        for name, space in ENDS.items():
            ip("netns", "add", space)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth", "netns", space, inside=HUB)
            ip("link", "set", name, "master", "bridge", "up", inside=HUB)
            ip("addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth", inside=space)
            ip("link", "set", "eth", "up", inside=space)
            ip("link", "set", "lo", "up", inside=space)
        yield
    finally:
        for space in (HUB, *ENDS.values()):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


@contextlib.contextmanager
def training(folder: Path, **arguments: Any) -> Iterator[TestFleet]:
    """Three replicas that train together, one in each namespace."""
    lighthouse = CONTEXT.Process(target=replicas.lighthouse, args=(HUB, "10.77.0.1:29510", HEARTBEAT_MS), daemon=True)
    lighthouse.start()
    try:
        with TestFleet(folder, replicas.tiny, {"all": list(ENDS), "hold": 4, **arguments}) as fleet:
            fleet.host, fleet.port = "10.77.0.1", 29510
            for name, space in ENDS.items():
                fleet.start(name, network=space, bind=ADDRESSES[name])
            fleet.trains(*ENDS, step=5, members=3)
            yield fleet
    finally:
        lighthouse.kill()
        lighthouse.join()


def check(folder: Path) -> None:
    """Every sample counted once, and all have the same weights."""
    account, runs = read_fleet(folder)
    assert account.mistakes == () and account.epochs == EPOCHS
    assert account.given_up <= 1, "at most the step during which the link was cut"
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1


@pytest.mark.parametrize("cut", ["r0", "r2"])
def test_a_replica_that_is_cut_off_stops_and_rejoins_when_the_link_is_restored(
    network: None, tmp_path: Path, cut: str
) -> None:
    with training(tmp_path) as fleet:
        ip("link", "set", cut, "down", inside=HUB)
        others = [name for name in ENDS if name != cut]
        before = fleet.status(cut)["step"]
        fleet.trains(*others, step=before + 4, members=2)
        # When the link was cut, its last step may not have been in its status yet, and one more may have been added up.
        assert fleet.status(cut)["step"] <= before + 2, "the replica that is cut off commits nothing"
        ip("link", "set", cut, "up", inside=HUB)
        fleet.trains(*ENDS, step=before + 4, members=3)
        fleet.stop_holding()
        assert set(fleet.wait().values()) == {0}
    check(tmp_path)


def test_a_link_that_is_slow_but_alive_costs_no_replica_and_no_sample(network: None, tmp_path: Path) -> None:
    """256 kbit/s: a step of some 2 kB takes a tenth of a second, and the whole state of a newcomer as well."""
    limit = ("qdisc", "add", "dev", "eth", "root", "tbf", "rate", "256kbit", "burst", "8kb", "latency", "2s")
    slowed = subprocess.run(["ip", "netns", "exec", ENDS["r2"], "tc", *limit], capture_output=True, check=False)
    if slowed.returncode != 0:
        pytest.skip(f"a link cannot be limited here: {slowed.stderr.decode().strip()}")
    with training(tmp_path) as fleet:
        fleet.processes["r2"].kill()
        fleet.processes["r2"].join()
        fleet.start("r2", network=ENDS["r2"], bind=ADDRESSES["r2"])
        fleet.trains(*ENDS, step=8, members=3)
        fleet.stop_holding()
        assert set(fleet.wait().values()) == {0}
    check(tmp_path)
    _, runs = read_fleet(tmp_path)
    received = [event.what for run in runs for event in run.events if run.path.parent.name == "r2"]
    assert "received" in received, "the state came over the slow link"


@pytest.mark.parametrize(
    "pair",
    [("r0", "r1"), pytest.param(("r1", "r2"), marks=pytest.mark.long)],  # the store where all meet is that of r0
)
def test_a_cut_link_between_two_replicas_leaves_one_of_them_out_until_it_is_restored(
    network: None, tmp_path: Path, pair: tuple[str, str]
) -> None:
    with training(tmp_path, patience_s=3.0) as fleet:
        for one, other in (pair, pair[::-1]):  # what they send each other goes to a machine that is not there
            nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth", "nud", "permanent")
            ip("neigh", "replace", ADDRESSES[other], *nowhere, inside=ENDS[one])
        before = fleet.status("r0")["step"]
        others = [name for name in ENDS if name != pair[1]]
        fleet.trains(*others, step=before + 4, members=2)
        eventually(lambda: fleet.status(pair[1])["state"] == "waiting", "a word of the one that is left out")
        status = fleet.status(pair[1])
        assert "left out" in status["reason"] and pair[0] in status["reason"]
        for one, other in (pair, pair[::-1]):
            ip("neigh", "del", ADDRESSES[other], "dev", "eth", inside=ENDS[one])
        fleet.trains(*ENDS, step=status["step"] + 4, members=3)
        fleet.stop_holding()
        assert set(fleet.wait().values()) == {0}
    check(tmp_path)


def block(one: str, other: str, stores: dict[str, str], how: str) -> None:
    """A firewall, on the machine of one replica, that lets only what is for the stores of the two through to the other.

    What is dropped goes to a machine that is not there. What is rejected fails at once.
    """
    to = ("to", ADDRESSES[other], "ipproto", "tcp")
    ip("rule", "add", "pref", "10", *to, "dport", stores[other], "lookup", "main", inside=ENDS[one])
    ip("rule", "add", "pref", "10", *to, "sport", stores[one], "lookup", "main", inside=ENDS[one])
    if how == "rejected":
        ip("rule", "add", "pref", "20", *to, "unreachable", inside=ENDS[one])
        return
    nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth", "nud", "permanent")
    ip("neigh", "replace", NOWHERE, *nowhere, inside=ENDS[one])
    through = ("via", NOWHERE, "dev", "eth", "onlink", "table", "100")
    ip("route", "add", ADDRESSES[other], *through, inside=ENDS[one])
    ip("rule", "add", "pref", "20", *to, "lookup", "100", inside=ENDS[one])


def unblock(one: str) -> None:
    for priority in ("10", "10", "20"):
        ip("rule", "del", "pref", priority, inside=ENDS[one])


def store_ports(folder: Path) -> dict[str, str]:
    """The ports of the stores of all replicas, which are parts of their names."""
    _, runs = read_fleet(folder)
    members = next(event.text for run in runs for event in run.events if event.what == "members")
    return {name.partition(":")[0]: name.rpartition(":")[2] for name in members.split()}


@pytest.mark.parametrize(
    ("pair", "how", "opened"),
    [
        (("r1", "r2"), "rejected", True),
        pytest.param(("r0", "r1"), "dropped", True, marks=pytest.mark.long),  # the store where all meet is that of r0
        pytest.param(("r1", "r2"), "dropped", False, marks=pytest.mark.long),
    ],
)
def test_a_firewall_between_two_of_three_replicas_leaves_one_of_them_out_until_it_is_opened(
    network: None, tmp_path: Path, pair: tuple[str, str], how: str, opened: bool
) -> None:
    """If it stays closed until the others have finished, the one that was left out takes over their last state."""
    with training(tmp_path, patience_s=3.0) as fleet:
        stores = store_ports(tmp_path)
        try:
            for one, other in (pair, pair[::-1]):
                block(one, other, stores, how)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"ports cannot be blocked here: {error.stderr.decode().strip()}")
        before = fleet.status("r0")["step"]
        (out,) = eventually(
            lambda: [name for name in pair if "left out of the fleet" in fleet.status(name).get("reason", "")],
            "a word of the one that is left out",
        )
        (reached,) = {*pair} - {out}
        assert f"connections with {reached}:" in fleet.status(out)["reason"]
        fleet.trains(*{*ENDS} - {out}, step=before + 4, members=2)
        if opened:
            for one in pair:
                unblock(one)
            fleet.trains(*ENDS, step=before + 8, members=3)
        fleet.stop_holding()
        assert set(fleet.wait().values()) == {0}
    check(tmp_path)


@pytest.mark.long
def test_two_replicas_with_a_firewall_between_them_end_with_what_the_backend_says(
    network: None, tmp_path: Path
) -> None:
    with training(tmp_path, patience_s=3.0, failing_s=20.0) as fleet:
        stores = store_ports(tmp_path)
        fleet.processes["r2"].kill()
        fleet.trains("r0", "r1", step=8, members=2)
        try:
            for one, other in (("r0", "r1"), ("r1", "r0")):
                block(one, other, stores, "dropped")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"ports cannot be blocked here: {error.stderr.decode().strip()}")
        assert set(fleet.wait("r0", "r1", within_s=240.0).values()) == {1}
        assert "firewall" in fleet.status("r0")["reason"] and "connections with r1:" in fleet.status("r0")["reason"]
    account, _ = read_fleet(tmp_path)
    assert account.mistakes == ()
