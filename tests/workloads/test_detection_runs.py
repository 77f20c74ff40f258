"""Complete runs of object detection on real images of COCO: engines agree, a run can be continued, overfitting."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow import workloads
from ebbflow.errors import ConfigError
from ebbflow.record import Run, read_record
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train

for package in ("torchvision", "pycocotools"):
    if importlib.util.find_spec(package) is None:  # torchvision itself is imported by import_torchvision only
        pytest.skip(f"{package} is not installed (the extra 'vision')", allow_module_level=True)

ENGINES = ("loop", "fused")
SMALL = "coco-ssd300(network=resnet18, size=64, augment=false)"


def first_images(coco: Path, folder: Path, *, train: int, val: int) -> Path:
    """Make a folder whose two splits are the first of COCO's training images, so that they overlap."""
    (folder / "annotations").mkdir(parents=True)
    content = json.loads((coco / "annotations" / "instances_train2017.json").read_text())
    for split, count in {"train": train, "val": val}.items():
        images = content["images"][:count]
        ids = {image["id"] for image in images}
        annotations = [annotation for annotation in content["annotations"] if annotation["image_id"] in ids]
        part = content | {"images": images, "annotations": annotations}
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(part))
        (folder / f"{split}2017").symlink_to(coco / "train2017")
    return folder


@pytest.fixture(scope="module")
def coco(shared, tmp_path_factory) -> Path:
    """Twelve images for training and two of them for validation."""
    return first_images(shared / "data" / "coco_tiny", tmp_path_factory.mktemp("coco") / "data", train=12, val=2)


def trained(data: Path, out: Path, workload: str, *, stop_after: int | None = None, **settings: Any) -> Run:
    usual: dict[str, Any] = {
        "trace": "0s:3 1s:2 40s", "local_batch": 2, "epochs": 1, "lr": 1e-3, "schedule": "constant", "engine": "loop",
    }  # fmt: skip
    config = RunConfig(workload=workload, data=str(data), loader_workers=0, **(usual | settings))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == stop_after

    return train(config, out, callbacks=Callbacks(should_stop=stop), keep_weights=True)


def weights(out: Path) -> torch.Tensor:
    saved = torch.load(out / "weights.pt", weights_only=True)
    saved = saved.get("model", saved)
    return torch.cat([tensor.double().flatten() for tensor in saved.values()])


@pytest.mark.slow
def test_loop_and_fused_train_alike_and_the_header_says_what_was_left_out(coco, tmp_path):
    runs = [trained(coco, tmp_path / engine, SMALL, engine=engine, rule="sqrt") for engine in ENGINES]
    assert [row.batch for row in runs[0].steps] == [6, 4, 2]  # three workers, two, and the end of the epoch
    assert [row.loss for row in runs[0].steps] == pytest.approx([row.loss for row in runs[1].steps], rel=1e-4)
    torch.testing.assert_close(weights(tmp_path / "loop"), weights(tmp_path / "fused"), rtol=1e-3, atol=1e-4)
    metrics = runs[0].validations[-1].metrics
    assert {"map", "map50", "map75"} <= set(metrics)
    assert all(0 <= value <= 1 for value in metrics.values())
    task = runs[0].header.config["task"]
    # The folders have all 48 images of the excerpt, the annotations 12 and 2 of them.
    others = "images on disk without an entry"
    assert (task["train_samples"], task["left_out"]) == (
        12,
        {"train": {others: 36, "crowd boxes": 1}, "val": {others: 46}},
    )


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["coco-ssd300(augment=false)", "coco-ssd512(augment=false)"])
def test_the_networks_of_the_papers_at_their_own_size_train_alike_by_loop_and_fused(shared, tmp_path, workload):
    """SSD300 with VGG-16 at 300 pixels and SSD512 with ResNet-50 at 512: a step of two workers, and a validation.

    With random weights, rounding in 32 bits becomes visible from the second step on, in either engine; that they agree
    over several steps shows in 64 bits (`test_detection.py`).
    """
    data = first_images(shared / "data" / "coco_tiny", tmp_path / "data", train=4, val=1)
    runs = [
        trained(data, tmp_path / engine, workload, engine=engine, trace="0s:2 40s", rule="linear") for engine in ENGINES
    ]
    assert [(row.workers, row.batch) for row in runs[0].steps] == [(2, 4)]
    assert [row.loss for row in runs[0].steps] == pytest.approx([row.loss for row in runs[1].steps], rel=1e-4)
    before = dict(workloads.build(workload, data=data, seed=0).model.named_parameters())
    loop, fused = (
        torch.cat([(after[name].double() - start.double()).flatten() for name, start in before.items()])
        for after in (torch.load(tmp_path / engine / "weights.pt", weights_only=True)["model"] for engine in ENGINES)
    )
    assert loop.norm() > 0
    assert (loop - fused).norm() < 1e-3 * loop.norm(), float((loop - fused).norm() / loop.norm())
    assert all({"map", "map50"} <= set(run.validations[-1].metrics) for run in runs)


@pytest.mark.slow
def test_a_step_does_not_depend_on_how_its_images_are_shared(coco, tmp_path):
    """Six workers of one image, or one of six: with fixed batch norm, the same mean over all matched anchors."""
    settings: dict[str, Any] = {"engine": "fused", "batch_norm": "frozen", "rule": "linear"}
    runs = [
        trained(coco, tmp_path / trace, SMALL, trace=f"0s:{trace} 40s", local_batch=6 // int(trace), **settings)
        for trace in ("1", "6")
    ]
    assert [row.loss for row in runs[0].steps] == pytest.approx([row.loss for row in runs[1].steps], rel=1e-4)
    torch.testing.assert_close(weights(tmp_path / "1"), weights(tmp_path / "6"), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_an_interrupted_run_with_augmentation_ends_with_the_same_weights_bit_for_bit(coco, tmp_path):
    text = "coco-ssd512(network=resnet18, size=64)"
    whole = trained(coco, tmp_path / "whole", text)
    with pytest.raises(KeyboardInterrupt):
        trained(coco, tmp_path / "parts", text, stop_after=2)
    parts = trained(coco, tmp_path / "parts", text)
    assert whole.end is not None
    assert parts.end is not None
    assert parts.end.weights_sha256 == whole.end.weights_sha256
    assert parts.validations[-1].metrics == whole.validations[-1].metrics


def test_scores_on_training_samples_are_refused_before_training(coco, tmp_path):
    with pytest.raises(ConfigError, match=r"train_scores is 2, but 'map' is computed on the whole validation set"):
        trained(coco, tmp_path / "run", SMALL, train_scores=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.process
@pytest.mark.parametrize("transport", ["allreduce", pytest.param("centralized", marks=pytest.mark.long)])
def test_the_workers_of_a_dask_cluster_train_alike(coco, transport):
    pytest.importorskip("distributed", reason="dask.distributed is not installed (the extra 'dask')")
    from engines.dask_helpers import local_client, trained_weights

    with local_client(2) as client:
        found = trained_weights(workloads.build(SMALL, data=coco), client, transport=transport)
    expected = trained_weights(workloads.build(SMALL, data=coco), None)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.process
def test_the_replicas_of_a_live_fleet_train_alike(coco, tmp_path):
    pytest.importorskip("torchft", reason="torchft is not installed (the extra 'live')")
    command = [
        sys.executable, "-m", "ebbflow", "launch", "--replicas", "2", "--min-replicas", "2", "--heartbeat-timeout",
        "20s", "--out", str(tmp_path / "live"), "--workload", SMALL, "--data", str(coco), "--epochs", "1",
        "--local-batch", "2", "--lr", "0.001", "--schedule", "constant", "--rule", "linear",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    live = read_record(tmp_path / "live" / "replicas" / "r0" / "record.jsonl")
    loop = trained(coco, tmp_path / "loop", SMALL, trace="0s:2 40s", rule="linear")
    assert [row.batch for row in live.steps] == [row.batch for row in loop.steps] == [4, 4, 4]
    assert [row.loss for row in live.steps] == pytest.approx([row.loss for row in loop.steps], rel=1e-4)
    assert live.header.config["task"]["left_out"] == loop.header.config["task"]["left_out"] != {}
    assert "map" in live.validations[-1].metrics


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_eight_images_are_learned_by_heart(shared, tmp_path):
    """From random weights, at 96x96 pixels; it reached 0.86, and 0.93 at an overlap of 0.5."""
    data = first_images(shared / "data" / "coco_tiny", tmp_path / "data", train=8, val=8)
    run = trained(
        data, tmp_path / "run", "coco-ssd300(network=resnet18, size=96, augment=false)", trace="0s:2 40s", epochs=60,
        ref_batch=4, local_batch=2, lr=0.01, schedule="warmup(4ep)+cosine", engine="fused", batch_norm="sync",
        validate_every=60,
    )  # fmt: skip
    metrics = run.validations[-1].metrics
    assert metrics["map"] > 0.7, metrics
    assert metrics["map50"] > 0.85, metrics
