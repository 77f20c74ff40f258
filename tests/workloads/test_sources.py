"""Sources return the right samples in the right order, and augmentation moves each image on its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ebbflow.errors import ConfigError
from ebbflow.workloads import DatasetSource, TensorSource, TokenSource, crop_and_flip

CPU = torch.device("cpu")


def crops(image: torch.Tensor, pad: int) -> list[torch.Tensor]:
    """Return every possible result of `crop_and_flip`, computed one by one."""
    _, height, width = image.shape
    padded = F.pad(image, (pad, pad, pad, pad))
    shifts = [(down, right) for down in range(2 * pad + 1) for right in range(2 * pad + 1)]
    found = [padded[:, down : down + height, right : right + width] for down, right in shifts]
    return found + [crop.flip(-1) for crop in found]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_each_result_is_a_crop_of_its_own_image(dtype):
    # Four different images with no value repeated inside one, so that a crop can be recognised.
    images = torch.stack([torch.randperm(2 * 5 * 6).reshape(2, 5, 6) + 1 for _ in range(4)]).to(dtype)
    torch.manual_seed(0)
    for _ in range(20):
        result = crop_and_flip(images, pad=2)
        assert result.dtype == dtype
        assert result.shape == images.shape
        for image, moved in zip(images, result, strict=True):
            assert any(torch.equal(moved, crop) for crop in crops(image, 2))


def test_all_crops_occur_and_samples_move_independently():
    image = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 3, 3)
    torch.manual_seed(0)
    result = crop_and_flip(image.expand(2000, 1, 3, 3), pad=1)
    counts = [sum(torch.equal(moved, crop) for moved in result) for crop in crops(image, 1)]
    # 18 results with probability 1/18: 111 expected each, standard deviation 10.
    assert sum(counts) == 2000
    assert min(counts) > 60
    assert max(counts) < 165


def test_augmentation_follows_the_global_generator_and_nothing_else():
    images = torch.arange(8 * 3 * 32 * 32).reshape(8, 3, 32, 32)
    torch.manual_seed(5)
    first = crop_and_flip(images)
    second = crop_and_flip(images)
    torch.manual_seed(5)
    assert torch.equal(crop_and_flip(images), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("as_index", [np.array, torch.tensor])
def test_a_tensor_source_standardises_and_augments_only_in_training(as_index):
    x = torch.tensor([[10], [20], [30]], dtype=torch.uint8)
    y = torch.tensor([0, 1, 2])
    source = TensorSource(x, y, augment=lambda b: b + 1, mean=torch.tensor(10.0), std=torch.tensor(2.0)).to(CPU)
    inputs, targets = source.batch(as_index([2, 0]), train=False)
    assert inputs.dtype == torch.float32
    assert inputs.tolist() == [[10.0], [0.0]]  # (30 - 10) / 2 and (10 - 10) / 2
    assert targets.tolist() == [2, 0]
    assert source.batch(as_index([2, 0]), train=True)[0].tolist() == [[10.5], [0.5]]
    assert source.x.dtype == torch.uint8
    assert len(source) == 3


def test_inputs_and_targets_of_different_number_are_refused():
    with pytest.raises(ConfigError, match="3 inputs but 2 targets"):
        TensorSource(torch.zeros(3, 1), torch.zeros(2))


def test_a_dataset_source_collates_any_map_style_data_set():
    source = DatasetSource(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([5, 6, 7]))).to(CPU)
    inputs, targets = source.batch(np.array([2, 1]), train=True)
    assert inputs.tolist() == [[4.0, 5.0], [2.0, 3.0]]
    assert targets.tolist() == [7, 6]
    assert len(source) == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(0.0, 0)])

    def __len__(self):
        return 1


class Endless(Dataset):
    def __getitem__(self, index):
        return 0.0, 0


@pytest.mark.parametrize("data", [Stream(), Endless()], ids=lambda data: type(data).__name__)
def test_a_data_set_that_cannot_be_read_by_number_is_refused(data):
    with pytest.raises(ConfigError, match=f"{type(data).__name__} is no map-style data set; expected one with __len__"):
        DatasetSource(data)


def test_a_data_set_of_triples_is_refused():
    three = DatasetSource(TensorDataset(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ConfigError, match="expected \\(input, target\\)"):
        three.batch(np.array([0]), train=True)


@pytest.mark.parametrize(("tokens", "blocks"), [(3, 0), (4, 1), (6, 1), (7, 2), (10, 3)])
def test_blocks_do_not_overlap_and_targets_are_one_later(tokens, blocks):
    # Context 3: block i needs tokens 3i to 3i + 3, the last one as a target only.
    source = TokenSource(torch.arange(tokens), context=3, stride=3)
    assert len(source) == blocks
    if blocks:
        last = blocks - 1
        x, y = source.batch(np.array([last, 0]), train=True)
        assert x.tolist() == [[3 * last, 3 * last + 1, 3 * last + 2], [0, 1, 2]]
        assert torch.equal(y, x + 1)
