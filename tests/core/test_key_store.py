"""The store that asks for a secret, attacked over real sockets on loopback."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ebbflow.core.key_store import KeyStore, KeyStoreClient, NotAuthenticated, StoreLost

pytestmark = pytest.mark.process

SECRET = b"0123456789abcdef"


@pytest.fixture
def store() -> Iterator[KeyStore]:
    made = KeyStore("127.0.0.1", SECRET)
    yield made
    made.close()


def client(store: KeyStore, secret: bytes = SECRET, **settings: str) -> KeyStoreClient:
    return KeyStoreClient("127.0.0.1", store.port, secret, timeout_s=10, **settings)


def raw(store: KeyStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", store.port), timeout=10)


def code(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each behind its length, as the docstring of the module says."""
    return hmac.new(key, b"".join(len(p).to_bytes(8, "big") + p for p in parts), hashlib.sha256).digest()


def test_values_are_shared_by_those_who_know_the_secret(store: KeyStore) -> None:
    with client(store) as one, client(store, prefix="g/7") as other:
        one.set({"g/7/a": b"\x00\xff", "b": b""})
        assert other.get(["a"], timeout_s=0) == [b"\x00\xff"] and one.get(["b"], timeout_s=0) == [b""]
        assert not other.check(["b"]) and one.check(["b", "g/7/a"])
        assert other.get(["a", "later"], timeout_s=0) is None
        assert (one.add("n", 2), one.add("n", -5)) == (2, -3)
        assert (one.delete("b"), one.delete("b")) == (True, False)


def test_whoever_waits_for_a_value_gets_it_when_it_is_set(store: KeyStore) -> None:
    found: list[object] = []
    with client(store) as waiting, client(store) as setting:
        thread = threading.Thread(target=lambda: found.append(waiting.get(["a", "b"], timeout_s=60)))
        thread.start()
        setting.set({"a": b"1"})
        store.set("b", b"2")
        thread.join(60)
    assert found == [[b"1", b"2"]]


def test_a_client_without_the_secret_can_neither_read_nor_write(store: KeyStore) -> None:
    store.set("status", b"training")
    with pytest.raises(NotAuthenticated, match="another secret"):
        client(store, b"another secret !")
    # A request right behind a wrong proof: nothing is answered and nothing happens.
    with raw(store) as attacker:
        attacker.recv(48, socket.MSG_WAITALL)
        request = json.dumps({"do": "set", "values": {"status": "replaced"}}).encode()
        attacker.sendall(bytes(64) + struct.pack(">I", len(request)) + request + bytes(32))
        assert attacker.recv(100) == b""
    with client(store) as honest:
        assert honest.get(["status"], timeout_s=0) == [b"training"]
    assert store.refused == 2


def test_a_server_without_the_secret_is_not_believed() -> None:
    # It repeats the client's own proof, which is all that it can know.
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"ebbflow-store-1\n" + bytes(32))
            proof = connection.recv(64, socket.MSG_WAITALL)[32:]
            connection.sendall(proof)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(NotAuthenticated):
        KeyStoreClient("127.0.0.1", listener.getsockname()[1], SECRET, timeout_s=10)
    thread.join(10)
    listener.close()


def test_what_is_no_store_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(48))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NotAuthenticated, match="is not a store"):
            KeyStoreClient("127.0.0.1", port, SECRET, timeout_s=10)
        thread.join(10)
    with pytest.raises(StoreLost, match="no store at"):
        KeyStoreClient("127.0.0.1", port, SECRET, timeout_s=10)


def authenticated(store: KeyStore) -> tuple[socket.socket, bytes]:
    """A connection made by hand, and the key of its messages."""
    connection = raw(store)
    theirs, own = connection.recv(48, socket.MSG_WAITALL)[16:], bytes(range(32))
    connection.sendall(own + code(SECRET, b"client", theirs + own))
    assert connection.recv(32, socket.MSG_WAITALL) == code(SECRET, b"server", theirs + own)
    return connection, code(SECRET, b"session", theirs + own)


@pytest.mark.parametrize("attack", ["none", "repeat", "change", "reflect", "too long"])
def test_messages_cannot_be_changed_repeated_or_returned(store: KeyStore, attack: str) -> None:
    connection, key = authenticated(store)
    with connection:
        request = json.dumps({"do": "add", "key": "n", "amount": 1}).encode()
        message = struct.pack(">I", len(request)) + request + code(key, b"client", (0).to_bytes(8, "big"), request)
        connection.sendall(message)
        answer = connection.recv(4 + 1 + 32, socket.MSG_WAITALL)
        assert answer == struct.pack(">I", 1) + b"1" + code(key, b"server", (0).to_bytes(8, "big"), b"1")
        second = struct.pack(">I", len(request)) + request + code(key, b"client", (1).to_bytes(8, "big"), request)
        connection.sendall({
            "none": second,
            "repeat": message,
            "change": second.replace(b"1", b"9", 1),
            "reflect": answer,
            "too long": struct.pack(">I", 1 << 30),
        }[attack])  # fmt: skip
        assert bool(connection.recv(100)) == (attack == "none")
    with client(store) as honest:
        assert honest.get(["n"], timeout_s=0) == [b"2" if attack == "none" else b"1"]


def test_connections_that_say_nothing_keep_nobody_out(store: KeyStore) -> None:
    silent = [raw(store) for _ in range(50)]
    with client(store) as honest:
        honest.set({"a": b"1"})
    for one in silent:
        one.close()


def test_a_store_that_ends_lets_nobody_wait(store: KeyStore) -> None:
    with client(store) as waiting:
        problems: list[BaseException] = []

        def wait() -> None:
            try:
                waiting.get(["never"], timeout_s=120)
            except StoreLost as problem:
                problems.append(problem)

        thread = threading.Thread(target=wait)
        thread.start()
        store.close()
        thread.join(60)
        assert not thread.is_alive()
        with pytest.raises(StoreLost):
            waiting.check(["a"])
