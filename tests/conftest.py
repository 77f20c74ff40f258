"""What all tests share."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# Two busy cores are slow now and then; how long an example takes is no test of ours.
settings.register_profile("ebbflow", deadline=None)
settings.load_profile("ebbflow")

# A shell script starts what it puts in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Weights and orders that a test leaves to chance are the same in every run, whatever ran before in its process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and data sets that may lie beside the project; tests that need it skip without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"real traces and data sets are not there: no folder {folder.name!r} beside the project")
    return folder
