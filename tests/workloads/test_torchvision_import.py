"""torchvision is imported in one place, beside a torch that its compiled operators do not fit, too."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebbflow
from ebbflow.errors import MissingExtra
from ebbflow.workloads.torchvision_import import import_torchvision, plain_nms

# What torchvision 0.28 does when it is imported, as far as it matters here; its compiled operators are damaged.
LIKE_TORCHVISION = {
    "__init__.py": """\
import torch
from torchvision import ops

for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets.new_empty(0))
""",
    "_C.so": "not a library",
    "ops/__init__.py": "from torchvision.ops.boxes import nms\n",
    "ops/boxes.py": """\
import torch


def _assert_has_ops():
    raise RuntimeError("Couldn't load custom C++ ops")


def nms(boxes, scores, iou_threshold):
    _assert_has_ops()
    return torch.ops.torchvision.nms(boxes, scores, iou_threshold)
""",
}
BOXES = "torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6]]), torch.tensor([0.3, 0.9, 0.5]), 0.4"
IMPORT = "import torch; from ebbflow.workloads.torchvision_import import import_torchvision\n"
USE = IMPORT + f"print(import_torchvision(needed_for='a test').ops.nms({BOXES}).tolist())"


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    for name, text in LIKE_TORCHVISION.items():
        path = tmp_path / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: operators are defined once and for all."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_without_torchvision_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingExtra, match=r"my workload needs torchvision.*pip install 'ebbflow\[vision\]'"):
        import_torchvision(needed_for="my workload")


@pytest.mark.process
def test_operators_that_cannot_be_loaded_are_defined_and_nms_works(stub):
    assert "operator torchvision::nms does not exist" in run("import torchvision", stub).stderr
    result = run(USE, stub)
    assert (result.returncode, result.stdout) == (0, "[1, 2]\n"), result.stderr


@pytest.mark.process
def test_operators_that_torchvision_has_are_left_alone(stub):
    # The compiled nms stands in here for one that keeps nothing, and torchvision's own check stays in force.
    defined = (
        "import torch; library = torch.library.Library('torchvision', 'DEF')\n"
        "[library.define(f'{n}(Tensor a, Tensor b, float c) -> Tensor') for n in ('nms', 'qnms')]\n"
        "library.impl('nms', lambda a, b, c: a.new_empty(0), 'CPU')\n"
    )
    result = run(defined + USE, stub)
    assert result.returncode == 1
    assert "Couldn't load custom C++ ops" in result.stderr
    (stub / "torchvision" / "ops" / "boxes.py").write_text(
        LIKE_TORCHVISION["ops/boxes.py"].replace('    raise RuntimeError("Couldn\'t load custom C++ ops")', "    pass")
    )
    result = run(defined + USE, stub)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.process
def test_a_torchvision_that_asks_for_more_is_refused_with_the_versions(stub):
    path = stub / "torchvision" / "__init__.py"
    path.write_text(path.read_text().replace('"qnms"', '"qnms", "more"'))
    result = run(USE, stub)
    assert f"cannot be imported beside torch {torch.__version__}: operator torchvision::more does not" in result.stderr


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_the_installed_torchvision_is_imported_with_its_models_transforms_and_nms():
    code = """
model = import_torchvision(needed_for="a test").models.resnet18(num_classes=3).eval()
from torchvision.transforms import v2
print(*model(v2.Resize(64)(torch.zeros(2, 3, 80, 80))).shape)
boxes = import_torchvision(needed_for="a test").ops.boxes
print(boxes.batched_nms(torch.tensor([[0.0, 0, 2, 2]] * 3), torch.rand(3), torch.tensor([0, 0, 1]), 0.5).shape)
"""
    result = run(USE + code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[1, 2]", "2 3", "torch.Size([2])"]


def test_nobody_else_imports_torchvision():
    package = Path(ebbflow.__file__).parent
    importing = re.compile(r"^\s*(import|from) torchvision|import_module\(.torchvision", re.MULTILINE)
    found = [path.name for path in package.rglob("*.py") if importing.search(path.read_text())]
    assert found == ["torchvision_import.py"]


# ---- non-maximum suppression ----


def intersection_over_union(a: list[float], b: list[float]) -> float:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(0.0, wide) * max(0.0, high)
    return overlap / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap)


BOX = st.tuples(*[st.integers(0, 6)] * 2, *[st.integers(1, 6)] * 2).map(
    lambda box: [float(box[0]), float(box[1]), float(box[0] + box[2]), float(box[1] + box[3])]
)


@given(boxes=st.lists(BOX, max_size=12), data=st.data(), threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_a_box_is_kept_unless_a_kept_one_with_a_higher_score_overlaps_it(boxes, data, threshold):
    scores = data.draw(st.permutations(range(len(boxes))))
    expected: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(intersection_over_union(boxes[index], boxes[other]) <= threshold for other in expected):
            expected.append(index)
    found = plain_nms(torch.tensor(boxes).reshape(-1, 4).double(), torch.tensor(scores, dtype=torch.float), threshold)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_areas_that_do_not_fit_into_16_bits_are_compared_all_the_same():
    # 300 x 300 = 90,000 is above 65,504, the largest half-precision number; the boxes overlap by 0.97.
    boxes = torch.tensor([[0, 0, 300, 300], [0, 0, 300, 290]], dtype=torch.float16)
    assert plain_nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() == [0]
