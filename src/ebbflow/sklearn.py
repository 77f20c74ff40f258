"""scikit-learn estimators whose batch, and cluster, grow while they fit: `ebbflow.estimators` under its public name."""

from __future__ import annotations

from typing import Any

from ebbflow import estimators
from ebbflow.estimators import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(estimators, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
