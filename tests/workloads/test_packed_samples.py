"""Packed samples: what is unpacked is what was packed, in no more memory than it needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from ebbflow.workloads.packed_samples import pack_samples


class Sample(NamedTuple):
    x: torch.Tensor
    name: str


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.cfloat])
def test_tensors_of_every_type_and_shape_come_back(dtype, shape):
    flag, tensor = torch.tensor(True), torch.arange(24)[: torch.Size(shape).numel()].view(shape).to(dtype)
    found = pack_samples([flag, tensor]).unpack()  # a byte comes first, so that the second one has to be aligned
    assert found[0].item() is True
    assert found[1].dtype == dtype and torch.equal(found[1], tensor)


def test_containers_and_objects_come_back_as_they_are():
    pair, named, text = pack_samples([Sample(torch.ones(2), "a"), {"array": np.arange(3), "none": None}, "b"]).unpack()
    assert type(pair) is Sample and pair.name == "a" and pair.x.tolist() == [1, 1]
    assert named["array"].tolist() == [0, 1, 2] and named["none"] is None
    assert text == "b"


def test_a_row_of_a_large_tensor_takes_the_memory_of_a_row():
    large = torch.zeros(1000, 16)
    assert pack_samples([large[3], large[4]]).block.untyped_storage().nbytes() == 2 * 16 * 4


def test_strides_are_those_of_a_copy():
    picture = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    permuted, expanded = pack_samples([picture, torch.ones(1).expand(5)]).unpack()
    assert permuted.stride() == picture.clone().stride() == (1, 12, 4) and torch.equal(permuted, picture)
    expanded[0] = 0  # which would be refused if its entries were one
    assert expanded.tolist() == [0, 1, 1, 1, 1]


def test_a_tensor_that_samples_share_is_sent_once():
    shared = torch.arange(16.0)
    packed = pack_samples([(shared, 0), (shared, 1)])
    (first, _), (second, _) = packed.unpack()
    assert first is second and len(packed.block) == 16 * 4
