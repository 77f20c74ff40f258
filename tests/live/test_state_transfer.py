"""A state is described by few bytes, and its tensors are sent from where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbflow.engines.batches import tensors_in
from ebbflow.errors import CheckpointError
from ebbflow.live.state_transfer import put_together, take_apart


def test_a_state_is_put_together_from_its_description_and_its_tensors() -> None:
    state: dict[str, Any] = {
        "model": {"weight": torch.randn(64, 32), "half": torch.ones(5000, dtype=torch.bfloat16), "bias": torch.ones(3)},
        "optimizer": {"state": {0: {"m": torch.randn(64, 32), "step": torch.tensor(4.0)}}, "groups": [{"lr": 1}]},
        "step": 7,
        "none": None,
    }  # fmt: skip
    description, tensors = take_apart(state)
    assert len(tensors) == 3 and len(description) < 8000
    assert tensors[0].data_ptr() == state["model"]["weight"].data_ptr(), "no copy"
    found, empty = put_together(description)
    assert [(one.shape, one.dtype) for one in empty] == [(one.shape, one.dtype) for one in tensors]
    for own, sent in zip(empty, tensors, strict=True):
        own.copy_(sent)
    torch.testing.assert_close([*tensors_in(found)], [*tensors_in(state)])
    assert (found["step"], found["none"], found["optimizer"]["groups"]) == (7, None, [{"lr": 1}])


def test_what_is_no_description_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        put_together(b"something else")
