"""HOST:PORT, and which address to listen on."""

from __future__ import annotations

import ipaddress
import socket

from ebbflow.errors import ConfigError

__all__ = ["LOOPBACK", "format_address", "is_loopback", "local_address_towards", "parse_address", "parse_bind"]

LOOPBACK = "127.0.0.1"


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of HOST:PORT, [V6]:PORT or http://HOST:PORT.

    >>> parse_address("10.0.0.7:29510"), parse_address("[::1]:80"), parse_address("head", default_port=29510)
    (('10.0.0.7', 29510), ('::1', 80), ('head', 29510))
    """
    bare = text.strip().removeprefix("http://").rstrip("/")
    if bare.startswith("["):
        host, bracket, rest = bare[1:].partition("]")
        port = rest[1:] if bracket and rest.startswith(":") else None if bracket and not rest else ""
    elif bare.count(":") > 1:
        raise ConfigError(f"{text!r}: an IPv6 address goes into brackets; write for example [::1]:29510")
    else:
        host, colon, after = bare.partition(":")
        port = after if colon else None
    if port is None and default_port is not None:
        port = str(default_port)
    if not host or not port or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address; expected HOST:PORT, for example 10.0.0.7:29510")
    return host, int(port)


def parse_bind(text: str) -> str:
    """One address of this machine to listen on: others are told it, so it cannot be a stand-in for all of them.

    >>> parse_bind("[::1]"), parse_bind("10.0.0.7")
    ('::1', '10.0.0.7')
    """
    bare = text.strip().removeprefix("[").removesuffix("]")
    try:
        everywhere = ipaddress.ip_address(bare).is_unspecified
    except ValueError:  # a name
        everywhere = bare == "*"
        if not bare or ":" in bare:
            raise ConfigError(f"--bind {text}: expected an address without a port, for example 10.0.0.7") from None
    if everywhere:
        raise ConfigError(
            f"--bind {text} means every network of this machine; give the one address at which the others reach it"
        )
    return bare


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`.

    >>> format_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is one that other machines cannot reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the network through which it reaches a host: one interface, not all of them.

    Nothing is sent. For a host on loopback the answer is loopback.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise ConfigError(
            f"{format_address(host, port)} cannot be reached from here ({problem.strerror or problem}); "
            f"check the name and the network, or say with --bind which address to listen on"
        ) from None
