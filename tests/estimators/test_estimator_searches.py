"""Searches, pipelines and cross-validation, of scikit-learn and of dask-ml, take our estimators as any other."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise
from ebbflow.sklearn import EbbflowClassifier, EbbflowRegressor

DIGITS, LABELS = (part[:240] for part in load_digits(return_X_y=True))


def classifier(**settings: object) -> EbbflowClassifier:
    return EbbflowClassifier(random_state=0, **{"max_epochs": 4, "batch_size": 16, **settings})


def test_a_grid_search_reaches_the_settings_of_every_part() -> None:
    grid = {
        "batch_size__factor": [1, 4],
        "module__hidden": [(4,), (16,)],
        "optimizer__weight_decay": [1e-4],
    }
    search = GridSearchCV(classifier(batch_size="geo(delay=1ep, initial=8)"), grid, cv=2).fit(DIGITS, LABELS)
    assert len(search.cv_results_["params"]) == 4
    best = search.best_estimator_
    assert best.module_.layers[1].out_features == search.best_params_["module__hidden"][0]
    # 240 samples in 8, and after the first epoch in 8 factor: 30 updates, and 30, 30, 30 or 8, 2, 1.
    assert best.n_updates_ == {1: 120, 4: 41}[search.best_params_["batch_size__factor"]]


def test_the_report_of_a_search_shows_its_candidates_apart(tmp_path: Path) -> None:
    grid = {"lr": [0.01, 0.1], "batch_size": [16, 40], "module__hidden": [(4,), (8,)]}
    model = classifier(record=tmp_path, max_epochs=1)
    GridSearchCV(model, grid, cv=2, refit=False).fit(DIGITS, LABELS)
    cells = summarise(load_results(tmp_path).arms).cells
    candidates = [f"constant, lr={lr}, module__hidden={hidden}" for lr in (0.01, 0.1) for hidden in ("(4,)", "(8,)")]
    shown = [(cell.trace, cell.rule) for cell in cells]
    assert sorted(shown) == sorted((f"batch {batch}", rule) for batch in (16, 40) for rule in candidates)
    assert [len(cell.values) for cell in cells] == [2] * 8, "two folds"
    assert not load_results(tmp_path).problems
    # The same fits once more are no further runs, but take the place of the first.
    one = {"lr": [0.1], "batch_size": [40], "module__hidden": [(4,)]}
    GridSearchCV(model, one, cv=2, refit=False).fit(DIGITS, LABELS)
    results = load_results(tmp_path)
    assert len(results.arms) == 16
    assert len(results.problems) == 2 and all("is left out" in problem for problem in results.problems)
    # A single candidate has no parameters that tell it from others.
    folder = tmp_path / "one"
    cross_val_score(classifier(record=folder, max_epochs=1), DIGITS, LABELS, cv=3)
    (cell,) = summarise(load_results(folder).arms).cells
    assert (cell.rule, len(cell.values)) == ("constant", 3)


def test_a_random_search_runs_in_a_pipeline() -> None:
    pipeline = make_pipeline(StandardScaler(), classifier())
    names = {"ebbflowclassifier__lr": [1e-3, 1e-2], "ebbflowclassifier__rule": ["constant", "sqrt"]}
    search = RandomizedSearchCV(pipeline, names, n_iter=2, cv=2, random_state=0).fit(DIGITS, LABELS)
    assert search.best_score_ > 0.3
    assert search.predict(DIGITS).shape == (240,)


def test_cross_validation_scores_a_regressor() -> None:
    inputs = np.random.default_rng(0).normal(size=(200, 3))
    model = EbbflowRegressor(max_epochs=30, random_state=0)
    assert cross_val_score(model, inputs, inputs.sum(axis=1), cv=3).min() > 0.9


def test_the_same_seed_gives_the_same_scores() -> None:
    here = cross_val_score(classifier(), DIGITS, LABELS, cv=2)
    np.testing.assert_array_equal(cross_val_score(classifier(), DIGITS, LABELS, cv=2), here)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_grid_search_of_dask_ml_takes_it_without_a_cluster() -> None:
    from dask_ml.model_selection import GridSearchCV as DaskGridSearch

    search = DaskGridSearch(classifier(), {"lr": [1e-3, 1e-2]}, cv=2, scheduler="synchronous").fit(DIGITS, LABELS)
    assert search.best_params_ == {"lr": 1e-2}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_incremental_wrapper_of_dask_ml_trains_block_by_block() -> None:
    from dask_ml.wrappers import Incremental

    inputs, labels = da.from_array(DIGITS / 16, chunks=(80, 64)), da.from_array(LABELS, chunks=80)
    with dask.config.set(scheduler="synchronous"):
        model = Incremental(classifier()).fit(inputs, labels, classes=range(10))
    assert model.estimator_.n_epochs_ == 3
