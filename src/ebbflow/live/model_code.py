"""What a module computes, as plain values that are the same in every process: its code, and what it was given.

Bytecode depends on the version of Python, which replicas compare, too. What belongs to torch is named only, since they
compare the version of torch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

__all__ = ["describe_class", "describe_functions", "describe_settings"]

_OF_THE_PROCESS = {
    "cache", "debug", "device", "devices", "dir", "directory", "file", "folder", "host", "id", "ids", "index", "log",
    "path", "port", "rank", "ranks", "seed", "shard", "url", "verbose", "world",
}  # fmt: skip
"""Parts of the names of settings that may well differ between processes which compute the same."""


def describe_class(kind: type[torch.nn.Module]) -> list[Any]:
    """The code of the constructor and of `forward`, and of the methods whose names this code uses, and so on."""
    found: dict[str, Any] = {}
    names = ["__init__", "forward"]
    while names:
        name = names.pop()
        value = inspect.getattr_static(kind, name, None)
        value = getattr(value, "__func__", getattr(value, "fget", value))  # of static methods and properties
        if name in found or not isinstance(value, FunctionType) or _of_torch(value):
            continue
        found[name] = _function(value, ())
        names += _names(value.__code__)
    return sorted(found.items())


def describe_functions(module: torch.nn.Module) -> list[Any]:
    """The functions among the attributes of a module: their code, and what `partial` or a closure gives them."""
    return sorted((key, repr(_callable(value, ()))) for key, value in vars(module).items() if _is_callable(value))


def describe_settings(module: torch.nn.Module) -> list[Any]:
    """Numbers and texts, and sequences of them, that the constructor of a module has taken and kept by their names.

    Other attributes are left out: they may be counters, or whatever a process notes for itself. So are those that name
    devices, ranks, files and the like.
    """
    declared = {
        name
        for kind in type(module).__mro__
        if isinstance(vars(kind).get("__init__"), FunctionType)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
    }
    return sorted(
        (key, repr(_plain(value)))
        for key, value in vars(module).items()
        if key in declared and _OF_THE_PROCESS.isdisjoint(key.lower().split("_")) and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, str):
        return re.search(r"[/\\:]", value) is None  # a path, an address or a device
    return value is None or isinstance(value, bool | int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    # Numbers of numpy, and enumerations, are printed in ways of their own.
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def _is_callable(value: object) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType | MethodType | functools.partial)


def _of_torch(function: FunctionType) -> bool:
    return f"{function.__globals__.get('__name__')}.".startswith("torch.")  # __module__ may be that of what it wraps


def _callable(value: Any, inside: tuple[int, ...]) -> Any:
    """What a callable is made of. `inside`: the functions in whose closures it was found."""
    if isinstance(value, functools.partial):
        keywords = sorted((name, _given(one, inside)) for name, one in value.keywords.items())
        return "partial", _callable(value.func, inside), [_given(one, inside) for one in value.args], keywords
    if isinstance(value, MethodType):
        return "method", type(value.__self__).__qualname__, _callable(value.__func__, inside)
    if isinstance(value, FunctionType):
        return _function(value, inside)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _function(function: FunctionType, inside: tuple[int, ...]) -> Any:
    name = function.__qualname__
    if id(function) in inside:  # it calls itself
        return name
    if _of_torch(function):
        wrapped = getattr(function, "__wrapped__", None)
        return name, _callable(wrapped, (*inside, id(function))) if wrapped is not None else None
    within = (*inside, id(function))
    cells = [_cell(cell, within) for cell in function.__closure__ or ()]
    defaults = [_given(one, within) for one in function.__defaults__ or ()]
    keywords = sorted((key, _given(one, within)) for key, one in (function.__kwdefaults__ or {}).items())
    return name, _code(function.__code__), cells, defaults, keywords


def _cell(cell: Any, inside: tuple[int, ...]) -> Any:
    try:
        return _given(cell.cell_contents, inside)
    except ValueError:  # not assigned yet
        return None


def _given(value: Any, inside: tuple[int, ...]) -> Any:
    """What a function was given: plain values and callables; of anything else, only its type."""
    if _is_callable(value):
        return _callable(value, inside)
    return repr(_plain(value)) if _is_plain(value) else type(value).__qualname__


def _code(code: CodeType) -> Any:
    return code.co_code.hex(), code.co_names, code.co_varnames, [_constant(one) for one in code.co_consts]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return sorted(repr(_constant(one)) for one in value)
    return [_constant(one) for one in value] if isinstance(value, tuple) else repr(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
