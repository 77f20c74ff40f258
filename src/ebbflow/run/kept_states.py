"""The states of a run that are kept for its rule, which goes back to one of them or compares what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ebbflow.core.memory import free_memory
from ebbflow.engines.base import Engine
from ebbflow.engines.batches import map_batch
from ebbflow.engines.replica_ranks import local_shard
from ebbflow.optim.ema import averaging_dtype
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.rules.rule import StepContext

__all__ = ["BRANCH_STATES", "KEPT", "KeptStates"]

KEPT = ("snapshot", "unconfirmed", "branches")
"""The names under which they lie in the state of a run."""
BRANCH_STATES = ("start", "best", "last")
"""The states among the branches."""
_PART_OF_MEMORY = 0.25
"""Largest part of the free memory of the host that one of them may take; there are three at most."""


class Resumable(Protocol):
    """A run whose state can be kept."""

    engine: Engine
    optimizer: RuleOptimizer

    def state_dict(self, *, kept: bool = True) -> dict[str, Any]:
        """The present state; without those that are `kept`, if asked so."""

    def go_back(self, state: Mapping[str, Any]) -> float:
        """Go on from an earlier state; the samples that are given back."""


class KeptStates:
    """Keeps the states that the rule asks for; all tensors are in the memory of the host."""

    def __init__(self) -> None:
        self.snapshot: Mapping[str, Any] | None = None
        """The state to which the run goes back if the rule asks for it."""
        self.unconfirmed: Mapping[str, Any] | None = None
        """A later state, which takes the place of the snapshot once the rule confirms it."""
        self.branches: Mapping[str, Any] | None = None
        """While the rule compares branches: the state at their `start`, the `best` end so far, the end of the `last`
        one, which is being scored; the `sum` of the weights of the present one and their `count`."""
        self._too_large = 0.0
        self._told_too_large = False

    def begin(self, run: Resumable) -> None:
        """Before the first step: keep its state for a rule that guards the run."""
        if self.snapshot is None and run.optimizer.rule.guards and self._fits(run):
            self.snapshot = _present(run)

    def review(self, run: Resumable, context: StepContext, loss: float) -> dict[str, float]:
        """Do what the rule asks for after a step: keep the state, forget what was kept, or go back to it.

        Returns the samples that were given back, under the name that they have in the record.
        """
        verdict = run.optimizer.review(context, loss)
        kept = dict(self.branches or {})
        match verdict:
            case "snapshot" | "branch" if not self._fits(run):
                pass
            case "snapshot":
                self.snapshot, self.unconfirmed = self.unconfirmed or self.snapshot, _present(run)
            case "confirm":
                self.snapshot, self.unconfirmed = self.unconfirmed or self.snapshot, None
            case "release":
                self._forget()
            case "restore" if self.snapshot is not None:
                self.unconfirmed = None
                return self._go_back(run, self.snapshot)
            case "branch":
                self.branches = {"start": _present(run)}
            case "average" | "score average" | "score":
                self._score(run, verdict, kept)
            case "next" | "lead":
                best = kept.pop("last") if verdict == "lead" else kept.get("best")
                self.branches = {"start": kept["start"], "best": best}
                return self._go_back(run, kept["start"])
            case "adopt" | "adopt last":
                self.branches = None
                return self._go_back(run, kept["best" if verdict == "adopt" else "last"])
        return {}

    def take_notes(self) -> dict[str, float]:
        """What the next row says: the size of a state that was asked for and takes too much of the memory."""
        size, self._too_large = self._too_large, 0.0
        return {"too_large_gb": size} if size else {}

    def state_dict(self) -> dict[str, Any]:
        """The states that are kept now, by name: a part of the state of the run."""
        return {name: state for name in KEPT if (state := getattr(self, name)) is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was kept at the saved `state` of a run."""
        self.snapshot, self.unconfirmed, self.branches = (state.get(name) for name in KEPT)

    def _forget(self) -> None:
        self.snapshot = self.unconfirmed = self.branches = None

    def _fits(self, run: Resumable) -> bool:
        """Whether the present state may be kept in the memory of the host; if not, the rule does without from now on.

        How much memory is free differs between processes, which must decide alike: those of a group keep it, and only
        say that it is large.
        """
        free = free_memory()
        parts = (run.engine.model.state_dict(), run.optimizer.inner.state_dict()["state"])
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(parts))
        if free is None or size <= _PART_OF_MEMORY * free or self._told_too_large:
            return True
        self._too_large = size / 1e9
        if not run.engine.single_process:
            self._told_too_large = True
            return True
        run.optimizer.rule_unkept()
        self._forget()
        return False

    def _score(self, run: Resumable, verdict: str, kept: dict[str, Any]) -> None:
        """Add the weights to the average of a branch; at its end keep the state, and put the average in its place."""
        run.engine.sync()
        weights = dict(run.engine.model.named_parameters())
        if verdict != "score":
            summed = kept.get("sum") or {
                name: torch.zeros_like(weight, dtype=averaging_dtype(weight)) for name, weight in weights.items()
            }
            kept["sum"] = {name: summed[name].to(weight.device) + weight.detach() for name, weight in weights.items()}
            kept["count"] = kept.get("count", 0) + 1
        if verdict != "average":
            kept["last"] = _present(run)
        if verdict == "score average":
            summed, count = kept.pop("sum"), kept.pop("count")
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(summed[name] / count)
            if run.engine.replicated:
                run.engine.snapshot_loaded(kept["last"]["known"])
        self.branches = kept

    def _go_back(self, run: Resumable, state: Mapping[str, Any]) -> dict[str, float]:
        """Go on from a state that was kept; what the rule has learned since goes on, and so does what is kept."""
        kept = (self.snapshot, self.unconfirmed, self.branches)
        reviewed = run.optimizer.rule_state
        given_back = run.go_back(_in_host_memory(state))  # a copy: torch's optimizers go on with the tensors they load
        run.optimizer.rule_restored(reviewed)
        self.snapshot, self.unconfirmed, self.branches = kept
        run.engine.snapshot_loaded(state["known"])
        return {"given_back": given_back}


def _present(run: Resumable) -> dict[str, Any]:
    """The present state of a run, to be kept."""
    return {**_in_host_memory(run.state_dict(kept=False)), "known": run.engine.snapshot_taken()}


def _in_host_memory(state: Any) -> Any:
    """A copy of a state in plain containers, whose tensors no step changes."""
    return map_batch(state, lambda value: value.detach().to("cpu", copy=True) if hasattr(value, "detach") else value)


def _tensors(state: Any) -> list[torch.Tensor]:
    """The tensors in a state; of a sharded one those of this rank."""
    found: list[torch.Tensor] = []
    map_batch(state, lambda value: found.append(local_shard(value)) if isinstance(value, torch.Tensor) else None)
    return found
