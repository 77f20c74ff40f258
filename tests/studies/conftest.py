"""What the tests of studies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebbflow.workloads import WORKLOADS, Recipe, Task, register_workload

PAPERS = (
    "imagenet-resnet50", "imagenet-vgg16bn", "imagenet-mobilenet", "imagenet-inceptionv3", "coco-ssd300", "coco-ssd512",
    "ade20k-fcn",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _named_workloads() -> Iterator[None]:
    """Recipes name workloads that an installation may lack; their settings can be checked without them."""
    missing = [name for name in PAPERS if name not in WORKLOADS]
    own = Recipe(
        ref_batch=32, local_batch=8, lr=0.1, optimizer="sgd", schedule="cosine", epochs=10, metric="accuracy"
    )  # fmt: skip

    def unknown() -> Task:
        raise AssertionError("this test trains a workload that is not there")

    for name in missing:
        register_workload(name, recipe=own)(unknown)
    yield
    for name in missing:
        del WORKLOADS._entries[name]
