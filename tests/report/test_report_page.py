"""The page is complete, self-contained and escaped; it is also opened in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ebbflow.errors import ConfigError, OutputError
from ebbflow.report.report_page import ReportPaths, write_report

KINDS = ("validation", "validation-updates", "validation-wall", "scores", "loss", "schedules", "batch", "rate",
         "multiplier")  # fmt: skip
FIGURES = {f"{kind}-{name}" for kind in KINDS for name in ("digits-mlp", "tiny-gpt")} | {"traces"}


class Page(HTMLParser):
    """All tags with their attributes, ids, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="module")
def page(report: ReportPaths) -> Page:
    return Page(report.page.read_text(encoding="utf-8"))


def test_the_report_folder_is_complete(report: ReportPaths) -> None:
    files = {str(path.relative_to(report.folder)) for path in report.folder.rglob("*") if path.is_file()}
    tables = {f"tables.{suffix}" for suffix in ("md", "csv", "tex", "json")}
    pictures = {f"figures/{stem}.{suffix}" for stem in FIGURES for suffix in ("svg", "png")}
    assert files == {"index.html"} | tables | pictures
    assert not list(report.folder.parent.glob(".report*"))  # nothing half-built is left
    assert len(json.loads((report.folder / "tables.json").read_text())["cells"]) == 12


def test_the_page_has_every_table_and_figure_once(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert {i.removeprefix("figure-") for i in page.ids if i.startswith("figure-")} == FIGURES
    assert {"table-digits-mlp", "table-tiny-gpt", "table-arms", "takeaway", "command", "configuration"} <= set(page.ids)


def test_the_page_says_what_became_of_each_arm_and_how_to_repeat_it(page: Page) -> None:
    text = " ".join(page.words)
    status = [attributes["data-status"] for tag, attributes in page.tags if "data-status" in attributes]
    assert sorted(set(status)) == ["diverged", "failed", "finished", "interrupted", "missing"]
    assert len(status) == 24
    for expected in (
        "1 of 2 diverged",
        "RuntimeError: <out of memory> & more",
        "the last line is incomplete",
        "ebbflow study fleet.toml --out fleet",
        "0123456789abcdef0123456789abcdef01234567",
        "2.13.0",
        "2025-01-01T10:00:00+00:00",
        "workers: min 0 · mean 16.7 · max 28",  # (240*12 + 260*24 + 200*16 + 440*8 + 300*20 + 400*28 + 500*14) / 2400
    ):
        assert expected in text


def test_the_page_refers_to_nothing_outside_itself(report: ReportPaths, page: Page) -> None:
    text = report.page.read_text(encoding="utf-8")
    for tag, attributes in page.tags:
        if tag == "a":  # links, followed on a click only
            assert re.fullmatch(r"figures/[\w-]+\.(svg|png)", attributes["href"] or "")
            continue
        for name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), (tag, name, attributes[name])
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_text_of_a_record_cannot_become_markup(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    evil = "<script>alert(1)</script>"
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), rule=evil, workload=f'"{evil}', text=evil)
    text = write_report(path).page.read_text(encoding="utf-8")
    assert evil not in text
    assert html.escape(evil) in text


@pytest.mark.slow
def test_an_earlier_report_is_replaced_and_nothing_else(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    path = make_record(tmp_path / "run" / "record.jsonl", last=(0.9,))
    first = write_report(path)
    (first.folder / "stale.txt").write_text("of the first report")
    assert write_report(path.parent).folder == first.folder
    assert not (first.folder / "stale.txt").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that are not a report"):
        write_report(path, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot be written"):
        write_report(path, out=tmp_path / "file" / "report")
    with pytest.raises(ConfigError, match="is a file"):
        write_report(path, out=tmp_path / "file")


@pytest.mark.slow
def test_a_report_that_fails_half_way_leaves_the_old_one(
    tmp_path: Path, make_record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,))
    before = write_report(path).page.read_text()

    def full(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ebbflow.report.report_page.render_page", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_report(path)
    assert (tmp_path / "report" / "index.html").read_text() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["record.jsonl", "report"]


@pytest.mark.process
def test_a_report_needs_neither_torch_nor_pyplot(study: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ebbflow.report.report_page import write_report; "
        "write_report(Path(sys.argv[1]), out=Path(sys.argv[2])); "
        "print([name for name in ('torch', 'matplotlib.pyplot') if name in sys.modules])"
    )
    arm = study / "arms" / "digits-mlp_static_constant_s0"
    command = [sys.executable, "-c", code, str(arm), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "[]"


# In a browser


def browse(browser: str, page: Path, profile: Path, *, width: int = 1280) -> tuple[str, list[str]]:
    """The document after its scripts ran, and the address of every request that the page made."""
    log = profile.with_suffix(".netlog.json")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", f"--log-net-log={log}",
        f"--window-size={width},1200", "--virtual-time-budget=3000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    net = json.loads(log.read_text())
    start = net["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    requests = [
        event["params"] for event in net["events"] if event["type"] == start and "url" in event.get("params", {})
    ]
    # A browser makes requests of its own (the time, updates), which have no page as their initiator.
    return done.stdout, [request["url"] for request in requests if request["initiator"] != "not an origin"]


def probe(page: Path, to: Path) -> Path:
    """The page with one more script, which writes down what is really there to see."""
    script = """<script>
      const seen = {overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth, boxes: {}};
      for (const item of document.querySelectorAll("figure svg, table.results, #table-arms")) {
        const box = item.getBoundingClientRect();
        const name = item.id || item.closest("figure").id;
        seen.boxes[name] = [box.width, box.height, item.querySelectorAll("path, td").length];
      }
      seen.width = document.documentElement.clientWidth;
      seen.outside = [...document.querySelectorAll("table.results td")].filter(
        (cell) => cell.getBoundingClientRect().right > document.documentElement.clientWidth).length;
      seen.unsaid = [...document.querySelectorAll(".plot, .wide")].filter((box) => box.scrollWidth > box.clientWidth
        && !getComputedStyle(box, "::before").content.includes("scroll sideways")).length;
      const note = document.createElement("script");
      note.type = "application/json"; note.id = "seen"; note.textContent = JSON.stringify(seen);
      document.body.append(note);
      if (parent !== window) parent.postMessage(note.textContent, "*");
    </script></body>"""
    to.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    return to


def seen_in(dom: str) -> dict[str, Any]:
    found = re.search(r'id="seen">(.*?)</script>', dom)
    assert found, "the page's own script must run"
    seen: dict[str, Any] = json.loads(found[1])
    tables = {"table-digits-mlp", "table-tiny-gpt", "table-arms"}
    assert set(seen["boxes"]) == {f"figure-{stem}" for stem in FIGURES} | tables
    for name, (across, down, parts) in seen["boxes"].items():
        assert across > 280, name
        assert down > 80, name
        assert parts >= 6, name
    assert seen["overflow"] <= 0  # wide figures scroll inside their cards, the page does not
    assert seen["outside"] == 0  # every result is on the screen
    assert seen["unsaid"] == 0  # what scrolls says so
    return seen


@pytest.mark.process
@pytest.mark.parametrize("width", [1280, 700])
def test_a_browser_shows_the_tables_and_every_figure_and_makes_no_request(
    report: ReportPaths, browser: str, tmp_path: Path, width: int
) -> None:
    dom, urls = browse(browser, probe(report.page, tmp_path / "index.html"), tmp_path / "profile", width=width)
    seen_in(dom)
    assert [url for url in urls if not url.startswith("data:")] == []


@pytest.mark.process
def test_on_a_phone_every_result_is_on_the_screen_and_what_scrolls_says_so(
    report: ReportPaths, browser: str, tmp_path: Path
) -> None:
    page = probe(report.page, tmp_path / "index.html")
    # A window cannot be as narrow as a phone, a frame can.
    (tmp_path / "phone.html").write_text(
        """<script>onmessage = (event) => {
          const note = document.createElement("script");
          note.type = "application/json"; note.id = "seen"; note.textContent = event.data;
          document.body.append(note);
        };</script><iframe src="index.html" width="390" height="1200"></iframe>"""
    )
    dom, _ = browse(browser, page.with_name("phone.html"), tmp_path / "profile")
    assert seen_in(dom)["width"] <= 390


@pytest.mark.process
def test_a_request_would_have_been_noticed(browser: str, tmp_path: Path) -> None:
    (tmp_path / "leaky.html").write_text('<img src="http://leak.example/pixel.png">')
    _, urls = browse(browser, tmp_path / "leaky.html", tmp_path / "profile")
    assert "http://leak.example/pixel.png" in urls
