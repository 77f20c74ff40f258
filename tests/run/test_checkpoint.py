"""What modules have besides dense real tensors: it is saved, read back and a part of the digest, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from contract.suite import make_data
from ebbflow.errors import ConfigError
from ebbflow.run.checkpoint import load_checkpoint, load_model, save_checkpoint, weights_digest
from ebbflow.workloads import TensorSource


class WithExtraState(nn.Module):
    """A module that keeps something which is no tensor."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept
        self.layer = nn.Linear(2, 10)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class WithBuffer(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.layer = nn.Linear(2, 2)


class WithWeight(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.detach() if value.is_conj() else value.clone())


def seeded(kind: type[nn.Module], value: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(value)


COMPLEX = torch.tensor([1 + 2j, 3 + 4j])


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (WithExtraState, 3, 4),
        (WithExtraState, {"scale": torch.ones(2), "steps": [1]}, {"scale": torch.zeros(2), "steps": [1]}),
        (WithExtraState, None, "none"),
        (WithBuffer, torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (WithBuffer, torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse()),
        (WithWeight, COMPLEX, 2 * COMPLEX),
        (WithWeight, (1j * COMPLEX).conj(), COMPLEX),
    ],
)
def test_the_digest_knows_what_is_no_dense_tensor_and_a_checkpoint_restores_it(
    kind: type[nn.Module], one: Any, other: Any, tmp_path: Path
) -> None:
    model, second = seeded(kind, one), seeded(kind, other)
    assert weights_digest(model) == weights_digest(seeded(kind, one)) != weights_digest(second)
    save_checkpoint(tmp_path / "saved.pt", {"model": model.state_dict()})
    load_model(second, load_checkpoint(tmp_path / "saved.pt")["model"], "the checkpoint")
    assert weights_digest(second) == weights_digest(model)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_the_digest_knows_compressed_sparse_buffers(layout: torch.layout) -> None:
    same, other = (matrix.to_sparse(layout=layout) for matrix in (torch.eye(4), torch.eye(4).flip(0)))
    digest = weights_digest(seeded(WithBuffer, same))
    assert digest == weights_digest(seeded(WithBuffer, same.clone())) != weights_digest(seeded(WithBuffer, other))


@pytest.mark.parametrize("kept", [{"steps": 3}, 7])
def test_a_session_with_extra_state_goes_on_from_its_checkpoint(kept: Any, tmp_path: Path) -> None:
    x, y = make_data()
    for limit in (3, None):
        model = nn.Sequential(nn.Linear(x.shape[1], 2), WithExtraState(kept))
        model[1].forward = model[1].layer.forward  # type: ignore[method-assign]
        model.to(x.dtype)
        session = ebbflow.Session(
            model, torch.optim.SGD(model.parameters(), lr=0.1), TensorSource(x, y), rule="linear", base_batch=8,
            local_batch=4, trace="constant(2)", epochs=1, out=tmp_path,
        )  # fmt: skip
        with session:
            for step in session:
                for inputs, targets in step:
                    step.backward(nn.functional.cross_entropy(model(inputs), targets))
                if session.step == limit:
                    break
    assert session.finished


def test_extra_state_that_is_not_read_back_is_refused_at_the_start() -> None:
    x, y = make_data()
    model = nn.Sequential(nn.Linear(x.shape[1], 2), WithExtraState(nn.ReLU()))
    with pytest.raises(ConfigError, match=r"get_extra_state\(\) of 1 \(WithExtraState\) .* not read back .*ReLU"):
        ebbflow.Session(
            model, torch.optim.SGD(model.parameters(), lr=0.1), TensorSource(x, y), rule="linear", base_batch=8,
            local_batch=4, trace="constant(2)", epochs=1,
        ).__enter__()  # fmt: skip
