"""scikit-learn's own suite for estimators, on both of ours as they are when nothing is said."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from ebbflow.sklearn import EbbflowClassifier, EbbflowRegressor


def exceptions(estimator: Any) -> dict[str, str]:
    """The checks that our estimators need not pass, and why."""
    return {
        "check_do_not_raise_errors_in_init_or_set_params": (
            "it takes **kwargs, which carry settings such as module__hidden, for a parameter of the name kwargs"
        ),
    }


@pytest.mark.slow
@parametrize_with_checks([EbbflowClassifier(), EbbflowRegressor()], expected_failed_checks=exceptions)
def test_an_estimator_keeps_the_conventions(estimator: Any, check: Any) -> None:
    check(estimator)
