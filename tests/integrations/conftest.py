"""What the tests of the frameworks share."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("torchvision") is not None:
    # The frameworks import torchvision, which does not load beside every build of torch; this one does.
    from ebbflow.workloads.torchvision_import import import_torchvision

    import_torchvision(needed_for="the tests of the frameworks")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings of the frameworks' own are not ours; those of ours are errors, as in all tests."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("error", message=r".*(micro-batches|set_epoch|lr_scheduler\.step)")
        yield
    torch.set_num_threads(threads)
