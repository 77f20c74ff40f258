"""The page of a live job: what it reads of growing records, what it computes, and how it is served."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.cli import status_command
from ebbflow.errors import ConfigError
from ebbflow.live.fleet_status import FleetStatus, KnownReplica
from ebbflow.record import Event, Header, Row, StepRow, ValidationRow, encode
from ebbflow.report.fleet_page import POINTS, FleetHistory, fleet_page, fleet_view

NOW = FleetStatus(
    lighthouse="127.0.0.1:1", quorum=1, quorum_age_s=0.1, members=(), step=None, epoch=None, batch=None, lr=None,
    multiplier=None, samples_per_s=None, loss=None,
)  # fmt: skip


def step(
    number: int, *, time_s: float, batch: int, samples: int, workers: int = 2, parent: int | None = None
) -> StepRow:
    lineage = {"lineage": float(number + 1), "parent": float(number if parent is None else parent)}
    return StepRow(
        step=number, time_s=time_s, wall_s=time_s, epoch=0, samples=samples, workers=workers, batch=batch,
        micro_batches=workers, lr_base=0.1, lr=0.1, multiplier=1.0, loss=2.0, stats=lineage,
    )  # fmt: skip


def write(folder: Path, replica: str, *rows: Row) -> Path:
    path = folder / "replicas" / replica / "record.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{encode(row)}\n" for row in rows)
    return path


HEADER = Header(config={"epochs": 2, "epoch_samples": 100, "rule": "sqrt", "policy": "follow(10)"})


def test_progress_time_and_cost_by_hand(tmp_path: Path) -> None:
    # Steps of 20, 20 and 30 samples begin at 0, 2 and 4 s, and the last is taken to last 2 s as well: 6 s, 70 samples.
    # Worker-seconds: 2 x 2 + 2 x 2 + 3 x 2 = 14. 130 of 200 samples are left: 130 / (70/6) = 78/7 s with 14/6 workers.
    write(
        tmp_path, "r0", HEADER,
        step(0, time_s=0, batch=20, samples=20), step(1, time_s=2, batch=20, samples=40),
        step(2, time_s=4, batch=30, samples=70, workers=3),
    )  # fmt: skip
    history = FleetHistory(tmp_path)
    history.read()
    view = fleet_view(NOW, history, price=3600.0)
    assert view["progress"] == pytest.approx(
        {
            "samples": 70, "dropped": 0, "total_samples": 200, "seconds": 6.0, "worker_hours": 14 / 3600,
            "samples_per_s": 70 / 6, "left_s": 78 / 7, "usd": 14.0, "usd_left": 78 / 7 * 14 / 6,
        }
    )  # fmt: skip
    assert view["series"]["time_s"] == [0, 2, 4]
    assert view["series"]["workers"] == [2, 2, 3]
    assert view["job"]["rule"] == "sqrt"
    json.dumps(view, allow_nan=False)


def test_dropped_samples_are_progress_and_not_trained_on(tmp_path: Path) -> None:
    # Each of two steps of 2 s trains on 20 samples and drops 20. 120 of 200 are left: at 40 in 2 s, 6 s.
    rows = [step(number, time_s=2 * number, batch=20, samples=40 * (number + 1)) for number in range(2)]
    write(tmp_path, "r0", HEADER, *(replace(row, stats={**row.stats, "dropped": 20}) for row in rows))
    history = FleetHistory(tmp_path)
    history.read()
    progress = fleet_view(NOW, history)["progress"]
    assert (progress["samples"], progress["dropped"], progress["samples_per_s"]) == (40, 40, 10)
    assert progress["left_s"] == pytest.approx(6)


def test_the_last_step_took_as_long_as_its_row_says(tmp_path: Path) -> None:
    last = replace(step(1, time_s=4, batch=30, samples=50), duration_s=5.0)
    write(tmp_path, "r0", HEADER, step(0, time_s=0, batch=20, samples=20), last)
    history = FleetHistory(tmp_path)
    history.read()
    assert history.seconds(history.steps()) == [4, 5]


def test_a_huge_loss_is_no_infinity_on_the_page(tmp_path: Path) -> None:
    rows = [replace(step(i, time_s=i, batch=20, samples=20 * (i + 1)), loss=1.7e308) for i in range(3)]
    write(tmp_path, "r0", HEADER, *rows)
    history = FleetHistory(tmp_path)
    history.read()
    view = fleet_view(NOW, history)
    assert view["series"]["loss"] == pytest.approx([1.7e308] * 3)
    json.dumps(view, allow_nan=False)


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "r0", HEADER, step(0, time_s=0, batch=10, samples=10))
    history = FleetHistory(tmp_path)
    history.read()
    line = encode(step(1, time_s=1, batch=10, samples=20))
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
    history.read()
    assert [row.step for row in history.steps()] == [0]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line[20:]}\nnot a row\n")
    write(tmp_path, "r0", Event(step=1, what="joined", text="r1"), ValidationRow(
        step=2, time_s=1.0, wall_s=1.0, epoch=0.2, samples=20, metrics={"accuracy": 0.5}
    ))  # fmt: skip
    history.read()
    assert [row.step for row in history.steps()] == [0, 1]
    view = fleet_view(NOW, history)
    assert view["events"] == [{"replica": "r0", "step": 1, "what": "joined", "text": "r1"}]
    assert view["validations"] == [{"epoch": 0.2, "metrics": {"accuracy": 0.5}}]


def test_steps_that_were_given_up_are_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "r0", HEADER, step(0, time_s=0, batch=10, samples=10), step(1, time_s=1, batch=10, samples=20))
    other = step(7, time_s=1, batch=5, samples=15, parent=1)  # beside step 1, and not as far
    write(tmp_path, "r1", HEADER, other)
    history = FleetHistory(tmp_path)
    history.read()
    assert [row.step for row in history.steps()] == [0, 1]


def test_a_long_job_is_drawn_with_few_points(tmp_path: Path) -> None:
    rows = [step(n, time_s=n, batch=2 if n % 100 == 99 else 10, samples=10 * n + 10) for n in range(1000)]
    write(tmp_path, "r0", HEADER, *rows)
    history = FleetHistory(tmp_path)
    history.read()
    series = fleet_view(NOW, history)["series"]
    assert {len(values) for values in series.values()} == {334}  # groups of ceil(1000 / 400) = 3 steps
    assert len(series["batch"]) <= POINTS
    assert set(series["batch"]) == {2, 10}  # step 999 is a group of its own; the other short ones are not drawn


def test_nothing_yet_is_no_error(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        history = FleetHistory(folder)
        history.read()
        view = fleet_view(NOW, history, price=1.0)
        assert view["progress"]["left_s"] is None
        assert view["progress"]["usd"] == 0.0


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = fleet_page("<job>")
    assert "&lt;job&gt;" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def refusal(url: str, data: bytes | None = None) -> tuple[int, bytes]:
    """Code and text of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, data=data, timeout=30)
    with caught.value as answer:
        return answer.code, answer.read()


def test_a_job_that_has_ended_is_shown_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No lighthouse answers: an error behind the table, unless the replica was finished."""
    (tmp_path / "fleet.json").write_text('{"lighthouse": "127.0.0.1:9"}', encoding="utf-8")
    path = write(tmp_path, "r0", HEADER, step(0, time_s=0.0, batch=10, samples=10)).parent / "status.json"
    views: list[dict[str, object]] = []
    monkeypatch.setattr(status_command, "serve_page", lambda page, view, **others: views.append(view()))
    for state, note in (("finished", "the job is finished"), ("training", "no lighthouse answers")):
        path.write_text(json.dumps({"pid": 1, "state": state, "time": 0.0}), encoding="utf-8")
        status_command.status(str(tmp_path), serve=True)
        assert note in str(views[-1]["note"]) and views[-1]["progress"]["samples"] == 10  # type: ignore[index]
    with pytest.raises(ConfigError, match="no lighthouse answers"):
        status_command.status(str(tmp_path))
    path.write_text(json.dumps({"pid": 1, "state": "finished", "time": 0.0}), encoding="utf-8")
    status_command.status(str(tmp_path))
    assert "finished" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.timeout(120)
def test_it_is_served_on_loopback_and_says_why_it_is_not_up_to_date(tmp_path: Path) -> None:
    """No fleet is running: the page is there, and its data say what is wrong, until SIGINT ends the server."""
    pytest.importorskip("tornado")
    (tmp_path / "fleet.json").write_text('{"lighthouse": "127.0.0.1:9"}', encoding="utf-8")
    command = [sys.executable, "-m", "ebbflow", "status", str(tmp_path), "--serve", "--port", "0"]
    environment = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            (url,) = re.findall(r"http://127\.0\.0\.1:\d+/", server.stderr.readline())
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert b"status.json" in answer.read()
            code, body = refusal(f"{url}status.json")
            assert code == 503
            assert "127.0.0.1:9" in json.loads(body)["error"]
            assert refusal(url, data=b"x")[0] == 405  # read-only
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


@pytest.mark.process
def test_a_phone_shows_small_rates_and_nothing_beyond_its_width(browser: str, tmp_path: Path) -> None:
    """The page with data, in a frame of 390 pixels: Chromium's own window is never that narrow."""
    member = KnownReplica(name="replica-0", state="training", step=2, heard_s=0.4, samples_per_s=1234.5)
    now = replace(NOW, members=(member,), step=2, epoch=0, batch=30, lr=0.0002928, multiplier=0.5, samples_per_s=1e6)
    write(
        tmp_path, "r0", HEADER, step(0, time_s=0, batch=20, samples=20), step(1, time_s=2, batch=20, samples=40),
        step(2, time_s=4, batch=30, samples=70),
        ValidationRow(step=2, epoch=0, samples=70, time_s=6, wall_s=6, metrics={"accuracy": 0.5, "loss": 0.00012}),
        Event(step=2, what="members", text="r0:01d264a314be@127.0.0.1:34065 " * 9),
    )  # fmt: skip
    history = FleetHistory(tmp_path)
    history.read()
    page = fleet_page("a job with a rather long name, as people give them")
    assert page.count("\nrefresh();") == 1
    told = """
      const says = (box) => getComputedStyle(box, "::before").display !== "none";
      parent.postMessage(JSON.stringify({
        width: innerWidth, page: document.documentElement.scrollWidth, text: document.body.innerText,
        curves: document.querySelectorAll("path.curve").length,
        hints: [...document.querySelectorAll(".wide")].map((box) => [says(box), box.scrollWidth > box.clientWidth]),
      }), "*");"""
    shown = f"\nshow({json.dumps(fleet_view(now, history, price=2.0))});{told}"
    (tmp_path / "page.html").write_text(page.replace("\nrefresh();", shown), encoding="utf-8")
    frame = """<pre id="seen"></pre><script>
      onmessage = (event) => { document.getElementById("seen").textContent = event.data; };
    </script><iframe src="page.html" width="390" height="800" style="border: 0"></iframe>"""
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="seen">(.+?)</pre>', dom, re.DOTALL)
    assert found, "the page's own script must run"
    seen = json.loads(html.unescape(found[1]))
    assert seen["page"] <= seen["width"] == 390  # less by the width of a scroll bar
    assert "rate 2.928e-4 (x0.5)" in seen["text"] and "loss 1.2e-4" in seen["text"] and "1,000,000" in seen["text"]
    assert seen["curves"] == 5
    assert [says for says, _ in seen["hints"]] == [wider for _, wider in seen["hints"]]
    assert seen["hints"][-1] == [True, True] and seen["hints"][1] == [False, False]  # events; validations
