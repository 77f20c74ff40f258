"""What is not public in another library is used in one module, which looks for it when it is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import ebbflow
from ebbflow import torch_api
from ebbflow.errors import BrokenExtra, ConfigError

SOURCE = Path(ebbflow.__file__).parent
PROJECT = SOURCE.parents[1] / "pyproject.toml"
GUARDED = {
    "torch": "torch_api.py",
    "torchft": "live/torchft_api.py",
    "distributed": "engines/dask/distributed_api.py",
    "torchvision": "workloads/torchvision_import.py",
}
"""Library -> the module of ours that uses what is not public in it."""
DOCUMENTED = {"distributed.diagnostics.plugin"}
"""Modules whose names are public, although the library's own package does not export them."""


@cache
def used() -> list[tuple[str, str]]:
    """(module of ours, dotted name of a library in its code), for all modules."""
    files = sorted(SOURCE.rglob("*.py"))
    return [(f.relative_to(SOURCE).as_posix(), name) for f in files for name in used_names(ast.parse(f.read_text()))]


def dotted(node: ast.AST) -> str:
    """The text of a.b.c, and nothing for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def used_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of libraries in a module's code: what it imports, and attributes of imported modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def is_private(name: str) -> bool:
    library, *rest = name.split(".")
    if library == "distributed" and len(rest) > 1:
        return ".".join([library, *rest[:-1]]) not in DOCUMENTED
    return library in GUARDED and any(part.startswith("_") and not part.startswith("__") for part in rest)


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch._foreach_add_", True), ("torch._dynamo.exc", True), ("torch.nn.Module", False),
        ("torchft._torchft", True), ("distributed.Client", False), ("distributed.actor.ProxyRPC", True),
        ("torch.__version__", False), ("distributed.diagnostics.plugin.WorkerPlugin", False), ("os._exit", False),
    ],
)  # fmt: skip
def test_what_counts_as_private(name: str, private: bool) -> None:
    assert is_private(name) == private


def test_only_the_guarded_modules_use_private_members() -> None:
    found = {(place, name) for place, name in used() if is_private(name) and place != GUARDED[name.partition(".")[0]]}
    assert not found


@pytest.mark.parametrize("library", ["torchft", "torchvision"])
def test_only_the_guarded_module_imports_the_library_at_all(library: str) -> None:
    importing = {place for place, name in used() if name.partition(".")[0] == library}
    assert importing <= {GUARDED[library]}


def requirement(library: str) -> str:
    """What pyproject.toml says about a library, without its name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    every = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    (found,) = {text for text in every if re.match(rf"{library}\b(?!\[)[<>=~!]", text)}
    return found.removeprefix(library)


def test_the_installed_torch_is_supported_and_has_all_that_is_used() -> None:
    import torch.distributed.checkpoint._state_dict_stager  # torch imports it when it is asked for

    assert requirement("torch") == f">={torch_api.MINIMUM_VERSION}"
    assert not torch_api.missing_members(), f"torch {torch.__version__}: adapt ebbflow.torch_api"
    assert "_foreach_nothing" in torch_api.missing_members(("_foreach_nothing", "_foreach_add_"))


def test_the_installed_distributed_is_supported_and_has_all_that_is_used() -> None:
    api = pytest.importorskip("ebbflow.engines.dask.distributed_api", reason="the dask extra is not installed")
    assert requirement("distributed") == f">={api.MINIMUM_VERSION}"
    version = importlib.metadata.version("distributed")
    assert not api.missing_members(), f"distributed {version}: adapt ebbflow.engines.dask.distributed_api"
    assert api.missing_members(("actor:ProxyRPC", "actor:nothing", "nothing:at_all")) == [
        "actor:nothing",
        "nothing:at_all",
    ]


def test_a_torch_without_a_member_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_lerp_")
    with pytest.raises(ConfigError, match=r"torch .* lacks _foreach_lerp_, which ebbflow uses; install torch 2\.11 or"):
        import_again("ebbflow.torch_api")


def test_a_distributed_without_a_member_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = pytest.importorskip("distributed.actor", reason="the dask extra is not installed")
    monkeypatch.delattr(actor, "ProxyRPC")
    with pytest.raises(BrokenExtra, match=r"it lacks actor:ProxyRPC; expected version 2024\.8 or newer"):
        import_again("ebbflow.engines.dask.distributed_api")


def import_again(name: str) -> None:
    """Run a module once more, beside the one that is imported already."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_states_are_copied_again_and_again_into_the_same_memory() -> None:
    """`DefaultStager` of torch 2.11 fails at the second state that has an OrderedDict, or a class."""
    weights = torch.arange(6.0)
    state = {"model": OrderedDict(w=weights, half=weights[:3]), "class": OrderedDict, "plain": [1, "two", (3.0, None)]}
    copies = torch_api.HostCopies(pinned=False)
    first = copies.copied(state)
    pointer = first["model"]["w"].data_ptr()
    assert pointer != weights.data_ptr()
    weights.neg_()
    second = copies.copied(state)
    assert second["model"]["w"].tolist() == [0, -1, -2, -3, -4, -5]
    assert second["model"]["half"].tolist() == [0, -1, -2]
    assert second["model"]["w"].data_ptr() == pointer
    assert type(second["model"]) is OrderedDict and second["class"] is OrderedDict and second["plain"] == state["plain"]


_END_OF_A_GROUP = """
import sys, weakref
import torch, torch.distributed as dist
if sys.argv[2] == "ebbflow":
    import ebbflow.torch_api
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
del model
dist.destroy_process_group()
print("freed" if group() is None else "kept")
"""


@pytest.mark.process
def test_a_process_group_that_was_destroyed_is_freed(tmp_path: Path) -> None:
    """With it end the threads of gloo: one that frees a tensor while the interpreter ends aborts the process."""

    def after(library: str) -> str:
        command = [sys.executable, "-c", _END_OF_A_GROUP, str(tmp_path / library), library]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.strip() in ("freed", "kept"), done.stderr
        return done.stdout.strip()

    assert after("ebbflow") == "freed"
    if after("torch alone") == "freed":
        pytest.skip("this torch frees it without Ebbflow, too")
