"""What a fleet trained on, from the records of its replicas: the line of steps that survived, and what was given up.

Every committed step is a row in the record of each replica that committed it, with two numbers among its `stats`: the
*lineage* of the state after it and the *parent*, that of the state before. Rows are thus the nodes of a tree. The line
that survived is the path from the last state back to the first; steps beside it were committed by replicas which then
died, or took the others' state. A sample counts once if it is in one step of the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbflow.errors import RecordError
from ebbflow.record import Run, StepRow, read_record

__all__ = ["Account", "account", "line_of", "read_fleet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The line of steps that survived, and how often each sample of an epoch is in it."""

    steps: tuple[StepRow, ...]
    """In order, each once."""
    given_up: int
    """Steps that some replica committed and the fleet did not keep."""
    epoch_samples: int
    epochs: int
    """Epochs of which every sample was committed."""
    mistakes: tuple[str, ...]
    """Samples lost or repeated, each in a sentence. Empty: every sample of these epochs counts exactly once."""

    @property
    def exactly_once(self) -> bool:
        """Whether no sample was lost and none counts twice."""
        return not self.mistakes

    @property
    def samples(self) -> int:
        """Committed in all."""
        return sum(row.batch for row in self.steps)


def account(rows: Iterable[StepRow], *, epoch_samples: int) -> Account:
    """The account of a fleet from all rows of all its replicas, in any order, each as often as it was written."""
    nodes = {_lineage(row): row for row in rows}
    line = line_of(nodes.values())
    counts: dict[int, Counter[tuple[int, int]]] = {}
    mistakes = []
    here = (0, 0)
    for row in line:
        start = row.samples - row.batch - row.epoch * epoch_samples
        stop = start + row.batch
        if (row.epoch, start) != here:
            mistakes.append(
                f"step {row.step} has samples {start} to {stop} of epoch {row.epoch}, but the step before ended at "
                f"sample {here[1]} of epoch {here[0]}"
            )
        counts.setdefault(row.epoch, Counter())[start, stop] += 1
        here = (row.epoch + 1, 0) if stop == epoch_samples else (row.epoch, stop)
    if line and line[0].step != 0:
        mistakes.append(f"the records begin with step {line[0].step}: rows of the steps before it are missing")
    return Account(
        steps=tuple(line),
        given_up=len(nodes) - len(line),
        epoch_samples=epoch_samples,
        epochs=here[0],
        mistakes=tuple(mistakes),
    )


def line_of(rows: Iterable[StepRow]) -> list[StepRow]:
    """The surviving line: from the row that came furthest back to the first one."""
    nodes = {_lineage(row): row for row in rows}
    if not nodes:
        return []
    parents = {_parent(row) for row in nodes.values()}
    ends = [row for lineage, row in nodes.items() if lineage not in parents]
    row: StepRow | None = max(reversed(ends), key=lambda end: end.samples)  # of equals the one written last
    line: list[StepRow] = []
    while row is not None:
        line.append(row)
        row = nodes.get(_parent(row))
    return line[::-1]


def _lineage(row: StepRow) -> int:
    return int(_number(row, "lineage"))


def _parent(row: StepRow) -> int:
    return int(_number(row, "parent"))


def _number(row: StepRow, name: str) -> float:
    if name not in row.stats:
        raise RecordError(f"step {row.step} has no {name}: expected the record of a replica in a live fleet")
    return row.stats[name]


def read_fleet(folder: Path) -> tuple[Account, Sequence[Run]]:
    """The account of the job in a folder, from the records in `replicas/*/record.jsonl`, and the records."""
    runs = [read_record(path) for path in sorted(folder.glob("replicas/*/record.jsonl"))]
    if not runs:
        raise RecordError(f"{folder} has no replicas/*/record.jsonl; expected the folder of a live job")
    sizes = {int(run.header.config["epoch_samples"]) for run in runs}
    if len(sizes) != 1:
        raise RecordError(f"{folder}: the replicas' records are of epochs of {sorted(sizes)} samples; expected one job")
    rows = [row for run in runs for row in run.steps]
    return account(rows, epoch_samples=sizes.pop()), runs
