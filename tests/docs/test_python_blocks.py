"""Python code on the pages: every block of it is run by a test."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ebbflow
from ebbflow.core.choices import Choice, write_choice

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PYTHON = re.compile(r"^```python.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    """Those that no command of the page runs: a block with the name of a file is written there by test_guide.py."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_block_of_every_page_is_run() -> None:
    """Elsewhere in this file, or in the file that is named here."""
    elsewhere = {
        "CONTRIBUTING.md": (1, "test_contributing.py"),
        "docs/dask.md": (2, "this file"),
        "docs/estimators.md": (4, "tests/estimators/test_growing_examples.py"),
        "docs/which-rule.md": (1, "this file"),
    }
    expected = {page: count for page, (count, _) in elsewhere.items()}
    expected |= {"README.md": 2, "docs/choose.md": 1, "docs/guide.md": 2, "docs/live.md": 1}
    expected |= {"docs/live-operations.md": 1, "docs/live-ranks.md": 1}
    expected |= {"docs/own-loops.md": 1, "docs/torchrun.md": 1, "docs/workloads.md": 1}
    pages = [str(page.relative_to(ROOT)) for page in PAGES if page.name != "api.md"]
    assert {page: len(blocks_of(page)) for page in pages if blocks_of(page)} == expected


class _Session(ebbflow.Session):
    """Two virtual workers in the place of a live fleet, whose loop is the same; tests/live has real ones."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, trace="constant(workers=2)", loader_workers=0, **{**settings, "epochs": 1})


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has who pastes a block into a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spot.csv").write_text("time_s,accelerators\n0,2\n60,3\n3600,3\n", encoding="utf-8")
    model = torch.nn.Linear(3, 1)
    data = TensorDataset(torch.randn(200, 3), torch.randn(200, 1))
    found = {name: getattr(ebbflow, name) for name in ("BatchPlan", "ElasticOptimizer", "ElasticSampler")}
    return found | {
        "ebbflow": ebbflow, "model": model, "data": data, "DataLoader": DataLoader, "loss_fn": torch.nn.MSELoss(),
        "SGD": torch.optim.SGD, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip


def run(page: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(blocks_of(page)[number], page, "exec"), names)
    return names


def test_the_two_lines_of_the_readme_train(names: dict[str, Any]) -> None:
    found = run("README.md", 0, names)
    assert found["optimizer"].updates == 4 and found["sampler"].epoch == 1  # of 64, 64, 64 and 8 samples


@pytest.mark.parametrize(("page", "number"), [("README.md", 1), ("docs/guide.md", 1), ("docs/live.md", 0)])
def test_the_loop_of_a_live_fleet_trains(
    page: str, number: int, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
    live = importlib.import_module("ebbflow.live")
    monkeypatch.setattr(live, "join", _Session)
    assert run(page, number, names)["fleet"].flow.finished


def test_a_loss_weighted_by_class_does_not_depend_on_who_shares_a_step() -> None:
    class_weights = torch.tensor([1.0, 30.0, 0.1])
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 3, generator=generator), torch.randint(3, (96,), generator=generator))
    functions = {"ebbflow": ebbflow, "cross_entropy": torch.nn.functional.cross_entropy, "class_weights": class_weights}
    loss = run("docs/guide.md", 0, functions)["loss"]
    trained = []
    for workers in (1, 4):
        model = torch.nn.Linear(3, 3)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        settings = {"trace": f"constant(workers={workers})", "local_batch": 32 // workers, "base_batch": 32}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ebbflow.Session(model, optimizer, data, rule="constant", epochs=2, loss=loss, **settings) as session:
            session.run()
        trained.append(model.weight.detach())
    torch.testing.assert_close(*trained)


def test_a_checkpoint_of_a_fleet_is_read_as_the_page_shows(names: dict[str, Any], tmp_path: Path) -> None:
    model = names["model"]
    dcp = importlib.import_module("torch.distributed.checkpoint")
    folder = re.findall(r'folder = "(.*?)"', blocks_of("docs/live-operations.md")[0])[0]
    kept = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about a single process
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / folder)
        torch.nn.init.zeros_(model.weight)
        run("docs/live-operations.md", 0, names)
    assert torch.equal(model.weight, kept)


@pytest.mark.parametrize(
    ("page", "number", "example"),
    [
        ("docs/live-ranks.md", 0, "live_fsdp"),
        ("docs/own-loops.md", 0, "mnist"),
        ("docs/torchrun.md", 0, "torchtitan_loop"),
    ],
)
def test_a_fragment_is_from_an_example_which_a_test_runs(page: str, number: int, example: str) -> None:
    """Line by line, up to comments and indentation; what depends on the reader's script may differ."""
    script = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    own = ("...", "model = MyModel()", "with ebbflow.live.join(")

    def code(text: str) -> list[str]:
        return [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]

    for line in code(blocks_of(page)[number]):
        assert line in code(script) or line.startswith(own), line


def test_a_choice_is_used_as_the_page_shows(names: dict[str, Any], tmp_path: Path) -> None:
    write_choice(Choice(rule="sqrt", lr=0.25, source={"ref_batch": 16}), tmp_path / "choice.toml")
    found = run("docs/choose.md", 0, names)
    sampler = ebbflow.ElasticSampler(names["data"], 2, local_batch=8)
    optimizer = found["elastic"](names["model"], sampler)
    assert str(optimizer.rule) == "sqrt" and optimizer.param_groups[0]["lr"] == 0.25


def test_a_stream_is_read_as_the_page_shows(names: dict[str, Any]) -> None:
    found = run("docs/workloads.md", 0, names | {"stream": range(1_000_000)})
    assert [found["data"][i] for i in next(iter(found["sampler"]))] == list(range(32))


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_programs_of_the_page_about_dask_run(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    policy, program = PYTHON.findall((ROOT / "docs" / "dask.md").read_text(encoding="utf-8"))
    (tmp_path / "policy.py").write_text(f"{policy}\n\nprint(Doubling(every=10, initial=8))\n", encoding="utf-8")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    # Epochs of 2,000 samples: 63 steps of 32; 31 steps of 64, since two workers can do no more, and one of 16, twice.
    # That is 127. Until the second worker is there, which may take a while, steps are of 32: at most 189.
    steps = {f"{count} steps" for count in range(127, 190)}
    for name, expected in (("policy.py", {"doubling(10, initial=8)"}), ("program.py", steps)):
        result = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] in expected


def test_the_code_of_the_page_for_people_in_a_hurry_runs() -> None:
    (program,) = PYTHON.findall((ROOT / "docs" / "which-rule.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(program, "which-rule.md", "exec"), names)
    assert str(names["optimizer"].rule) == "adascale+statewarmup(0.05)"
