"""scikit-learn estimators whose batch, and cluster, grow while they fit.

    from ebbflow.sklearn import EbbflowClassifier

    model = EbbflowClassifier(batch_size="geo(delay=5ep, factor=2)", rule="constant", max_epochs=20)
    model.fit(X, y).score(X_test, y_test)

Built on skorch, which the extra `dask` installs. torch and skorch are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ebbflow.core.extras import require

if TYPE_CHECKING:
    from ebbflow.estimators.elastic_estimators import EbbflowClassifier as EbbflowClassifier
    from ebbflow.estimators.elastic_estimators import EbbflowRegressor as EbbflowRegressor

__all__ = ["EbbflowClassifier", "EbbflowRegressor"]

_HOME = {
    "EbbflowClassifier": "ebbflow.estimators.elastic_estimators",
    "EbbflowRegressor": "ebbflow.estimators.elastic_estimators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ebbflow.sklearn' has no attribute {name!r}; it has {', '.join(__all__)}")
    require("skorch", extra="dask", needed_for=f"ebbflow.sklearn.{name}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
