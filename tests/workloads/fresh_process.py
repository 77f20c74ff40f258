"""Sends the samples and the model of a task to a new process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from ebbflow.workloads import Task

# The model is pickled once more where it was read: a Dask worker may send it on.
CODE = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    train, valid, model = pickle.load(file)
assert torch.Size(train[0][0].shape) and type(pickle.loads(pickle.dumps(model))) is type(model)
model.eval()
sample = valid[0][0][None].float()
print(list(train[0][0].shape), end=" ")
print(list({expression}), end="")
"""


def unpickled_in_a_fresh_process(task: Task, folder: Path, expression: str) -> str:
    """Return the shape of a training sample, and the value that an expression of `model` and a `sample` has there."""
    path = folder / "sent"
    path.write_bytes(pickle.dumps((task.train.dataset, task.valid.dataset, task.model)))
    code = CODE.replace("{expression}", expression)
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
