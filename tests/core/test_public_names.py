"""The public names, and that a name means one thing in the whole source tree."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

import ebbflow

SOURCE = Path(ebbflow.__file__).parent

PUBLIC = {
    "ebbflow": [
        "BatchPlan", "EbbflowError", "ElasticOptimizer", "ElasticSampler", "PreemptionNotice", "RunConfig", "Scaling",
        "Session", "StepContext", "Trace", "__version__", "choose", "make_rule", "read_record", "register_engine",
        "register_modifier", "register_notice",
        "register_optimizer", "register_policy", "register_price", "register_rule", "register_schedule",
        "register_trace", "register_trace_format", "register_workload", "train",
    ],
    "ebbflow.live": ["Account", "LiveSession", "ReplicaConfig", "account", "join", "join_workload", "read_fleet"],
    "ebbflow.simulate": [
        "ComputeAndNetwork", "FlatPrice", "Ideal", "NETWORKS", "PriceHistory", "RECOVERIES", "STRAGGLERS", "Scenario",
        "ScenarioSettings", "Simulation", "WholeStep", "make_price", "on_demand", "parse_step_time", "read_prices",
        "register_price", "simulate",
    ],
    "ebbflow.sklearn": ["EbbflowClassifier", "EbbflowRegressor"],
}  # fmt: skip
"""Whoever removes or renames one of these breaks the programs of users; whoever adds one keeps it for long."""


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these_and_can_be_imported(module: str) -> None:
    if module == "ebbflow.sklearn":
        pytest.importorskip("skorch", reason="the dask extra is not installed")
    found = importlib.import_module(module)
    assert sorted(found.__all__) == PUBLIC[module]
    for name in PUBLIC[module]:
        assert getattr(found, name) is not None


@pytest.mark.parametrize("module", PUBLIC)
def test_a_name_that_is_not_there_is_an_attribute_error(module: str) -> None:
    found = importlib.import_module(module)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        found.nothing_of_the_kind  # noqa: B018


def test_every_name_of_a_package_is_declared_for_type_checkers_too() -> None:
    for module in ("__init__.py", "live/__init__.py", "estimators/__init__.py"):
        tree = ast.parse((SOURCE / module).read_text())
        (declared,) = (node for node in tree.body if isinstance(node, ast.If))
        names = {alias.asname for node in declared.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        package = importlib.import_module(f"ebbflow.{module.removesuffix('__init__.py').strip('/')}".strip("."))
        assert names == set(package.__all__) - {"__version__"}


def test_module_names_are_unique() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    packages = [path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE]
    counts = Counter([path.stem for path in files] + [path.name for path in packages])
    assert not [name for name, count in counts.items() if count > 1]


def test_public_class_names_are_unique() -> None:
    counts = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in counts.items() if count > 1]
