from __future__ import annotations

import dataclasses
import errno
import json
import math
from pathlib import Path

import pytest

from ebbflow.errors import OutputError, RecordError
from ebbflow.record import (
    End,
    Event,
    Header,
    LayersRow,
    RecordWriter,
    StepRow,
    ValidationRow,
    decode,
    encode,
    layers_due,
    read_record,
)


def step(number: int, *, workers: int = 4, loss: float = 1.0, **stats: float) -> StepRow:
    return StepRow(
        step=number, time_s=number * 0.6, wall_s=0.1, epoch=0, samples=(number + 1) * 32, workers=workers,
        batch=32, micro_batches=4, lr_base=0.1, lr=0.2, multiplier=2.0, loss=loss, stats=stats,
    )  # fmt: skip


def written(path: Path, rows: int = 3) -> Path:
    with RecordWriter(path) as record:
        record.write(Header(config={"seed": 1}))
        for number in range(rows):
            record.write(step(number, workers=number + 1, gain=1.5))
        record.write(ValidationRow(step=rows, epoch=1.0, samples=96, time_s=2, wall_s=1, metrics={"accuracy": 0.5}))
        record.write(End(status="finished", steps=rows, samples=96, wall_s=1.0))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = read_record(written(tmp_path / "deep" / "record.jsonl"))
    assert run.header.config == {"seed": 1}
    assert [row.step for row in run.steps] == [0, 1, 2]
    assert run.column("workers").tolist() == [1, 2, 3]
    assert run.column("gain").tolist() == [1.5] * 3
    assert math.isnan(run.column("unheard of")[0])
    assert run.metric("accuracy")[1].tolist() == [0.5]
    assert (run.status, run.damage) == ("finished", "")


def test_a_number_that_is_not_finite_becomes_null() -> None:
    line = encode(step(0, loss=math.nan, gain=math.inf))
    assert json.loads(line)["loss"] is None
    assert decode(line).stats == {"gain": None}  # type: ignore[union-attr]


def test_fields_of_a_newer_version_are_ignored() -> None:
    line = json.dumps({**json.loads(encode(Event(step=1, what="resumed"))), "new": 1})
    assert decode(line) == Event(step=1, what="resumed")


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_damaged_last_line_is_reported_and_the_rest_is_used(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "record.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    run = read_record(path)
    assert len(run.steps) == 3
    if cut > 1:  # cutting one byte takes the line end only: the row is whole
        assert run.status == "interrupted"
        assert "line 6: the last line is incomplete" in run.damage


def test_zeros_behind_the_last_row_as_a_machine_crash_leaves_them_are_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "record.jsonl")
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert read_record(path).damage


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header"),
        (b"hello\n", "line 1: not a row"),
        (b'{"kind":"step"}\n', "line 1: not a row"),
        (b'{"kind":"event","step":1,"what":"x"}\n', "has no header"),
        (b'{"kind":"header","version":99}\n', "record version 99.*upgrade"),
    ],
)
def test_what_is_not_a_record_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_record(path)


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = written(tmp_path / "record.jsonl")
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:10]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match="line 3"):
        read_record(path)


def test_a_row_of_layers_is_read_back_with_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path) as record:
        record.write(Header(config={"layers": ["a.weight", "a.bias"]}))
        record.write(step(0))
        record.write(LayersRow.of(step(0), noise=(1 / 3, 2e9), signal=(math.nan, -0.5), multiplier=(1.0, 4.0)))
    run = read_record(path)
    assert run.layers == [
        LayersRow(step=0, samples=32, batch=32, noise=[0.333333, 2e9], signal=[None, -0.5], multiplier=[1.0, 4.0])
    ]
    assert len(run.steps) == 1


def test_a_warm_up_that_has_nearly_ended_is_not_rounded_to_one_that_has() -> None:
    warm_up = LayersRow.of(step(0), noise=(), signal=(), multiplier=(), warm_up=(0.12345678, 0.99999999, 1.0)).warm_up
    assert warm_up == [0.123457, 0.999999, 1.0]


@pytest.mark.parametrize(("steps", "batch"), [(5000, 32), (1000, 160), (50, 3200)])
def test_layers_are_recorded_about_two_hundred_times_whatever_the_batch(steps: int, batch: int) -> None:
    total = steps * batch
    rows = [dataclasses.replace(step(i), samples=(i + 1) * batch, batch=batch) for i in range(steps)]
    due = [row.step for row in rows if layers_due(row, total_samples=total)]
    assert due[0] == 0
    assert len(due) == min(steps, 201)  # 200 marks, the last at the end of the run, and the first step
    assert not layers_due(rows[0], total_samples=0)  # a run without an end


def test_what_a_newer_version_writes_is_not_called_damage(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"kind":"header","version":99}\n{"kind":"tides","height":3}\n')
    with pytest.raises(RecordError, match=r"^\S+ has record version 99.*upgrade"):
        read_record(path)


def test_resuming_cuts_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = RecordWriter(path)
    record.write(Header())
    record.write(step(0))
    size = record.flush()
    record.write(step(1))
    record.close()
    with RecordWriter(path, resume_at=size) as record:
        record.write(step(1, loss=2.0))
    assert [(row.step, row.loss) for row in read_record(path).steps] == [(0, 1.0), (1, 2.0)]
    with pytest.raises(RecordError, match="rows are missing"):
        RecordWriter(path, resume_at=10**9)


def test_a_missing_file_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another output folder"):
        RecordWriter(tmp_path / "file" / "record.jsonl")


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    record = RecordWriter(Path("/dev/full"))
    record.write(Header())
    with pytest.raises(OutputError, match="No space left") as caught:
        record.flush()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    with pytest.raises(OutputError):
        record.close()
