"""Runs of AdaDamp's own dampers on a small problem, for `test_against_adadamp.py`.

AdaDamp (Sievert; BSD-3) is the software of Holt and Sievert (2021), at github.com/stsievert/adadamp. `record` trains
with its file `damping.py` and returns what each damper saw and decided; nothing of ours takes part. The values in
`adadamp_runs.json` were obtained from commit 2cb5a4e (version 0.2.0rc8) on a CPU, by

    PYTHONPATH=FOLDER_OF_THE_REPOSITORY python tests/plan/adadamp_runs.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

RECORDED = Path(__file__).with_suffix(".json")
SAMPLES = 60

RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "geo": ("GeoDamp", {"initial_batch_size": 4, "dampingdelay": 2, "dampingfactor": 3, "dwell": 1, "wait": 0}, 45),
    "geo fraction": ("GeoDamp", {"initial_batch_size": 5, "dampingdelay": 1, "dampingfactor": 1.5, "dwell": 1,
                                 "wait": 0}, 40),
    "geo lr": ("GeoDampLR", {"initial_batch_size": 12, "dampingdelay": 2, "dampingfactor": 5, "dwell": 1, "wait": 0},
               40),
    "pada": ("PadaDamp", {"initial_batch_size": 4, "growth_rate": 0.3, "dwell": 1, "wait": 0}, 40),
    "pada by dwell": ("PadaDamp", {"initial_batch_size": 4, "growth_rate": 0.1}, 160),
    "ada": ("AdaDamp", {"initial_batch_size": 8}, 181),
    "ada often": ("AdaDamp", {"initial_batch_size": 8, "dwell": 3, "wait": 6}, 40),
    "ada-norm": ("AdaDampNN", {"initial_batch_size": 8}, 181),
    "rada": ("RadaDamp", {"initial_batch_size": 40}, 201),
    "rada often": ("RadaDamp", {"initial_batch_size": 6, "dwell": 5, "wait": 10, "rho": 0.6}, 61),
    "rada late": ("RadaDamp", {"initial_batch_size": 6, "dwell": 8, "wait": 0}, 41),
}  # fmt: skip
"""Name: damper, its settings, updates. Settings that are missing are AdaDamp's own: dwell 20, wait 100, rho 0.2.
AdaDamp's initial batch is a power of two, with which it computes B0 F/F without rounding, and never requests B0 + 1."""
LR = {"rada": 0.002}
"""Learning rate where it is not 0.02, so that the loss still falls after a hundred updates."""


class _Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, -1.0, 0.5]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def _squared(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target, reduction=reduction)


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points near a plane, without random numbers, which differ between versions."""
    index = torch.arange(SAMPLES, dtype=torch.float64)
    inputs = torch.stack([torch.sin(index), torch.cos(1.7 * index), torch.ones(SAMPLES, dtype=torch.float64)], dim=1)
    targets = inputs @ torch.tensor([0.3, 0.8, -0.2], dtype=torch.float64) + 0.4 * torch.sin(5.3 * index + 1)
    return [(x, y) for x, y in zip(inputs.float(), targets.float(), strict=True)]


def damping_module() -> ModuleType | None:
    """AdaDamp's `damping.py`, without the rest of the package, or None if it is not installed or has no RadaDamp.

    The release 0.1.0 has none, and other formulas."""
    package = importlib.util.find_spec("adadamp")
    if package is None or not package.submodule_search_locations:
        return None
    spec = importlib.util.spec_from_file_location(
        "adadamp_damping", Path(package.submodule_search_locations[0]) / "damping.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module if hasattr(module, "RadaDamp") else None


def record(damping: ModuleType) -> dict[str, dict[str, list[float]]]:
    """What each damper saw and decided, one value per update.

    `requested` is what damping() returned last; `batch`, `lr` and `loss` are those of the update, and `norm_sq` is the
    squared norm of its gradient. `evaluated` is what AdaDamp and AdaDampNN evaluate over the data set before an update;
    it is repeated until they evaluate it again.
    """
    found = {}
    for name, (kind, settings, updates) in RUNS.items():
        torch.manual_seed(0)  # the order in which a data set is evaluated
        model = _Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR.get(name, 0.02))
        damper = getattr(damping, kind)(model, _data(), optimizer, loss=_squared, random_state=0, **settings)
        names = ("requested", "batch", "lr", "loss", "norm_sq", "evaluated")
        columns: dict[str, list[float]] = {key: [] for key in names}
        for _ in range(updates):
            damper.step()
            meta = damper.meta
            evaluated = meta.get("_complete_loss", meta.get("_current", meta.get("_initial", 0.0)))
            norm_sq = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
            row = (meta["damping"], meta["batch_size_"], meta["lr_"], meta["batch_loss"], norm_sq, evaluated)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(float(f"{float(value):.8g}"))
        found[name] = {key: column for key, column in columns.items() if any(column)}
    return found


if __name__ == "__main__":
    module = damping_module()
    assert module is not None, "adadamp with a RadaDamp is not on the path"
    runs = record(module)
    lines = [f' "{name}": {json.dumps(columns, separators=(",", ":"))}' for name, columns in runs.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
