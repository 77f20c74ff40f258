"""The one place that imports torchvision, also beside a build of torch that its compiled operators do not fit.

A torchvision that was compiled for CUDA cannot load its operators beside a CPU build of torch. Its import then ends
with "RuntimeError: operator torchvision::nms does not exist", although data sets, transforms and most models need no
operator. So the operators that the import asks for are defined here first, with non-maximum suppression in plain torch.
A process that unpickles something of torchvision would import it as usual; `pickle_with_torchvision` sees to that.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ebbflow.core.extras import require
from ebbflow.errors import ConfigError, DataError, MissingExtra

__all__ = ["import_timm", "import_torchvision", "load_backbone", "pickle_with_torchvision", "plain_nms"]

T = TypeVar("T")

_NMS_ROWS = 256  # boxes that are compared with all others at once, which bounds the memory


def import_torchvision(module: str = "", *, needed_for: str) -> ModuleType:
    """Import torchvision, or a module of it such as `transforms.v2`; raise MissingExtra if it is not installed.

    Where torchvision cannot load its own operators, `torchvision.ops.nms` is computed by `plain_nms`, and the other
    compiled operators (such as `roi_pool`) are missing: torchvision raises an error when they are called.
    """
    if module:
        import_torchvision(needed_for=needed_for)
        return importlib.import_module(f"torchvision.{module}")
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise MissingExtra("torchvision", extra="vision", needed_for=needed_for)
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    for folder in spec.submodule_search_locations or ():
        _load_operators(Path(folder))
    compiled = hasattr(torch.ops.torchvision, "nms")
    if not compiled:
        _define_operators()
    try:
        torchvision = importlib.import_module("torchvision")
        if not compiled:
            # `nms` checks that the compiled operators were loaded, and would not call the one that is defined here.
            boxes: Any = importlib.import_module("torchvision.ops.boxes")
            boxes._assert_has_ops = _nms_is_defined
    except RuntimeError as error:
        raise ConfigError(
            f"torchvision cannot be imported beside torch {torch.__version__}: {error}; install the version of "
            f"torchvision that belongs to this version of torch"
        ) from error
    return torchvision


def import_timm(*, needed_for: str) -> ModuleType:
    """Import timm, which imports torchvision; raise MissingExtra if one of them is not installed."""
    import_torchvision(needed_for=needed_for)
    return require("timm", extra="vision", needed_for=needed_for)


def pickle_with_torchvision(made: T) -> T:
    """Return a model or transform that consists of parts of torchvision or timm, and can be sent to other processes.

    A process that unpickles an object of the same class calls `import_torchvision` before anything else of it is read.
    """
    copyreg.pickle(type(made), _reduce)
    return made


def _reduce(made: Any) -> tuple[Any, ...]:
    # The class is given by its name: a reference to it would be imported before _empty is called.
    return _empty, (type(made).__module__, type(made).__qualname__), made.__dict__


def _empty(module: str, name: str) -> Any:
    needed_for = "a model or data set from another process"
    import_torchvision(needed_for=needed_for)
    kind = getattr(require(module, extra="vision", needed_for=needed_for), name)
    return pickle_with_torchvision(kind.__new__(kind))


def load_backbone(network: nn.Module, file: str) -> None:
    """Load the weights of a model of torchvision, except those of its classifier, from the file of a state dict.

    DataError if the file cannot be read, or if its tensors are not those of the network.
    """
    path = Path(file).expanduser()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"backbone is {path}, which is not there; expected the file of a state dict") from None
    except Exception as error:  # a damaged file raises nearly anything, such as struct.error
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a readable state dict ({reason}); expected torch.save(state_dict, ...)") from None
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise DataError(f"{path}: holds a {type(state).__name__}; expected a state dict, tensors by name")
    given, expected = (
        {name: value for name, value in tensors.items() if not name.startswith(("fc.", "classifier."))}
        for tensors in (state, network.state_dict())
    )
    wrong = [name for name, value in expected.items() if name not in given or given[name].shape != value.shape]
    wrong += [name for name in given if name not in expected]
    if wrong:
        raise DataError(
            f"{path}: {wrong[0]!r} is missing, not known, or of another shape than in the network ({len(wrong)} such "
            f"tensors); expected the state dict of torchvision's model of the network that is trained"
        )
    network.load_state_dict(given, strict=False)


def _load_operators(folder: Path) -> None:
    """Load the compiled operators as torchvision's own import does, or load nothing if they do not fit this torch."""
    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError:
            continue


def _define_operators() -> None:
    for name in ("nms", "qnms"):  # qnms takes quantized boxes; only its declaration is needed
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.impl("torchvision::nms", "default", plain_nms)  # for every device


def _nms_is_defined() -> None:
    """Take the place of the check in `torchvision.ops.boxes`."""


def plain_nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes that non-maximum suppression keeps, in the order of falling scores.

    A box `(x1, y1, x2, y2)` is dropped if its intersection over union with a kept box of a higher score is above the
    threshold.

    >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6]])
    >>> plain_nms(boxes, torch.tensor([0.3, 0.9, 0.5]), 0.4).tolist()
    [1, 2]
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))  # an area may be too large for 16 bits
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    dropped = np.zeros(len(boxes), dtype=bool)
    kept = []
    for first in range(0, len(boxes), _NMS_ROWS):
        rows = slice(first, first + _NMS_ROWS)
        upper = torch.maximum(boxes[rows, None, :2], boxes[:, :2])
        lower = torch.minimum(boxes[rows, None, 2:], boxes[:, 2:])
        overlap = (lower - upper).clamp(min=0).prod(dim=2)
        above = (overlap / (area[rows, None] + area - overlap) > iou_threshold).cpu().numpy()
        for number, overlaps in enumerate(above, start=first):
            if not dropped[number]:
                kept.append(number)
                dropped |= overlaps
    return order[torch.tensor(kept, dtype=torch.int64, device=order.device)]
