"""Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images of 28x28 in ten classes, as idx files."""

from __future__ import annotations

from pathlib import Path

import torch

from ebbflow.errors import DataError
from ebbflow.workloads.base import Recipe, Task, register_workload
from ebbflow.workloads.models import SmallCNN
from ebbflow.workloads.readers import Images, read_mnist_folder
from ebbflow.workloads.sources import TensorSource

__all__ = ["fashion_cnn"]

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_WHERE = f"Debian's package dataset-fashion-mnist puts them into {_DEBIAN}"
_MEAN, _STD = 72.94, 90.02  # of all training pixels, as bytes


# Test accuracy at the reference batch by rate after 6 epochs, one seed (H200, torch 2.11):
# 0.02 0.897   0.05 0.906   0.1 0.909   0.2 0.911. The largest but one, to stay away from the edge.
@register_workload(
    "fashion-cnn",
    recipe=Recipe(
        ref_batch=128,
        local_batch=32,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="cosine",
        epochs=20,
        metric="accuracy",
    ),
    cite="Xiao et al. 2017 (data)",
)
def fashion_cnn(data: Path | None, recipe: Recipe, width: int = 32) -> Task:
    """A convolutional network with batch norm on Fashion-MNIST (28x28)."""
    if data is None and not _DEBIAN.is_dir():
        raise DataError(
            f"fashion-cnn needs its data: give with --data (in a study: --set data=) the folder that holds "
            f"train-images-idx3-ubyte and its three companions (.gz or not); {_WHERE}"
        )
    train, test = read_mnist_folder(data or _DEBIAN, source=_WHERE)
    model = SmallCNN(channels=1, widths=(width, 2 * width, 4 * width), classes=10)
    return Task(model=model, train=_source(train), valid=_source(test), recipe=recipe)


def _source(images: Images) -> TensorSource:
    return TensorSource(
        torch.from_numpy(images.pixels),
        torch.from_numpy(images.labels),
        mean=torch.tensor(_MEAN),
        std=torch.tensor(_STD),
    )
