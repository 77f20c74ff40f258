from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import OutputError, TraceError
from ebbflow.traces.availability import Trace
from ebbflow.traces.formats import FORMATS, read, write

EXAMPLES = {
    "canonical": "time_s,accelerators\n0,4\n60,2\n90.5,6\n120,6\n",
    "samples": ",Time,GPUs\n0,1652434464.4,4\n1,1652434494.4,4\n2,1652434524.4,2\n3,1652434554.4,6\n",
    "events": "0,add,a\n0,add,b\n60000,remove,a\n60000,add,c\n90000,add,d\n120000,remove,b\n",
    "skypilot": '{"metadata": {"gap_seconds": 300}, "data": [0, 5, 5, 16]}',
}
EXPECTED = {
    "canonical": Trace.from_points([(0, 4), (60, 2), (90.5, 6), (120, 6)]),
    # Four samples 30 s apart: the last one holds for one more interval.
    "samples": Trace.parse("0s:4 60s:2 90s:6 120s"),
    # At 60 s one leaves and one comes: no change. The last event is the end.
    "events": Trace.from_points([(0, 2), (90, 3), (120, 2)]),
    "skypilot": Trace.parse("0s:0 300s:5 900s:16 1200s"),
}


def store(folder: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_recognised_and_read(name: str, tmp_path: Path) -> None:
    path = store(tmp_path, EXAMPLES[name])
    assert read(path) == EXPECTED[name]
    assert read(path, format=name) == EXPECTED[name]
    assert read(path).name == "trace"


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_may_be_packed(name: str, tmp_path: Path) -> None:
    path = store(tmp_path, gzip.compress(EXAMPLES[name].encode()), "spot.csv.gz")
    assert read(path) == EXPECTED[name]
    assert read(path).name == "spot"


def test_byte_order_mark_blank_lines_and_foreign_line_ends_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeff\r\nTime_s, Accelerators\r\n0,4\r\n\r\n60,2.0\r\n120,2\r\n\r\n"
    assert read(store(tmp_path, text)) == Trace.parse("0s:4 60s:2 120s")


@pytest.mark.parametrize("blank", ["", "  ", "\t", ",", ",,,", " , "])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "skypilot"])
def test_rows_of_nothing_but_spaces_and_commas_are_blank(name: str, blank: str, tmp_path: Path) -> None:
    """A spreadsheet writes them where rows were emptied, at the end for example."""
    lines = [blank] + [line for row in EXAMPLES[name].splitlines() for line in (row, blank)]
    assert read(store(tmp_path, "\r\n".join(["\ufeff" + lines[0], *lines[1:], ""]))) == EXPECTED[name]


def test_lines_are_counted_with_blank_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv:5: the time is 'x'; expected a number"):
        read(store(tmp_path, "time_s,accelerators\n0,4\n\n,\nx,5\n60,5\n"))


@given(
    gaps=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8),
    counts=st.lists(st.integers(0, 10**6), min_size=9, max_size=9),
    packed=st.booleans(),
)
def test_what_is_written_reads_back_equal(
    gaps: list[float], counts: list[int], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    trace = Trace.from_points(zip(times, counts[: len(times)], strict=True))
    path = tmp_path_factory.mktemp("written") / ("t.csv.gz" if packed else "t.csv")
    write(trace, path)
    assert read(path) == trace


def test_the_written_form_is_plain(tmp_path: Path) -> None:
    write(EXPECTED["canonical"], tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == EXAMPLES["canonical"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "1: is a binary file"),
        (b"time_s,accelerators\n0,4\n\x00\x00", "3: is a binary file"),
        (gzip.compress(b"time_s,accelerators\n0,4\n60,2\n" * 50, mtime=0)[:-12], "gzip data is damaged or cut short"),
        ("time_s,accelerators\n", "has 0 rows .* cut short"),
        ("time_s,accelerators\n0,4\n", "has 1 rows .* cut short"),
        ("time_s,accelerators\n0,4\n60\n", "3: found '60'; expected time_s,accelerators"),
        ("time_s,accelerators\n0,4\n60,\n", "3: the count is missing"),
        ("time_s,accelerators\n0,4\n60,-2\n", "3: the count is -2"),
        ("time_s,accelerators\n0,4\n60,2.5\n", "3: the count is 2.5"),
        ("time_s,accelerators\n0,4\n60,nan\n", "3: the count is nan"),
        ("time_s,accelerators\n0,4\n60,many\n", "3: the count is 'many'"),
        ("time_s,accelerators\n0,4\nnan,2\n", "3: the time is nan"),
        ("time_s,accelerators\n0,4\n60,2\n30,1\n", "4: time 30 follows 60"),
        ("time_s,accelerators\n0,4\n60,2\n60,1\n", "4: time 60 follows 60"),
        ("time_s,accelerators\n5,4\n60,2\n", "2: the first time is 5; expected 0"),
        (",Time,GPUs\n", "has 0 samples"),
        (",Time,GPUs\n0,1652434464,4\n", "has 1 samples"),
        (",Time,GPUs\n0,1652434464,4\n1,1652434400,4\n", "3: time 1652434400 follows"),
        (",Time,GPUs\n0,1652434464,4\n1,1652434494,-1\n", "3: the count is -1"),
        ("0,add,a\n", "has no event after 0 ms"),
        ("0,add,a\n60000,add,a\n", "2: node 'a' is added, but it is there already"),
        ("0,add,a\n60000,remove,b\n", "2: node 'b' is removed, but it is not there"),
        ("0,add,a\n60000,add,b\n30000,remove,a\n", "3: time 30000 ms follows 60000 ms"),
        ("0,add,a\n60000,explode,a\n", "2: the event is 'explode'"),
        ("0,add,a\n60000,add\n", "2: found '60000,add'"),
        ('{"metadata": {"gap_seconds": 300}, "data": [0, 5', "1: is not complete JSON .* cut short"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "data is an empty list"),
        ('{"metadata": {"gap_seconds": 300}}', "data is missing"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ('{"data": [1]}', "gap_seconds is None"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', r"data\[1\] is -1"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 1.5]}', r"data\[1\] is 1.5"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, NaN]}', "contains NaN"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 1e999]}', r"data\[1\] is inf"),
        ("step,batchsize\n0,128\n", "is a batch plan .* BatchPlan.read, or with ebbflow plan --plan FILE"),
        ("hello,world\n1,2\n", "1: is in no known trace format; it begins with 'hello,world'"),
        ("Time_s\taccelerators\n0\t4\n", r"it begins with 'Time_s\\taccelerators'; expected for example the header"),
        ("time_s accelerators\r0 4\r", "it begins with 'time_s accelerators'; expected"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = store(tmp_path, content, "bad.csv")
    with pytest.raises(TraceError, match=f"bad.csv:.*{message}"):
        read(path)


def test_a_missing_file_a_folder_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(TraceError, match="did you mean 'canonical'"):
        read(store(tmp_path, EXAMPLES["canonical"]), format="canonicle")


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, "precious")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"trace.csv: cannot be written: No space left on device"):
        write(EXPECTED["samples"], path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match="cannot be written"):
        write(EXPECTED["samples"], tmp_path / "no" / "such" / "folder.csv")


# -- the published files -----------------------------------------------------------------------------------------------

PUBLISHED = [
    # file, hours, least, mean, greatest, changes, accelerator-hours, % of the time at zero
    ("gcp_a100_2022-05", 3.76, 0, 46.4, 56, 48, 174.7, 2.8),
    ("gcp_tpuv2-8_cores_2022-04", 16.12, 24, 74.7, 120, 97, 1203.3, 0.0),
    ("aws_p3_bamboo", 11.37, 10, 24.0, 32, 162, 273.1, 0.0),
    ("aws_g4dn_bamboo", 10.77, 0, 12.6, 24, 99, 135.7, 1.2),
    ("aws_p2_bamboo_2020-11", 88.69, 0, 15.5, 16, 184, 1375.2, 0.1),
    ("gcp_a100_bamboo_2021-12", 27.02, 17, 57.3, 64, 74, 1548.2, 0.0),
    ("gcp_v100_bamboo_2021-12", 24.17, 30, 76.3, 80, 120, 1844.8, 0.0),
]


@pytest.mark.parametrize(("name", "hours", "least", "mean", "most", "changes", "area", "zero"), PUBLISHED)
def test_statistics_of_the_published_traces(
    name: str, hours: float, least: int, mean: float, most: int, changes: int, area: float, zero: float, shared: Path
) -> None:
    stats = read(shared / "traces" / f"{name}.csv").stats()
    assert (stats.min, stats.max, stats.changes) == (least, most, changes)
    assert stats.duration_s / 3600 == pytest.approx(hours, abs=0.0051)
    assert stats.mean == pytest.approx(mean, abs=0.051)
    assert stats.accelerator_hours == pytest.approx(area, abs=0.051)
    assert stats.zero_fraction * 100 == pytest.approx(zero, abs=0.051)


@pytest.mark.parametrize(
    ("raw", "converted"), [("raw_eth_a100", "gcp_a100_2022-05"), ("raw_bamboo_p3", "aws_p3_bamboo")]
)
def test_raw_files_equal_their_converted_forms(raw: str, converted: str, shared: Path, tmp_path: Path) -> None:
    trace = read(shared / "traces" / f"{raw}.csv")
    assert trace == read(shared / "traces" / f"{converted}.csv")
    write(trace, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (shared / "traces" / f"{converted}.csv").read_text()


def test_a_published_batch_plan_is_not_taken_for_a_trace(shared: Path) -> None:
    with pytest.raises(TraceError, match="is a batch plan"):
        read(shared / "traces" / "raw_eth_batchsizes.csv")
