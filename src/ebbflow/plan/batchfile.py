"""Reading a `step,batchsize` file: the batches of a plan that somebody else made."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ebbflow.core.files import read_text
from ebbflow.errors import PlanError
from ebbflow.traces.formats import Source

__all__ = ["read_batches"]

_HEADER = "step,batchsize"


def read_batches(path: Path, *, local_batch: int) -> npt.NDArray[np.int64]:
    """The batch of each step, in the order of the rows; the step column may start again and is not used.

    Each batch must be a multiple of the local batch.
    """
    if local_batch < 1:
        raise PlanError(f"the local batch is {local_batch}; expected at least 1")
    source = Source(path=path, text=read_text(path, error=PlanError), kind=PlanError)
    if source.first_line != _HEADER:
        raise source.error(
            f"begins with {source.beginning[:40]!r}; expected the header {_HEADER!r}. If it is an availability "
            f"trace, make the plan from it with BatchPlan.from_trace",
            line=1,
        )
    rows = list(source.rows(columns=_HEADER, header=True))
    if not rows:
        raise source.error("has no rows after its header. Is the file cut short?")
    batches = [source.count(text, "batch size", line=line) for line, (_, text) in rows]
    for (line, _), batch in zip(rows, batches, strict=True):
        if batch == 0:
            raise source.error("the batch size is 0; expected at least one sample", line=line)
        if batch % local_batch:
            raise source.error(
                f"a batch of {batch} is not a multiple of the local batch {local_batch}; "
                f"try a local batch of {math.gcd(local_batch, *batches)}, which divides every batch of the file",
                line=line,
            )
    return np.array(batches, np.int64)
