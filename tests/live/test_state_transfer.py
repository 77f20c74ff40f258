"""A state is described by few bytes, and its tensors are sent from where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbflow.engines.batches import tensors_in
from ebbflow.errors import CheckpointError
from ebbflow.live import state_transfer
from ebbflow.live.state_transfer import OutgoingState, put_together, take_apart


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


@pytest.mark.parametrize("sent", [0, 1, 2, 3, 5])
def test_every_receiver_gets_the_state_as_it_was_although_a_step_changes_it(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tensors of 4000 bytes in messages of 3000, two for each. One receiver has `sent` of them by then."""
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(state_transfer, "_DESCRIBED", 100)
    weights = [torch.randn(1000), torch.randn(25, 40).T, torch.randn(10, 100)]
    expected = [weight.clone() for weight in weights]
    outgoing = OutgoingState({"weights": weights, "step": 7}, receivers=2)
    state, empty = put_together(outgoing.description)
    ahead, behind = outgoing.messages(), outgoing.messages()
    messages = [next(ahead) for _ in range(sent)]
    outgoing.keep()
    for weight in weights:
        weight.zero_()
    for one in ([*messages, *ahead], [*behind]):
        assert [len(message) for message in one] == [3000, 1000] * 3
        found = torch.cat(one).view(torch.float32).split([1000] * 3)
        for tensor, part in zip(empty, found, strict=True):
            tensor.copy_(part.view(tensor.shape))
        torch.testing.assert_close(state["weights"], expected, rtol=0, atol=0)
    assert outgoing._tensors == [None] * 3, "nothing is kept that every receiver has"
