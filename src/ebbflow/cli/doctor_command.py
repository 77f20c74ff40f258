"""`ebbflow doctor`: versions, devices, and what each extra lacks on this machine."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import typer
from packaging.requirements import Requirement
from rich.table import Table

from ebbflow import __version__
from ebbflow.cli.common import AsJson, err, out, print_json

__all__ = ["Found", "doctor", "extras_of", "look_for"]

TOOLS = {"chromium": "screenshots of a report", "tc": "the benchmark of limited links"}
"""Programs of the system that something in Ebbflow uses if they are there."""


@dataclass(frozen=True)
class Found:
    """A package that an extra asks for, and what is installed: `problem` is empty if it can be used."""

    package: str
    version: str
    problem: str


def extras_of(requirements: Iterable[str], *, name: str = "ebbflow") -> dict[str, list[Requirement]]:
    """The packages of each extra, extras within extras resolved; "" holds what is always needed.

    >>> found = extras_of(["numpy>=2", "torchft==0.2.0; extra == 'live'", "ebbflow[live]; extra == 'all'"])
    >>> {extra: [str(package) for package in packages] for extra, packages in found.items()}
    {'': ['numpy>=2'], 'live': ['torchft==0.2.0'], 'all': ['torchft==0.2.0']}
    """
    found: dict[str, list[Requirement]] = {"": []}
    for text in requirements:
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        _, asked, extra = str(marker or "").partition("extra == ")
        found.setdefault(extra.strip("\"' )") if asked else "", []).append(requirement)
    for extra, packages in found.items():
        inner = [other for package in packages if package.name == name for other in sorted(package.extras)]
        found[extra] = [package for package in packages if package.name != name] + [
            package for other in inner for package in found.get(other, [])
        ]
    return found


def look_for(requirement: Requirement) -> Found:
    """What is installed of a package. Whether it can be imported is not tried: that takes long for some."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Found(requirement.name, "", "not installed")
    if not requirement.specifier.contains(version, prereleases=True):
        return Found(requirement.name, version, f"{requirement.specifier} is needed")
    return Found(requirement.name, version, "")


def _devices() -> list[str]:
    """The devices that torch can train on, the CPU first."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = f"CPU, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB of memory"
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [cpu, *(f"cuda:{n}, {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for n, gpu in enumerate(gpus))]


def _examination() -> dict[str, Any]:
    import torch

    try:
        extras = extras_of(metadata.requires("ebbflow") or ())
    except metadata.PackageNotFoundError:  # from a source tree on PYTHONPATH
        extras = {}
    return {
        "ebbflow": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": _devices(),
        "extras": {
            extra or "always": [asdict(look_for(package)) for package in packages]
            for extra, packages in extras.items()
            if extra not in ("all", "dev")
        },
        "tools": {name: shutil.which(name) is not None for name in TOOLS},
    }


def doctor(json: AsJson = False) -> None:
    """Show versions, devices and optional packages, and what each of them lacks.

    Exit code 1: a package that Ebbflow always needs is missing or too old.
    """
    found = _examination()
    lacking = [package for package in found["extras"].get("always", ()) if package["problem"]]
    if json:
        print_json(found)
        raise typer.Exit(1 if lacking else 0)
    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "without CUDA"
    out.print(f"ebbflow {found['ebbflow']}, Python {found['python']}, torch {found['torch']} ({cuda})")
    out.print(found["platform"])
    for device in found["devices"]:
        out.print(f"  {device}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("extra", "state", "packages"):
        table.add_column(column, no_wrap=column != "packages")
    for extra, packages in found["extras"].items():
        problems = [package for package in packages if package["problem"]]
        state = "ready" if not problems else "incomplete"
        table.add_row(extra, state, ", ".join(_described(package) for package in problems or packages))
    out.print()
    if found["extras"]:
        out.print(table)
        out.print("\nInstall what an extra lacks with: pip install 'ebbflow[EXTRA]'")
    else:
        err.print("ebbflow is not installed as a package here, so its extras are not known: see pyproject.toml")
    for name, there in found["tools"].items():
        if not there:
            out.print(f"{name} is not installed; it is used for {TOOLS[name]}.")
    raise typer.Exit(1 if lacking else 0)


def _described(package: dict[str, str]) -> str:
    name = f"{package['package']} {package['version']}".strip()
    return f"{name} ({package['problem']})" if package["problem"] else name
