"""Who may take part and whose state counts: decided by each alone, and all decide the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.ledger import Assignment
from ebbflow.live.agreement import Hello, Standing, extend, root, settle
from ebbflow.live.heartbeats import heartbeat_ages

JOBS = ({"seed": "1"}, {"seed": "2"})


def hello(step: int, lineage: int, *, established: bool = True, job: dict[str, str] | None = None) -> Hello:
    standing = Standing(step=step, lineage=lineage, established=established)
    return Hello(name=f"{step}/{lineage}", store="127.0.0.1:1", standing=standing, job=JOBS[0] if job is None else job)


hellos = st.lists(
    st.builds(hello, st.integers(0, 5), st.integers(0, 3), established=st.booleans(), job=st.sampled_from(JOBS)),
    min_size=1,
    max_size=6,
)


def test_equal_replicas_need_nothing() -> None:
    settlement = settle([hello(4, 7), hello(4, 7), hello(4, 7)])
    assert settlement.transfers == {} and settlement.strangers == frozenset()


def test_who_missed_a_step_gets_the_state_from_one_who_has_it() -> None:
    assert settle([hello(4, 6), hello(5, 7), hello(4, 6)]).transfers == {0: 1, 2: 1}


def test_several_that_need_the_state_are_shared_out_among_those_who_have_it() -> None:
    fresh = [hello(0, 1, established=False) for _ in range(4)]
    assert settle([hello(5, 7), hello(5, 7), *fresh]).transfers == {2: 0, 3: 1, 4: 0, 5: 1}


def test_the_same_step_of_two_lines_is_not_the_same_state() -> None:
    assert settle([hello(5, 7), hello(5, 8)]).transfers == {1: 0}


def test_a_state_from_a_disk_gives_way_to_one_that_trains_even_if_it_is_further() -> None:
    assert settle([hello(9, 8, established=False), hello(5, 7)]).transfers == {0: 1}


def test_after_the_loss_of_all_the_furthest_checkpoint_counts() -> None:
    assert settle([hello(3, 6, established=False), hello(9, 8, established=False)]).transfers == {0: 1}


def test_a_stranger_is_refused_by_a_fleet_that_trains_even_by_a_single_one() -> None:
    strangers = [hello(50, 1, established=False, job=JOBS[1]) for _ in range(3)]
    settlement = settle([*strangers, hello(5, 7)])
    assert settlement.strangers == {0, 1, 2} and settlement.transfers == {} and settlement.job == JOBS[0]


def test_before_anybody_trains_the_larger_party_is_the_fleet() -> None:
    new = [hello(0, 1, established=False, job=JOBS[i]) for i in (1, 0, 0)]
    assert settle(new).strangers == {0}


@given(hellos)
def test_all_who_stay_end_with_one_state(greetings: list[Hello]) -> None:
    settlement = settle(greetings)
    stay = [rank for rank in range(len(greetings)) if rank not in settlement.strangers]
    assert stay, "somebody always goes on"
    assert {tuple(greetings[rank].job.items()) for rank in stay} == {tuple(settlement.job.items())}
    if settlement.strangers:
        assert not settlement.transfers
        return
    after = {greetings[settlement.transfers.get(rank, rank)].standing.lineage for rank in stay}
    assert len(after) == 1
    assert all(giver not in settlement.transfers for giver in settlement.transfers.values()), "a giver needs nothing"
    live = [greetings[rank].standing for rank in stay if greetings[rank].standing.established]
    if live:
        kept = [standing for standing in live if standing.lineage in after]
        assert max(standing.step for standing in kept) == max(standing.step for standing in live)


@given(hellos)
def test_a_greeting_survives_its_text(greetings: list[Hello]) -> None:
    assert [Hello.decode(greeting.encode()) for greeting in greetings] == greetings


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"name": "a"}', '{"name": "a", "store": "", "standing": 3, "job": 1}']
)
def test_anything_else_is_no_greeting(text: str) -> None:
    with pytest.raises(ValueError):
        Hello.decode(text)


def test_a_lineage_tells_apart_whatever_could_differ() -> None:
    here = root("weights")
    step = Assignment(0, 0, 8)
    different = {
        here,
        root("other weights"),
        extend(here, step, "1/a/b"),
        extend(here, step, "2/a/b"),
        extend(here, Assignment(0, 0, 4), "1/a/b"),
        extend(here, Assignment(1, 0, 8), "1/a/b"),
        extend(extend(here, step, "1/a/b"), step, "1/a/b"),
    }
    assert len(different) == 7
    assert all(0 <= number < 2**48 and int(float(number)) == number for number in different)


def test_heartbeats_are_read_from_the_page_of_the_lighthouse() -> None:
    page = """<ul> <li class="heartbeat
      old
      ">
      r1:5f: seen 4.395209627s ago
      </li> <li class="heartbeat"> r0:aa: seen 0.000021s ago </li></ul>"""
    assert heartbeat_ages(page) == {"r1:5f": 4.395209627, "r0:aa": 0.000021}
    assert heartbeat_ages("nothing of the kind") == {}
