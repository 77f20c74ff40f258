"""The scripts of docs/own-loops.md: their diffs, what they train, and what the frameworks do that is refused."""

from __future__ import annotations

import importlib.util
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.page_diffs import changed_lines, without_diff
from ebbflow.optim.elastic import ElasticOptimizer

pytestmark = pytest.mark.slow  # all of it together: it imports frameworks

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {
    "mnist": "sklearn",
    "nanogpt": "torch",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings of the frameworks' own are not ours; those of ours are errors, as in all tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("error", message=r".*(micro-batches|set_epoch)")
        yield
    torch.set_num_threads(threads)


@cache
def loaded(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def example(name: str) -> Callable[..., Any]:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed")
    main: Callable[..., Any] = loaded(name)["main"]
    return main


def elastic(optimizer: Any) -> ElasticOptimizer:
    assert isinstance(optimizer, ElasticOptimizer)
    return optimizer


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# The scripts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_diff_on_the_page_leads_from_a_plain_script_to_the_example(name: str) -> None:
    """What the page adds is in the example; without it, and with what the page removes, a plain script runs."""
    script = without_diff("own-loops.md", name)
    assert not re.search(r"Elastic\w+\(", script)
    example(name)  # skips if the framework is missing
    plain: dict[str, Any] = {"__name__": name}
    exec(compile(script, name, "exec"), plain)
    plain["main"]()


def test_the_page_says_how_many_lines_change() -> None:
    page = (ROOT / "docs" / "own-loops.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\.py\]\(([\w.-]*)#.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    said = {name: (int(added), int(removed)) for name, _, added, removed in rows}
    assert len(said) == 7
    assert said == {name: changed_lines(place or "own-loops.md", name) for name, place, _, _ in rows}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_script_trains_the_same_on_eight_workers_as_on_one_with_the_whole_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an epoch, in double precision where the data are tokens: Adam makes much of gradients that are nearly 0."""
    main = example(name)
    monkeypatch.setitem(main.__globals__, "EPOCHS", 1)
    tokens = name != "mnist"
    torch.set_default_dtype(torch.float64 if tokens else torch.float32)
    try:
        model, optimizer, _ = main(plan=8, local_batch=4)
        whole, reference, _ = main(plan=1, local_batch=32)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = elastic(optimizer)
    assert optimizer.updates == elastic(reference).updates > 0
    assert optimizer.sampler is not None and optimizer.sampler.epoch == 1
    close = {"rtol": 1e-6, "atol": 1e-8} if tokens else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(weights(model), weights(whole), **close)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("mnist", 0.85, 1.0),
        ("nanogpt", 0.0, 2.0),
    ],
)
def test_a_script_learns_on_workers_that_come_and_go(name: str, least: float, most: float) -> None:
    _, optimizer, score = example(name)()
    assert least < score < most
    position = elastic(optimizer).state_dict()["sampler"]
    assert (position["epoch"], position["position"]) == (loaded(name)["EPOCHS"], 0)
