"""What is known of a fleet, and how it is shown."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from ebbflow.cli.common import out
from ebbflow.core.key_store import KeyStore
from ebbflow.live.fleet_status import combine, members_table
from ebbflow.live.protocol import (
    STATUS_KEY,
    LighthouseStatus,
    ReplicaStatus,
    fetch_statuses,
    parse_lighthouse_page,
)
from live.fakes import LIGHTHOUSE_PAGE


def reported(state: str, **values: Any) -> ReplicaStatus:
    return ReplicaStatus(state=state, time=1000.0, **values)


def test_what_lighthouse_and_replicas_report_is_combined() -> None:
    statuses = {
        "r1": reported("training", step=43, epoch=1, batch=64, lr=0.2, multiplier=2.0, samples_per_s=640.0, loss=0.5),
        "r2": reported("training", step=12, batch=32),  # killed: no heartbeat, and not in the quorum
        "r3": reported("finished", step=9),
        "r4": reported("starting"),
    }
    status = combine("127.0.0.1:1", parse_lighthouse_page(LIGHTHOUSE_PAGE), statuses)
    assert [(m.name, m.state, m.step) for m in status.members] == [
        ("r0", "recovering", 0), ("r1", "training", 43), ("r2", "dead", 12), ("r3", "finished", 9),
        ("r4", "starting", None),
    ]  # fmt: skip
    assert (status.step, status.batch, status.lr, status.samples_per_s) == (43, 64, 0.2, 640.0)


def test_the_status_says_what_a_further_worker_is_worth() -> None:
    # 400 samples of 4 workers at 400 samples/s with a noise scale of 300 and a reference batch of 100: see
    # tests/plan/test_goodput.py. 0.9 USD per hour and worker are 4.375 USD per million reference samples.
    known: dict[str, Any] = {
        "step": 43, "batch": 400, "workers": 4, "samples_per_s": 400.0, "ref_batch": 100, "noise_scale": 300.0,
    }  # fmt: skip
    page = parse_lighthouse_page(LIGHTHOUSE_PAGE)
    status = combine("127.0.0.1:1", page, {"r1": reported("training", **known)}, price=0.9)
    assert status.worth is not None
    assert status.worth.now.usd_per_million == pytest.approx(4.375)
    assert status.worth.gain == pytest.approx(0.09375)
    assert json.dumps(dataclasses.asdict(status))
    for missing in known:
        if missing not in ("step", "batch"):
            lacking = {**known, missing: None}
            assert combine("127.0.0.1:1", page, {"r1": reported("training", **lacking)}).worth is None
    free = combine("127.0.0.1:1", page, {"r1": reported("training", **known)}).worth
    assert free is not None and free.now.usd_per_million is None


def test_the_status_says_why_a_replica_waits() -> None:
    why = "2 of at least 3 replicas (--min-replicas) are here: r0, r1"
    statuses = {"r0": reported("waiting", step=40, reason=why), "r1": reported("training", step=43)}
    status = combine("127.0.0.1:1", parse_lighthouse_page(LIGHTHOUSE_PAGE), statuses)
    assert [(m.state, m.reason) for m in status.members] == [("waiting", why), ("training", None)]
    page = Console(file=io.StringIO(), width=80)
    page.print(members_table(status))
    assert isinstance(page.file, io.StringIO)
    assert f"r0: {why}" in page.file.getvalue()


def test_without_status_files_the_lighthouse_is_believed() -> None:
    status = combine("127.0.0.1:1", parse_lighthouse_page(LIGHTHOUSE_PAGE), {})
    assert [(m.name, m.state) for m in status.members] == [("r0", "recovering"), ("r1", "training")]
    assert (status.step, status.batch) == (40, None)


def test_the_table_fits_eighty_columns() -> None:
    statuses = {"r1": reported("training", step=430_000, epoch=100, batch=65536, lr=0.0123456, multiplier=123.456,
                           samples_per_s=1234567.8, loss=0.12345)}  # fmt: skip
    page = Console(file=io.StringIO(), width=80)
    page.print(members_table(combine("10.0.0.1:29510", parse_lighthouse_page(LIGHTHOUSE_PAGE), statuses)))
    assert isinstance(page.file, io.StringIO)
    lines = page.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 7  # a head, the columns' names, two replicas, the fleet in two, what a worker is worth
    assert "1,234,568 samples/s" in lines[-3]
    assert lines[-1].strip() == "one more worker: not known, since neither rule nor policy measures the noise"
    statuses["r1"] = dataclasses.replace(statuses["r1"], workers=512, ref_batch=64, noise_scale=1e6)
    page.print(members_table(combine("10.0.0.1:29510", None, statuses, price=12.5)))
    lines = page.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "one more worker: at most" in " ".join(lines[-2:])


def test_what_a_replica_says_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    # A replica, or whoever answers in its place, says a state that would clear the screen and set the title.
    statuses = {"r0\x1b[2J": ReplicaStatus(state="\x1b]0;owned\x07", time=1.0, step=3, loss=0.5)}
    out.print(members_table(combine("10.0.0.1:29510", None, statuses)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "r0\ufffd[2J" in shown


@pytest.mark.process
def test_replicas_are_asked_over_the_network_where_their_files_are_not_seen() -> None:
    secret = b"of this test"
    store, empty, foreign = (KeyStore("127.0.0.1", own) for own in (secret, secret, b"of another job"))
    for one in (store, foreign):
        one.set(STATUS_KEY, json.dumps({"state": "training", "time": 1.0, "step": 4, "batch": 64}).encode())
    address = f"127.0.0.1:{store.port}"
    quorum = LighthouseStatus(
        quorum_id=1,
        stores={
            "r0": address, "r1": f"127.0.0.1:{empty.port}", "r2": "127.0.0.1:1", "dead": address,
            "r3": f"127.0.0.1:{foreign.port}",
        },
        heartbeat_ages={"r0": 0.1, "r1": 0.1, "r2": 0.1, "r3": 0.1},
    )  # fmt: skip
    assert fetch_statuses(quorum, secret) == {"r0": ReplicaStatus(state="training", time=1.0, step=4, batch=64)}
    assert fetch_statuses(quorum, b"a guess") == {}
    for one in (store, empty, foreign):
        one.close()
