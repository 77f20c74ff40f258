"""Object detection: SSD's loss and networks, weights of a backbone, and training on COCO's images."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from torch import nn

from ebbflow import workloads
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.errors import ConfigError, DataError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.run.flow import Flow
from ebbflow.workloads.coco import Target
from ebbflow.workloads.detection import Detector, detection_loss, ssd300, ssd512
from ebbflow.workloads.torchvision_import import import_torchvision
from workloads.fresh_process import unpickled_in_a_fresh_process

for package in ("torchvision", "pycocotools"):
    if importlib.util.find_spec(package) is None:  # torchvision itself is imported by import_torchvision only
        pytest.skip(f"{package} is not installed (the extra 'vision')", allow_module_level=True)


def target(*boxes: list[float]) -> Target:
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "labels": torch.arange(1, len(boxes) + 1),
    }


def small() -> Detector:
    """An SSD300 of 64x64 pixels whose batch norms do not make the images depend on each other."""
    return ssd300(classes=4, network="resnet18", size=64).eval()


TARGETS = [
    target([3, 3, 40, 30]),
    target([10, 20, 30, 60], [1, 1, 14, 12], [30, 30, 62, 63]),
    target(),
    target([5, 40, 60, 60], [0, 0, 64, 64]),
]


@pytest.mark.slow
def test_loop_and_fused_agree_over_several_steps_in_double_precision() -> None:
    """In 32 bits rounding grows by orders of magnitude in a step of an untrained SSD, whatever the engine."""
    images = torch.randn(len(TARGETS) * 3, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for kind in (LoopEngine, FusedEngine):
        torch.manual_seed(0)
        model = ssd512(classes=4, network="resnet18", size=64).double()
        optimizer = ElasticOptimizer(
            torch.optim.SGD(model.parameters(), lr=8e-3, momentum=0.9), "adascale", base_batch=2,
            epoch_samples=len(images),
        )  # fmt: skip
        engine = kind(
            model, lambda numbers: (images[numbers], [TARGETS[number % len(TARGETS)] for number in numbers]),
            detection_loss, UnevenSteps(), samples=len(images), seed=7, needs=optimizer.rule.needs,
        )  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=len(images)))
        rows = [flow.run_step() for _ in range(3)]
        weights = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
        found.append(([row.loss for row in rows if row is not None], weights))
    (loop, loop_weights), (fused, fused_weights) = found
    assert len(loop) == 3 and fused == pytest.approx(loop, rel=1e-11)
    torch.testing.assert_close(fused_weights, loop_weights, rtol=1e-9, atol=1e-11)


class UnevenSteps:
    """Two or three workers with four or five images."""

    def at(self, step: int) -> StepSize:
        return StepSize(workers=2 + step % 2, samples=4 + step % 2, time_s=0.0, duration_s=1.0)


@pytest.mark.slow
def test_the_loss_of_ssd300_is_that_of_torchvision_and_its_backbone_can_be_loaded(tmp_path):
    vgg = import_torchvision(needed_for="a test").models.vgg
    features = vgg.make_layers(vgg.cfgs["D"])  # VGG-16's convolutions, without its large linear layers
    torch.save({f"features.{name}": value for name, value in features.state_dict().items()}, tmp_path / "vgg16.pth")
    model = ssd300(classes=4, backbone=str(tmp_path / "vgg16.pth"))
    convolutions, loaded = (
        [m for m in body.modules() if isinstance(m, nn.Conv2d)] for body in (features, model.ssd.backbone)
    )
    assert len(convolutions) == 13
    for ours, theirs in zip(loaded, convolutions, strict=False):  # after them, there are those of SSD
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0)

    bytes_ = torch.randint(256, (1, 3, 300, 300)).float()
    targets = [target([30, 20, 200, 250], [5, 5, 60, 40], [100, 100, 180, 290])]
    mean = torch.tensor([0.48235, 0.45882, 0.40784])[:, None, None]
    with torch.no_grad():
        total, count = detection_loss(model, bytes_ - 255 * mean, targets)
        theirs = model.ssd([*(bytes_ / 255)], targets)
    assert count > 3
    torch.testing.assert_close(total / count, sum(theirs.values()))


def test_micro_batches_add_up_to_the_loss_and_gradient_of_the_whole_batch():
    model, images = small(), torch.randn(4, 3, 64, 64)
    parameters = [*model.parameters()]

    def loss_and_gradient(*parts: slice) -> tuple[torch.Tensor, ...]:
        sums = [detection_loss(model, images[part], TARGETS[part]) for part in parts]
        loss = sum(s.total for s in sums) / sum(s.count for s in sums)
        return loss.detach(), *torch.autograd.grad(loss, parameters)

    whole = loss_and_gradient(slice(0, 4))
    cut = loss_and_gradient(slice(0, 1), slice(1, 3), slice(3, 4))
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-6)
    # A mean of the micro-batches' own means is another number: they do not match equally many anchors.
    with torch.no_grad():
        parts = [detection_loss(model, images[part], TARGETS[part]) for part in (slice(0, 1), slice(1, 4))]
    mean = sum(part.total / part.count for part in parts) / 2
    assert float(mean) != pytest.approx(float(whole[0]), rel=1e-3)


def test_images_without_boxes_have_the_loss_0():
    total, count = detection_loss(small(), torch.randn(2, 3, 64, 64), [target(), target()])
    assert (total.item(), int(count)) == (0, 0)


def test_a_worker_with_one_image_can_be_trained():
    for make in (ssd300, ssd512):
        model = make(classes=4, network="resnet18", size=64).train()
        loss = detection_loss(model, torch.randn(1, 3, 64, 64), TARGETS[:1])
        loss.total.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_feature_maps_and_anchors_are_those_of_the_published_networks():
    """38x38x4 + 19x19x6 + 10x10x6 + 5x5x6 + 3x3x4 + 4 = 8,732, and 32x32x4 + 16x16x6 + ... + 4 = 6,132 anchors."""
    for make, size, sides, anchors in (
        (ssd300, 300, [38, 19, 10, 5, 3, 1], 8732),
        (ssd512, 512, [32, 16, 8, 4, 2, 1], 6132),
    ):
        model = make(classes=4, network="resnet18").eval()
        images = torch.zeros(1, 3, size, size)
        with torch.no_grad():
            features = [*model.ssd.backbone(images).values()]
        assert [feature.shape[-1] for feature in features] == sides
        boxes = model._anchors(images, features)
        assert len(boxes) == anchors
        assert boxes[0, :2].add(boxes[0, 2:]).div(2).tolist() == pytest.approx([size / sides[0] / 2] * 2, rel=0.02)


def test_detections_are_boxes_of_the_input_with_scores_and_labels():
    with torch.no_grad():
        found = small()(torch.randn(2, 3, 64, 64))
    assert len(found) == 2
    for image in found:
        assert len(image["boxes"]) == len(image["scores"]) == len(image["labels"]) > 0
        assert ((image["boxes"] >= 0) & (image["boxes"] <= 64)).all()
        assert set(image["labels"].tolist()) <= {1, 2, 3}


def test_weights_of_a_resnet_are_loaded_and_wrong_files_are_named(tmp_path):
    models = import_torchvision(needed_for="a test").models
    resnet = models.resnet18(weights=None)
    path = tmp_path / "resnet18.pth"
    torch.save(resnet.state_dict(), path)
    model = ssd512(classes=4, network="resnet18", backbone=str(path))
    torch.testing.assert_close(model.ssd.backbone.stages[0][0].weight, resnet.conv1.weight, rtol=0, atol=0)
    torch.testing.assert_close(model.ssd.backbone.stages[1].state_dict(), resnet.layer4.state_dict(), rtol=0, atol=0)
    with pytest.raises(DataError, match=r"resnet18.pth: 'layer1.2.conv1.weight' is missing, not known, or of another"):
        ssd512(classes=4, network="resnet34", backbone=str(path))
    for damaged in (path.read_bytes()[:1000], b"junk", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"resnet18.pth: not a readable state dict"):
            ssd512(classes=4, network="resnet18", backbone=str(path))
    torch.save([1], path)
    with pytest.raises(DataError, match=r"resnet18.pth: holds a list; expected a state dict"):
        ssd512(classes=4, network="resnet18", backbone=str(path))
    with pytest.raises(DataError, match=r"backbone is nowhere.pth, which is not there"):
        ssd512(classes=4, backbone="nowhere.pth")


@pytest.mark.process
def test_samples_and_model_can_be_sent_to_a_process_that_has_not_imported_torchvision(shared, tmp_path):
    task = workloads.build("coco-ssd300(network=resnet18, size=64)", data=shared / "data" / "coco_tiny")
    assert (
        unpickled_in_a_fresh_process(task, tmp_path, "model(sample)[0]") == "[3, 64, 64] ['boxes', 'scores', 'labels']"
    )


def test_settings_that_cannot_be_used_are_refused(shared):
    data = shared / "data" / "coco_tiny"
    for text, message in {
        "coco-ssd300(size=200)": "size is 200, but SSD300 with VGG-16 has 300 only",
        "coco-ssd300(network=alexnet)": "network is 'alexnet'; expected resnet18, resnet34 or resnet50",
        "coco-ssd512(network=vgg16)": "network is 'vgg16'; expected resnet18, resnet34 or resnet50",
        "coco-ssd512(size=32)": "size is 32; expected 64 or more",
    }.items():
        with pytest.raises(ConfigError, match=message):
            workloads.build(text, data=data)
    with pytest.raises(DataError, match=r"coco-ssd300 needs its data: .*annotations/instances_train2017.json"):
        workloads.build("coco-ssd300")
    with pytest.raises(DataError, match=r"instances_train2014.json: there is no such file"):
        workloads.build("coco-ssd512(year=2014)", data=data)


def test_a_damaged_image_of_the_validation_is_named_before_training(shared, tmp_path):
    data = tmp_path / "coco"
    shutil.copytree(shared / "data" / "coco_tiny", data, copy_function=shutil.copyfile)
    damaged = min((data / "val2017").iterdir())
    damaged.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"{damaged.name} \(image \d+ of the annotations\): not a readable image"):
        workloads.build("coco-ssd300(network=resnet18, size=64)", data=data)
