"""Which ranks a replica has, which of them get the same samples, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.process_group import BackendFailed, PeerLost
from ebbflow.engines.replica_ranks import ReplicaRanks, ReplicaSums, replica_ranks, samples_of_rank
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


@pytest.mark.parametrize(
    ("ended", "other_rank", "again"),
    [(True, 3, True), (True, 4, False), (True, None, False), (False, 3, False)],
    ids=["same messages", "another message there", "still runs there", "still runs here"],
)
def test_connections_of_a_thread_are_used_again_if_it_ended_after_the_same_messages_on_all_ranks(
    ended: bool, other_rank: int | None, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every time that a replica of several ranks listens would leave connections behind until its end."""
    ranks, before = ReplicaRanks(), ReplicaRanks()
    before._messages = 3
    monkeypatch.setattr(ranks, "gather", lambda own: [own, other_rank])
    monkeypatch.setattr(ranks, "another_group", lambda: None)  # of a single process: `ranks` itself
    assert ranks.in_thread(before, ended=ended) is (before if again else ranks)
    assert ranks.in_thread() is ranks


def test_every_message_of_the_ranks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("broadcast", "all_gather_object", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *given, name=name, **named: calls.append(name))
    ranks = ReplicaRanks()
    ranks._group = object()  # type: ignore[assignment]
    ranks.share("x" * 100_000)
    ranks.gather(1)
    ranks.all_agree(True)
    assert ranks._messages == len(calls) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("least", [1, 2])
def test_every_sample_of_a_micro_batch_counts_on_exactly_one_rank(ranks: int, least: int) -> None:
    for size in range(1, 20):
        whole = MicroBatch(worker=0, start=5, stop=5 + size)
        parts = [samples_of_rank(whole, rank, ranks, least=least) for rank in range(ranks)]
        counted = [place for part, counts in parts if counts for place in range(part.start, part.stop)]
        assert counted == list(range(5, 5 + size))
        assert all(part.size >= min(least, size) for part, _ in parts), "also a rank that only takes part"


# Sums -----------------------------------------------------------------------------------------------------------------


class TwoRanks:
    """The two ranks of a replica, each in a thread of its own."""

    size = 2

    def __init__(self, rank: int, said: list[Any], meet: threading.Barrier) -> None:
        self.rank, self.leads, self._said, self._meet = rank, rank == 0, said, meet

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._meet.wait(30)
        everything = [*self._said]
        self._meet.wait(30)
        return everything

    def add_up(self, tensor: torch.Tensor) -> None:
        first, second = self.gather(tensor.clone())
        tensor.copy_(first + second)


class OtherReplica:
    """Peers of one rank: the same rank of another replica, which has the same numbers. Sums fail from `failing` on."""

    size, rank = 2, 0

    def __init__(self, failing: int | None = None, error: PeerLost | None = None) -> None:
        self.failing, self.error = failing, error
        self.begun: list[int] = []
        self.waited = 0

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        number = len(self.begun)
        self.begun.append(tensor.numel())

        def wait() -> None:
            self.waited += 1
            if self.failing is not None and number >= self.failing:
                raise self.error or PeerLost("gone")
            tensor.mul_(2)

        return wait


def on_both_ranks(work: Callable[[int, ReplicaSums], Any], *groups: OtherReplica) -> list[Any]:
    said, meet = [None, None], threading.Barrier(2)
    sums: list[Any] = [ReplicaSums(TwoRanks(rank, said, meet), group) for rank, group in enumerate(groups)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(work, range(2), sums)]


def add_up_in_parts(rank: int, sums: ReplicaSums) -> list[float] | PeerLost:
    """Two parts that are of each rank alone, and a last one with two numbers of the rank and one of the replica."""
    message = torch.arange(7.0) + 10 * rank
    waits = [sums.begin(part, of_rank=len(part)) for part in (message[:1], message[1:4])]
    waits.append(sums.begin(message[4:], of_rank=2))
    try:
        for wait in waits:
            wait()
    except PeerLost as error:
        return error
    return message.tolist()


def test_parts_of_a_message_are_of_the_rank_and_the_end_is_of_the_replica() -> None:
    """Twice the numbers of the rank; the last one is 6 + 16 in each of the two replicas."""
    groups = OtherReplica(), OtherReplica()
    assert on_both_ranks(add_up_in_parts, *groups) == [
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 44.0],
        [20.0, 22.0, 24.0, 26.0, 28.0, 30.0, 44.0],
    ]
    assert [group.begun for group in groups] == [[1, 3, 3], [1, 3, 2]], "only rank 0 sends what is of the replica"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("loser", [0, 1])
def test_a_part_that_fails_on_one_rank_fails_the_message_on_all_of_them(loser: int, failing: int) -> None:
    groups = [OtherReplica(), OtherReplica()]
    groups[loser] = OtherReplica(failing)
    found = on_both_ranks(add_up_in_parts, *groups)
    assert [(type(one), str(one)) for one in found] == [(PeerLost, "gone")] * 2
    assert groups[loser].waited == failing + 1, "after a failure nothing is waited for"


def test_what_a_backend_says_comes_before_what_a_lost_peer_looks_like() -> None:
    found = on_both_ranks(add_up_in_parts, OtherReplica(0), OtherReplica(2, BackendFailed("Duplicate GPU")))
    assert [(type(one), str(one)) for one in found] == [(BackendFailed, "Duplicate GPU")] * 2


@pytest.mark.parametrize(("have", "arrived"), [((True, True), {0}), ((True, False), set()), ((False, False), set())])
def test_a_replica_has_the_state_when_all_its_ranks_have_it(have: tuple[bool, bool], arrived: set[int]) -> None:
    def confirm(rank: int, sums: ReplicaSums) -> frozenset[int]:
        return sums.confirm(frozenset({0}), has_state=have[rank])

    class Alone(OtherReplica):
        def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
            return lambda: None

    assert on_both_ranks(confirm, Alone(), Alone()) == [arrived] * 2
