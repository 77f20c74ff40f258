"""`EbbflowClassifier`."""
# ruff: noqa: N803, N806, because X is scikit-learn's name for it

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from skorch.callbacks import EpochScoring

from ebbflow.estimators.base import EbbflowNet
from ebbflow.estimators.blocks import accuracy, check_blocks, distinct, is_dask, map_rows
from ebbflow.estimators.inputs import Encoded, as_tensor, encode, targets_of

__all__ = ["EbbflowClassifier"]


class EbbflowClassifier(ClassifierMixin, EbbflowNet):  # type: ignore[misc]  # both have no types
    """A classifier: a PyTorch module, trained with a batch that may grow, behind the interface of scikit-learn.

        model = EbbflowClassifier(batch_size="geo(delay=5ep, factor=2)", max_epochs=20, random_state=0)
        model.fit(X, y).score(X_test, y_test)

    The module returns a logit for each class; without one, layers are made that suit the data. Labels may be of any
    kind; the module sees their positions in `classes_`. See `EbbflowNet` for guarantees and limits.
    """

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
        """The probability of each class, in the order of `classes_`; of a Dask array as a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            return map_rows(_probabilities, self._for_blocks(), blocks, dtype=np.float32, columns=len(self.classes_))
        return self._answers(X)

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample; of a Dask array as a Dask array."""
        if is_dask(X):
            blocks, _ = check_blocks(self, X, reset=False)
            return map_rows(_labels, self._for_blocks(), blocks, dtype=self.classes_.dtype, columns=None)
        codes = self._answers(X).argmax(axis=1)
        # While it fits, callbacks compare with the targets of the module, which are codes.
        return codes if self._fitting else self.classes_[codes]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The accuracy; of Dask arrays computed where their blocks lie."""
        if is_dask(X):
            return accuracy(check_blocks(self, X, y, reset=False)[1], self.predict(X))
        return float(super().score(X, y, sample_weight))


def _probabilities(net: EbbflowClassifier, block: Any) -> Any:
    return net._answers(block, block=True)


def _labels(net: EbbflowClassifier, block: Any) -> Any:
    return net.classes_[_probabilities(net, block).argmax(axis=1)]
