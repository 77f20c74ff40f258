"""A store of keys and values that processes share over the network, for those that know a secret.

torch's TCPStore answers whoever connects. Here both sides prove by HMAC-SHA256 that they know the secret before
anything else is said; the secret itself is never sent. Every later message carries a code that only these two sides can
compute, so that nothing can be inserted, changed, repeated or left out unnoticed. The messages are not encrypted:
whoever can read the packets of the network can read them.

    server -> client   greeting, 32 random bytes
    client -> server   32 random bytes, HMAC(secret, "client", both)
    server -> client   HMAC(secret, "server", both)
    then both ways     length, message, HMAC(HMAC(secret, "session", both), direction, number of the message, message)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

__all__ = ["AuthenticatedConnection", "KeyStore", "KeyStoreClient", "NotAuthenticated", "StoreLost"]

_GREETING = b"ebbflow-store-1\n"
_NONCE = _TAG = 32
_MOST_BYTES = 1 << 26
"""Of one message; the handshakes of ten thousand replicas fit."""
_GREETING_S = 5.0  # for the whole exchange of proofs
_CLOSE_S = 0.1  # how long closing a store may take
_MOST_GREETINGS = 256  # connections that have not proved anything yet


class StoreLost(RuntimeError):
    """The store has ended, cannot be reached, or did not answer in time."""


class NotAuthenticated(StoreLost):
    """The other side has another secret, or does not follow the protocol."""


class AuthenticatedConnection:
    """A connected socket whose two sides have proved that they know the same secret."""

    def __init__(self, connection: socket.socket, secret: bytes, *, serves: bool, timeout_s: float) -> None:
        """Exchange the proofs, which may take `timeout_s`; raises `NotAuthenticated`, or OSError."""
        self._socket = connection
        self._sent = self._received = 0
        self._directions = (b"server", b"client") if serves else (b"client", b"server")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + timeout_s
        own = secrets.token_bytes(_NONCE)
        if serves:
            connection.sendall(_GREETING + own)
            answer = self._read(_NONCE + _TAG, deadline)
            nonces = own + answer[:_NONCE]
            _verify(answer[_NONCE:], secret, b"client", nonces)
            connection.sendall(_tag(secret, b"server", nonces))
        else:
            greeting = self._read(len(_GREETING) + _NONCE, deadline)
            if not greeting.startswith(_GREETING):
                raise NotAuthenticated("what answers is not a store of this version of ebbflow")
            nonces = greeting[len(_GREETING) :] + own
            connection.sendall(own + _tag(secret, b"client", nonces))
            try:
                proof = self._read(_TAG, deadline)
            except (ConnectionError, EOFError):
                raise NotAuthenticated("the store has another secret than this process, and refused it") from None
            _verify(proof, secret, b"server", nonces)
        self._key = _tag(secret, b"session", nonces)
        connection.settimeout(None)

    def send(self, message: bytes) -> None:
        """Send a message."""
        if len(message) > _MOST_BYTES:
            raise StoreLost(
                f"a message of {len(message)} bytes is too long for a store; expected at most {_MOST_BYTES}"
            )
        code = _tag(self._key, self._directions[0], self._sent.to_bytes(8, "big"), message)
        self._sent += 1
        self._socket.sendall(struct.pack(">I", len(message)) + message + code)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Receive a message; raises EOFError at the end, OSError, or `NotAuthenticated` if it is not genuine."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            (length,) = struct.unpack(">I", self._read(4, deadline))
            if length > _MOST_BYTES:
                raise NotAuthenticated(f"a message of {length} bytes was announced; expected at most {_MOST_BYTES}")
            message, code = self._read(length, deadline), self._read(_TAG, deadline)
        finally:
            self._socket.settimeout(None)
        _verify(code, self._key, self._directions[1], self._received.to_bytes(8, "big"), message)
        self._received += 1
        return message

    def close(self) -> None:
        """End the connection; a thread that waits in it fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        parts = []
        while size:
            if deadline is not None:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the connection was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _tag(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big"))
        code.update(part)
    return code.digest()


def _verify(found: bytes, key: bytes, *parts: bytes) -> None:
    if not hmac.compare_digest(found, _tag(key, *parts)):
        raise NotAuthenticated("the other side has another secret than this process")


# The server -----------------------------------------------------------------------------------------------------------


class _Handler(socketserver.BaseRequestHandler):
    """One connection, in a thread of its own."""

    server: _Server

    def handle(self) -> None:
        store = self.server.store
        try:
            connection = AuthenticatedConnection(self.request, store.secret, serves=True, timeout_s=_GREETING_S)
        except NotAuthenticated:
            store.refused += 1
            return
        except (OSError, EOFError):
            return
        finally:
            self.server.greetings.release()
        with contextlib.suppress(OSError, EOFError, NotAuthenticated, ValueError, KeyError, TypeError):
            while True:
                request = json.loads(connection.receive())
                answer = getattr(store, f"_do_{request.pop('do')}")(**request)
                connection.send(json.dumps(answer).encode())


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, host: str, store: KeyStore) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.store = store
        self.greetings = threading.BoundedSemaphore(_MOST_GREETINGS)
        self.connections: set[socket.socket] = set()
        super().__init__((host, 0), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Let no more connections in than are greeted at once: a thread waits for each."""
        if not self.greetings.acquire(blocking=False):
            return False
        self.connections.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a connection that broke is no error of the store."""


class KeyStore:
    """A store that this process serves on one address, until it is closed. Its operations may be called here, too."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listen on a port of `host` that the system chooses."""
        self.secret = secret
        self.refused = 0
        """Connections whose other side did not know the secret."""
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._server = _Server(host, self)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(_CLOSE_S,), daemon=True, name="ebbflow-store").start()

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._do_set({key: _text(value)})

    def peek(self, key: str) -> bytes | None:
        """The value of a key, if it is there."""
        value = self._values.get(key)
        return None if value is None else value.encode("latin-1")

    def complete(self, keys: Sequence[str], value: bytes) -> None:
        """Give the keys that are missing a value."""
        with self._changed:
            self._values = {**dict.fromkeys(keys, _text(value)), **self._values}
            self._changed.notify_all()

    def forget(self, value: bytes) -> None:
        """Delete the keys that have a value."""
        with self._changed:
            self._values = {key: one for key, one in self._values.items() if one != _text(value)}

    def close(self) -> None:
        """Stop serving; whoever waits for a value fails."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for connection in [*self._server.connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # What a request asks for; values are texts here, one character per byte.

    def _do_set(self, values: dict[str, str]) -> None:
        with self._changed:
            self._values.update({str(key): str(value) for key, value in values.items()})
            self._changed.notify_all()

    def _do_get(self, keys: list[str], timeout_s: float) -> list[str] | None:
        """The values of all keys, as soon as all are there; None if they are not in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self._values.keys() >= {*keys}, timeout_s)
            return [self._values[key] for key in keys] if there and not self._closed else None

    def _do_check(self, keys: list[str]) -> bool:
        return self._values.keys() >= {*keys}

    def _do_add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, "0")) + int(amount)
            self._values[key] = str(total)
            self._changed.notify_all()
            return total

    def _do_delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None


def _text(value: bytes) -> str:
    return value.decode("latin-1")


# The client -----------------------------------------------------------------------------------------------------------


class KeyStoreClient:
    """A connection to a `KeyStore`, perhaps to the keys below a prefix. May be used by several threads."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        prefix: str = "",
        timeout_s: float,
    ) -> None:
        """Connect, which may take `timeout_s`; `StoreLost` if nobody serves there, `NotAuthenticated` if they do not
        know the secret."""
        self.prefix = prefix
        self._lock = threading.Lock()
        try:
            connected = socket.create_connection((host, port), timeout=timeout_s)
        except (OSError, UnicodeError) as error:  # the latter for what can be no host
            raise StoreLost(f"no store at {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
        try:
            self._connection = AuthenticatedConnection(connected, secret, serves=False, timeout_s=timeout_s)
        except NotAuthenticated as error:
            connected.close()
            raise NotAuthenticated(f"the store at {host}:{port}: {error}") from None
        except (OSError, EOFError) as error:
            connected.close()
            raise StoreLost(f"the store at {host}:{port} does not answer: {error}") from None

    def set(self, values: dict[str, bytes]) -> None:
        """Set values."""
        self.ask("set", values={self._key(key): _text(value) for key, value in values.items()})

    def get(self, keys: Sequence[str], *, timeout_s: float) -> list[bytes] | None:
        """The values of all keys, as soon as all are there; None if they are not within `timeout_s`."""
        found = self.ask("get", keys=[self._key(key) for key in keys], timeout_s=timeout_s, wait_s=timeout_s)
        return None if found is None else [value.encode("latin-1") for value in found]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.ask("check", keys=[self._key(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key has, 0 if it is not there; the sum."""
        return int(self.ask("add", key=self._key(key), amount=amount))

    def delete(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return bool(self.ask("delete", key=self._key(key)))

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A process group that could not be connected is dropped, and its store with it.
        if hasattr(self, "_connection"):
            self._connection.close()

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def ask(self, do: str, *, wait_s: float = 0.0, **request: Any) -> Any:
        """Ask for what the method `_do_...` of the store gives; `wait_s`: how long that may take besides sending."""
        try:
            with self._lock:
                self._connection.send(json.dumps({"do": do, **request}).encode())
                return json.loads(self._connection.receive(timeout_s=wait_s + _GREETING_S))
        except (OSError, EOFError, ValueError) as error:
            self._connection.close()
            raise StoreLost(f"the store has ended or does not answer: {error}") from None
