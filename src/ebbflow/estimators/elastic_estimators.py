"""`EbbflowClassifier` and `EbbflowRegressor`."""
# ruff: noqa: N803, N806, because X is scikit-learn's name for it

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from skorch.callbacks import EpochScoring

from ebbflow.estimators.dask_arrays import accuracy, check_blocks, distinct, is_dask, map_rows, r2
from ebbflow.estimators.inputs import Encoded, as_tensor, encode, targets_of
from ebbflow.estimators.net import EbbflowNet

__all__ = ["EbbflowClassifier", "EbbflowRegressor"]


class EbbflowClassifier(ClassifierMixin, EbbflowNet):  # type: ignore[misc]  # both have no types
    """A PyTorch module as a classifier of scikit-learn, trained with a batch that may grow.

        model = EbbflowClassifier(batch_size="geo(delay=5ep, factor=2)", max_epochs=20, random_state=0)
        model.fit(X, y).score(X_test, y_test)

    The module returns one logit per class; without a module, fully connected layers are sized by the data. Labels may
    be of any kind; the module sees their positions in `classes_`. See `EbbflowNet` for guarantees and limits."""

    _default_criterion = torch.nn.CrossEntropyLoss

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        accuracy = EpochScoring("accuracy", name="valid_acc", lower_is_better=False)
        before, after = super()._default_callbacks[:3], super()._default_callbacks[3:]
        return [*before, ("valid_acc", accuracy), *after]

    def _outputs(self) -> int:
        return len(self.classes_)

    def _check_training(self, X: Any, y: Any, *, reset: bool, classes: Any = None) -> tuple[Any, Any]:
        X, y = self._check_inputs(X, y, reset=reset)
        if is_dask(X):
            if reset:
                self.classes_ = distinct(y) if classes is None else np.unique(np.asarray(classes))
            return X, y.reshape(-1).map_blocks(encode, self.classes_, dtype=np.int64)
        labels = targets_of(X) if y is None else y
        check_classification_targets(labels)
        labels = column_or_1d(labels, warn=True)
        if reset:
            self.classes_ = np.unique(labels if classes is None else np.asarray(classes))
        codes = encode(labels, self.classes_)
        if y is not None:
            return X, as_tensor(codes)
        return (X if np.array_equal(codes, labels) else Encoded(X, self.classes_)), None

    def predict_proba(self, X: Any) -> Any:
        """Probabilities of the classes, in the order of `classes_`; a Dask array for a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            return map_rows(_probabilities, self._for_blocks(), blocks, dtype=np.float32, columns=len(self.classes_))
        return self._answers(X)

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample; a Dask array for a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            return map_rows(_labels, self._for_blocks(), blocks, dtype=self.classes_.dtype, columns=None)
        codes = self._answers(X).argmax(axis=1)
        # During a fit, callbacks compare with the targets of the module, which are positions.
        return codes if self._fitting else self.classes_[codes]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The accuracy; for Dask arrays it is computed where their blocks are."""
        if is_dask(X):
            return accuracy(check_blocks(self, X, y, reset=False)[1], self.predict(X))
        return float(super().score(X, y, sample_weight))


def _probabilities(net: EbbflowClassifier, block: Any) -> Any:
    return net._answers(block, block=True)


def _labels(net: EbbflowClassifier, block: Any) -> Any:
    return net.classes_[_probabilities(net, block).argmax(axis=1)]


class EbbflowRegressor(RegressorMixin, EbbflowNet):  # type: ignore[misc]  # both have no types
    """A PyTorch module as a regressor of scikit-learn, trained with a batch that may grow.

        model = EbbflowRegressor(MyModule, module__features=10, optimizer=torch.optim.Adadelta, lr=1.0)
        model.set_params(batch_size="geo", batch_size__delay="60ep", batch_size__factor=5).fit(X, y)

    Targets are one value or one row of values per sample. See `EbbflowNet` for guarantees and limits.
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
        """The value or row of values of each sample, in the shape that y had; a Dask array for a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            columns = None if self._flat else self.n_outputs_
            return map_rows(_values, self._for_blocks(), blocks, dtype=np.float64, columns=columns)
        return self._shaped(self._answers(X))

    def _shaped(self, answers: Any) -> Any:
        values = answers.astype(np.float64)
        return values[:, 0] if self._flat and values.ndim == 2 and values.shape[1] == 1 else values

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R2, the coefficient of determination; for Dask arrays it is computed where their blocks are."""
        if is_dask(X):
            return r2(check_blocks(self, X, y, reset=False)[1], self.predict(X))
        return float(super().score(X, y, sample_weight))

    @property
    def predict_proba(self) -> Any:
        """Not available: skorch's method of this name would return the values."""
        raise AttributeError("EbbflowRegressor has no predict_proba; use predict")


def _values(net: EbbflowRegressor, block: Any) -> Any:
    return net._shaped(net._answers(block, block=True))
