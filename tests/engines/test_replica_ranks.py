"""Which ranks a replica has, which of them get the same samples, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.replica_ranks import ReplicaRanks, replica_ranks, samples_of_rank
from ebbflow.errors import ConfigError


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process as rank 0 of four, with collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def test_a_single_process_is_a_replica_by_itself() -> None:
    ranks = replica_ranks(model(), environ={})
    assert (ranks.rank, ranks.size, ranks.data_size, ranks.leads, ranks.counts) == (0, 1, 1, True, True)
    tensor = torch.tensor([2.0])
    ranks.add_up(tensor)
    assert tensor.item() == 2.0 and ranks.share("x") == "x" and ranks.gather(3) == [3]


def test_ranks_that_nobody_connected_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"one of 2 ranks .*init_process_group"):
        replica_ranks(model(), environ={"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.usefixtures("four_ranks")
def test_ranks_whose_gradients_nothing_adds_up_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"divided over 4 ranks, but nothing adds up .*fully_shard"):
        replica_ranks(model())


@pytest.mark.usefixtures("four_ranks")
def test_a_mesh_of_several_dimensions_needs_to_be_told_over_which_samples_are_divided() -> None:
    net, mesh = model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    with pytest.raises(ConfigError, match=r"not clear which of the 4 ranks .* data_mesh=mesh\['dp'\]"):
        replica_ranks(net)
    with pytest.raises(ConfigError, match="data_mesh has 2 dimensions; expected one"):
        replica_ranks(net, mesh)


def test_ranks_that_differ_are_named_with_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ReplicaRanks()
    monkeypatch.setattr(ranks, "gather", lambda own: [own, {**own, "seed": "2"}])
    with pytest.raises(ConfigError, match="seed is '1' on rank 0 and '2' on rank 1"):
        ranks.check_same({"seed": "1", "rule": "linear"})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("least", [1, 2])
def test_every_sample_of_a_micro_batch_counts_on_exactly_one_rank(ranks: int, least: int) -> None:
    for size in range(1, 20):
        whole = MicroBatch(worker=0, start=5, stop=5 + size)
        parts = [samples_of_rank(whole, rank, ranks, least=least) for rank in range(ranks)]
        counted = [place for part, counts in parts if counts for place in range(part.start, part.stop)]
        assert counted == list(range(5, 5 + size))
        assert all(part.size >= min(least, size) for part, _ in parts), "also a rank that only takes part"
