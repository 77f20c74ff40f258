"""The complete state of a replica, as bytes that a peer or a disk carries. Reading them executes nothing."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ebbflow._version import __version__
from ebbflow.data.ledger import Ledger
from ebbflow.errors import CheckpointError
from ebbflow.live.engine import LiveEngine
from ebbflow.live.membership import describe_difference
from ebbflow.live.replica_files import Checkpoints
from ebbflow.run.checkpoint import load_model
from ebbflow.run.flow import Flow

__all__ = ["FleetState", "Stateful", "job_of"]

VERSION = 1


class Stateful(Protocol):
    """Whatever else belongs to the state of a script: a scheduler, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, texts and plain containers of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Become what `state_dict` described."""


def job_of(model: torch.nn.Module, **settings: object) -> dict[str, str]:
    """What must be the same for all replicas of a fleet: version, shapes of the model, and the settings given."""
    state = model.state_dict()
    shapes = "; ".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items())
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    return {
        "ebbflow": __version__,
        "torch": torch.__version__.partition("+")[0],
        "model": f"{len(state)} tensors, {sum(value.numel() for value in state.values())} numbers, shapes {digest}",
        **{name: str(value) for name, value in settings.items()},
    }


@dataclass
class FleetState:
    """Model, optimizer, rule, moments, position, generator: everything at the last committed step."""

    model: torch.nn.Module
    job: Mapping[str, str]
    checkpoints: Checkpoints
    epochs: int
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    flow: Flow = field(init=False)
    engine: LiveEngine = field(init=False)

    def pack(self) -> memoryview:
        """As bytes, in a buffer of their own."""
        buffer = io.BytesIO()
        torch.save(
            {
                "version": VERSION,
                "job": dict(self.job),
                "model": self.model.state_dict(),
                "optimizer": self.flow.optimizer.state_dict(),
                "average": self.flow.average.state_dict() if self.flow.average is not None else None,
                "growth": self.flow.growth.state_dict() if self.flow.growth is not None else None,
                "ledger": self.flow.ledger.state(),
                "step": self.flow.step,
                "lineage": self.engine.lineage,
                "wall_s": self.flow.wall_s,
                "rng": torch.get_rng_state(),
                "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
            },
            buffer,
        )
        return buffer.getbuffer()

    def unpack(self, data: bytes | memoryview, origin: str = "the state of a peer") -> tuple[int, int]:
        """Become what the bytes describe; the steps committed, and the lineage. One of another job changes nothing."""
        try:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for damaged bytes; all mean the same
            raise CheckpointError(f"{origin} cannot be read: {str(error).partition(chr(10))[0][:200]}") from None
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise CheckpointError(f"{origin} is not of this version of ebbflow; delete it, or use the version it is of")
        if state["job"] != dict(self.job):
            raise CheckpointError(
                f"{origin} is of another job: {describe_difference(self.job, state['job'])}; use the same settings, or "
                f"another folder"
            )
        load_model(self.model, state["model"], Path(origin))
        self.flow.optimizer.load_state_dict(state["optimizer"])
        if self.flow.average is not None and state["average"] is not None:
            self.flow.average.load_state_dict(state["average"])
        if self.flow.growth is not None:
            self.flow.growth.load_state_dict(state["growth"])
        for name, extra in self.extras.items():
            extra.load_state_dict(state["extras"][name])
        self.flow.ledger = Ledger.restore(state["ledger"])
        self.flow.step = int(state["step"])
        self.flow.wall_s = float(state["wall_s"])
        self.engine.lineage = int(state["lineage"])
        torch.set_rng_state(state["rng"])
        return self.flow.step, self.engine.lineage

    def refresh(self) -> tuple[int, int] | None:
        """Become what the newest checkpoint remembers, if it is further; the number of committed steps, the lineage."""
        found = self.checkpoints.newest(beyond=self.flow.step)
        if found is None:
            return None
        path, data = found
        loaded = self.unpack(data, str(path))
        self.checkpoints.on_event("restored", f"from {path.name}")
        return loaded

    @property
    def finished(self) -> bool:
        """Whether all epochs are done (all the gain, where the rule counts that)."""
        if self.flow.optimizer.total_samples:
            return self.flow.optimizer.finished
        return self.flow.ledger.epoch >= self.epochs
