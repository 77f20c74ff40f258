"""Whom a replica does not reach: the lighthouse and the stores are stand-ins, and the clock is a number.

The ports that are tried besides are real ones, on loopback.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from ebbflow.core.key_store import KeyStore
from ebbflow.live import fleet_questions
from ebbflow.live.fleet_questions import FleetQuestions
from ebbflow.live.link_probe import LinkProbe, is_reached
from ebbflow.live.membership_events import AskLighthouse, CheckLinks, LinksChecked, QuorumFormed
from ebbflow.live.protocol import ReplicaConfig
from ebbflow.live.registration import Registration, asked_again_key

TIMEOUT_S = 0.8


class Fleet(FleetQuestions):
    """Replicas that may die at some time, and stores none of which answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, died: dict[str, float]) -> None:
        """`died`: when each replica that is not alive for ever sent its last heartbeat."""
        super().__init__("", b"", heartbeat_timeout_s=TIMEOUT_S)
        self.died, self.now, self.tried = died, 0.0, list[float]()
        monkeypatch.setattr(fleet_questions, "monotonic", lambda: self.now)
        monkeypatch.setattr(fleet_questions, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def heartbeat_ages(self) -> dict[str, float]:
        return {name: max(0.0, self.now - self.died.get(name, self.now)) for name in "bc"}

    def read_stores(self, names: Sequence[str], key: str) -> dict[str, bytes | None]:
        self.tried.append(self.now)
        return dict.fromkeys(names)

    def unreachable(self, *names: str, after_s: float = 0.0) -> tuple[str, ...]:
        checked = self.check_links(CheckLinks(names=names, after_s=after_s), back="")
        assert isinstance(checked, LinksChecked)
        return checked.unreachable


def test_a_replica_that_has_just_been_killed_is_not_taken_for_one_behind_a_cut_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 135,667: its heartbeat was younger than the timeout, and another one stopped its own because of it."""
    assert Fleet(monkeypatch, died={"b": -0.1}).unreachable("b", "c") == ("c",)


def test_one_that_is_left_out_comes_back_as_soon_as_those_that_it_does_not_reach_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 135,667: it waited for five seconds, in which a newcomer began anew. It looks every half second, and b
    counts as dead 0.8 s after its last heartbeat, which it sent at 1.0 s."""
    gone = Fleet(monkeypatch, died={"b": 1.0})
    assert gone.unreachable("b", after_s=5.0) == () and gone.tried == [2.0]
    cut = Fleet(monkeypatch, died={})
    assert cut.unreachable("b", after_s=5.0) == ("b",) and cut.tried == [5.0]


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A port at which nobody listens, and which nobody else gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.process
def test_ports_are_reached_if_connections_work_there_and_back(closed_port: str) -> None:
    here, there, foreign = (LinkProbe("127.0.0.1", secret) for secret in (b"secret", b"secret", b"another"))
    try:
        address = f"127.0.0.1:{there.port}"
        assert is_reached(address, b"secret")
        assert is_reached(address, b"secret", back=f"127.0.0.1:{here.port}")
        assert not is_reached(address, b"secret", back=closed_port), "the way back counts"
        assert not is_reached(closed_port, b"secret")
        assert not is_reached(f"127.0.0.1:{foreign.port}", b"secret"), "somebody else may have the port now"
    finally:
        for probe in (here, there, foreign):
            probe.close()


def test_a_replica_whose_store_answers_and_whose_other_ports_do_not_is_told_from_one_behind_a_cut_link(
    monkeypatch: pytest.MonkeyPatch, closed_port: str
) -> None:
    fleet = Fleet(monkeypatch, died={})
    probes = {"b": closed_port.encode(), "c": None}
    monkeypatch.setattr(fleet, "read_stores", lambda names, key: {name: probes[name] for name in names})
    checked = fleet.check_links(CheckLinks(names=("b", "c")), back="")
    assert isinstance(checked, LinksChecked) and (checked.unreachable, checked.blocked) == (("c",), ("b",))
    fleet.died = {"b": fleet.now - 0.1}
    checked = fleet.check_links(CheckLinks(names=("b", "c")), back="")
    assert isinstance(checked, LinksChecked) and checked.blocked == (), "one that has just been killed"


@pytest.mark.process
def test_a_replica_tells_others_in_their_stores_to_which_request_it_lacks_the_answer() -> None:
    variables = {"EBBFLOW_LIGHTHOUSE": "127.0.0.1:1", "EBBFLOW_REPLICA": "r1", "EBBFLOW_FOLDER": "runs/a"}
    config = ReplicaConfig.from_environment(variables)
    registration = Registration(config, b"secret", leaving=lambda: False)
    assert registration.asked_again(["a"]) == {}, "it has no store yet"
    registration.store = KeyStore("127.0.0.1", b"secret")
    try:
        store = f"r1:5f3a@127.0.0.1:{registration.store.port}"
        questions = FleetQuestions("", b"secret", heartbeat_timeout_s=TIMEOUT_S)
        questions.tell([store], asked_again_key("a"), "7")
        questions.tell([store], asked_again_key("b"), "what is this")
        assert registration.asked_again(["a", "b", "c"]) == {"a": 7}
    finally:
        registration.close()
    questions.tell([store], asked_again_key("a"), "8")  # a store that has ended is no error


@pytest.mark.parametrize("address", [f"{'a' * 70}:80", "a..b:80", f"127.0.0.1:{'9' * 5000}"])
def test_the_address_of_a_store_that_can_be_none_is_one_that_does_not_answer(address: str) -> None:
    """It is a part of the name of a replica, and whoever reaches the lighthouse may choose one."""
    questions = FleetQuestions("", b"secret of the job", heartbeat_timeout_s=TIMEOUT_S)
    assert questions.read_stores([f"r0:1@{address}"], "key") == {f"r0:1@{address}": None}


def test_a_number_that_cannot_be_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    member = SimpleNamespace(replica_id="r0", store_address="", data={"step": "9" * 5000, "attempt": "7"})
    quorum = SimpleNamespace(quorum_id=1, participants=[member])
    monkeypatch.setattr(fleet_questions.torchft_api, "request_quorum", lambda *_, **__: quorum)
    request = AskLighthouse(step=0, group="", established=False, attempt=7)
    formed = FleetQuestions("", b"", heartbeat_timeout_s=TIMEOUT_S).ask_for_quorum(
        request, client=lambda: None, name="r0", store=""
    )
    assert isinstance(formed, QuorumFormed) and formed.steps == (0,) and formed.attempts == (7,)
