"""Something of a script that belongs to its state."""

from __future__ import annotations

from typing import Any


class Counter:
    """Counts the steps of a loop."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
