"""`EbbflowRegressor`."""
# ruff: noqa: N803, N806, because X is scikit-learn's name for it

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin

from ebbflow.estimators.base import EbbflowNet
from ebbflow.estimators.blocks import check_blocks, is_dask, map_rows, r2
from ebbflow.estimators.inputs import as_tensor, targets_of

__all__ = ["EbbflowRegressor"]


class EbbflowRegressor(RegressorMixin, EbbflowNet):  # type: ignore[misc]  # both have no types
    """A regressor: a PyTorch module, trained with a batch that may grow, behind the interface of scikit-learn.

        model = EbbflowRegressor(MyModule, module__features=10, optimizer=torch.optim.Adadelta, lr=1.0)
        model.set_params(batch_size="geo", batch_size__delay="60ep", batch_size__factor=5).fit(X, y)

    Targets are a value or a row of them for each sample. See `EbbflowNet` for guarantees and limits.
    """

    _default_criterion = torch.nn.MSELoss

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _outputs(self) -> int:
        return int(self.n_outputs_)

    def _check_training(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        X, y = self._check_inputs(X, y, reset=reset, multi_output=True, y_numeric=True)
        shape = np.shape(targets_of(X)) if y is None else y.shape
        if reset:
            self.n_outputs_ = shape[1] if len(shape) > 1 else 1
            self._flat = len(shape) == 1
        if y is not None:
            y = y.astype(self.dtype or y.dtype)
        return X, y if y is None or is_dask(y) else as_tensor(y)

    def predict(self, X: Any) -> Any:
        """The value of each sample, or a row of them; of the shape that y had, and a Dask array of a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            columns = None if self._flat else self.n_outputs_
            return map_rows(_values, self._for_blocks(), blocks, dtype=np.float64, columns=columns)
        return self._shaped(self._answers(X))

    def _shaped(self, answers: Any) -> Any:
        values = answers.astype(np.float64)
        return values[:, 0] if self._flat and values.ndim == 2 and values.shape[1] == 1 else values

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R2, the coefficient of determination; of Dask arrays computed where their blocks lie."""
        if is_dask(X):
            return r2(check_blocks(self, X, y, reset=False)[1], self.predict(X))
        return float(super().score(X, y, sample_weight))

    @property
    def predict_proba(self) -> Any:
        """A regressor has none; skorch's would be the values."""
        raise AttributeError("EbbflowRegressor has no predict_proba; use predict")


def _values(net: EbbflowRegressor, block: Any) -> Any:
    return net._shaped(net._answers(block, block=True))
