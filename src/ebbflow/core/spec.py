"""The text form of everything that is chosen by name: rules, policies, traces, schedules, optimizers.

    linear+warmup(5ep)          two calls, joined by +
    multistep(30ep, 60ep, factor=0.1)
    gcp-a100-like(seed=3)
    timm:resnet18(size=64)      the name after the colon is the first argument: timm(resnet18, size=64)

A *registry* maps a name to a frozen dataclass (or a function). `bind` turns the text of a call into an instance and
converts each argument by the annotation of its field; `Registry.text` turns an instance into text again. The command
line, the documentation, the report and the tests all list what is in the registries.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ebbflow.core.plugins import raise_naming
from ebbflow.core.units import Seconds, Span, parse_seconds, parse_span
from ebbflow.errors import SpecError, UnitError

__all__ = ["Call", "Entry", "Registry", "bind", "nearest", "param", "parse_call", "parse_calls", "render"]

T = TypeVar("T")
_NAME = re.compile(r"\s*([A-Za-z][A-Za-z0-9_.-]*)(?::([A-Za-z0-9_./-]+))?\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """One name with its arguments, which are still text."""

    name: str
    args: tuple[str, ...] = ()
    kwargs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        inner = ", ".join([*self.args, *(f"{key}={value}" for key, value in self.kwargs)])
        return f"{self.name}({inner})" if inner else self.name


def param(default: Any = dataclasses.MISSING, *, doc: str) -> Any:
    """A dataclass field with a description, which `ebbflow rules show` and the documentation print."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def _split(text: str, separator: str) -> list[str]:
    """Split at the separators outside of parentheses, but not at the + of a number such as 1e+3."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        in_number = char == "+" and i and text[i - 1] in "eE" and i >= 2 and text[i - 2].isdigit()
        if char == separator and depth == 0 and not in_number:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def parse_calls(text: str) -> tuple[Call, ...]:
    """The calls of a text, in order.

    >>> parse_calls("linear+warmup(5ep, start=0)")
    (Call(name='linear', args=(), kwargs=()), Call(name='warmup', args=('5ep',), kwargs=(('start', '0'),)))
    """
    if not isinstance(text, str):
        raise SpecError(f"found {text!r}; expected a text: a name such as 'linear', or 'linear+warmup(5ep)'")
    if not text.strip():
        raise SpecError("the text is empty; write a name such as linear, or linear+warmup(5ep)")
    if text.count("(") != text.count(")"):
        raise SpecError(f"{text!r} has {text.count('(')} opening and {text.count(')')} closing parentheses")
    return tuple(_parse_one(part, text) for part in _split(text, "+"))


def parse_call(text: str | Call) -> Call:
    """The only call of a text, or the call itself; several calls joined by + are an error."""
    if isinstance(text, Call):
        return text
    calls = parse_calls(text)
    if len(calls) > 1:
        raise SpecError(f"{text!r} joins {len(calls)} parts with +; one was expected, such as {calls[0]}")
    return calls[0]


def _parse_one(part: str, whole: str) -> Call:
    match = _NAME.match(part)
    if match is None:
        raise SpecError(
            f"a name was expected in {whole!r}, found {part.strip()!r}; the form is name or name(argument=value)"
        )
    rest = part[match.end() :].strip()
    args = [] if match[2] is None else [match[2]]
    if not rest:
        return Call(match[1], tuple(args))
    if not (rest.startswith("(") and rest.endswith(")")):
        raise SpecError(f"{part.strip()!r} in {whole!r} is not of the form name or name(arguments)")
    kwargs: list[tuple[str, str]] = []
    inner = rest[1:-1].strip()
    for piece in _split(inner, ",") if inner else []:
        key, equals, value = piece.partition("=")
        if not piece.strip() or (equals and not value.strip()):
            raise SpecError(f"{part.strip()!r} has an empty argument")
        if equals:
            kwargs.append((key.strip(), value.strip()))
        elif kwargs:
            raise SpecError(f"{part.strip()!r}: {piece.strip()!r} follows a named argument; put it first or name it")
        else:
            args.append(piece.strip())
    return Call(match[1], tuple(args), tuple(kwargs))


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message about an unknown name: the most similar known name, if any, and all of them.

    >>> nearest("lineer", ["constant", "linear"])
    "did you mean 'linear'? Known: constant, linear"
    """
    return f"{_similar(name, known)}Known: {', '.join(sorted(known))}"


def _similar(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _convert(text: str, annotation: Any, where: str) -> Any:
    """Convert the text of one argument to the annotated type."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        if text.lower() == "none" and len(options) < len(typing.get_args(annotation)):
            return None
        return _convert(text, options[0], where)
    if origin is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(annotation)]
        if text not in choices:
            raise SpecError(f"{where} is {text!r}; {nearest(text, choices)}")
        return text
    try:
        if annotation is Span:
            return parse_span(text)
        if annotation is Seconds:
            return parse_seconds(text)
    except UnitError as error:
        raise UnitError(f"{where}: {error}") from None
    if annotation is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise SpecError(f"{where} is {text!r}; expected true or false")
        return words[text.lower()]
    if annotation is str:
        return text.strip("'\"")
    if annotation in (int, float):
        try:
            number = float(text)
        except ValueError:
            raise SpecError(f"{where} is {text!r}; expected a number") from None
        if not math.isfinite(number):
            raise SpecError(f"{where} is {text!r}; expected a finite number")
        if annotation is float:
            return number
        if number != int(number):
            raise SpecError(f"{where} is {text!r}; expected a whole number")
        return int(number)
    raise SpecError(f"{where} cannot be given as text")  # a registered class with an unsupported field type


def bind(call: Call, target: Callable[..., T]) -> T:
    """Call the target with the arguments of the text, each converted by the annotation of its parameter.

    A parameter annotated `tuple[X, ...]` takes all positional arguments, and `**options: X` all names that are not
    parameters.
    """
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    if dataclasses.is_dataclass(target):
        hints = typing.get_type_hints(target)
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name in hints]
    others = next((p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    parameters = [p for p in parameters if p is not others]
    names = [p.name for p in parameters]
    usage = f"{call.name}({', '.join(_usage(p, hints[p.name]) for p in parameters)})"
    values: dict[str, Any] = {}
    rest = list(call.args)
    for parameter in parameters:
        hint = hints[parameter.name]
        if typing.get_origin(hint) is tuple:
            of = typing.get_args(hint)[0]
            if rest or not any(key == parameter.name for key, _ in call.kwargs):
                values[parameter.name] = tuple(_convert(text, of, f"{call.name}: {parameter.name}") for text in rest)
            rest = []
        elif rest and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            values[parameter.name] = _convert(rest.pop(0), hint, f"{call.name}: {parameter.name}")
    if rest:
        raise SpecError(f"{call} has too many arguments: {', '.join(rest)}; the form is {usage}")
    for key, text in call.kwargs:
        if key not in names and others is None:
            meant = _similar(key, names)
            raise SpecError(
                f"{call} has the unknown argument {key!r}; {meant}{'The' if meant else 'the'} form is {usage}"
            )
        if values.get(key, ()) != ():
            raise SpecError(f"{call} gives {key!r} twice; the form is {usage}")
        hint = hints[key if key in names or others is None else others.name]
        values[key] = _convert(text, hint, f"{call.name}: {key}")
    missing = [p.name for p in parameters if p.default is inspect.Parameter.empty and values.get(p.name, ()) == ()]
    if missing:
        raise SpecError(f"{call} lacks {', '.join(missing)}; the form is {usage}")
    try:
        return target(**values)
    except Exception as error:
        raise_naming(error, target, str(call))


def _usage(parameter: inspect.Parameter, hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"{parameter.name}, ..."
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={_text(parameter.default, hint)}"


def _text(value: Any, hint: Any = None) -> str:
    """A value as text that `_convert` reads back. A duration is a plain float at run time; the hint adds its unit."""
    if isinstance(value, float):
        unit = "s" if hint is Seconds or Seconds in typing.get_args(hint) else ""
        return repr(value).removesuffix(".0") + unit
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(name: str, instance: Any) -> str:
    """The shortest text that `bind` reads back as an equal instance; arguments at their defaults are left out."""
    parts = []
    hints = typing.get_type_hints(type(instance))
    fields = sorted(dataclasses.fields(instance), key=lambda field: bool(field.kw_only))  # as the signature
    for field in fields:
        value = getattr(instance, field.name)
        if not field.init or value == field.default:
            continue
        if isinstance(value, tuple):
            parts += [_text(item, hints[field.name]) for item in value]
        else:
            positional = len(parts) == 0 and field is fields[0] and not field.kw_only
            text = _text(value, hints[field.name])
            parts.append(text if positional else f"{field.name}={text}")
    return f"{name}({', '.join(parts)})" if parts else name


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """One registered name."""

    name: str
    kind: str
    make: Callable[..., T]
    cite: str = ""
    needs: frozenset[str] = frozenset()
    exempt: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Laws (see tests/laws) that this entry does not have to pass, each with the reason."""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def parameters(self) -> list[tuple[str, str, str]]:
        """(name, default as text or '', documentation) of each argument of the text form."""
        docs: dict[str, str] = {}
        if dataclasses.is_dataclass(self.make):
            docs = {f.name: str(f.metadata.get("doc", "")) for f in dataclasses.fields(self.make)}
        hints = typing.get_type_hints(self.make)
        result = []
        for p in inspect.signature(self.make).parameters.values():
            default = "" if p.default is inspect.Parameter.empty else _text(p.default, hints.get(p.name))
            result.append((p.name, default, docs.get(p.name, "")))
        return result


class Registry(Generic[T]):
    """Classes or functions by name, all of one kind. Duplicate and unknown names raise a SpecError."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self,
        name: str,
        *,
        kind: str = "",
        cite: str = "",
        needs: typing.Iterable[str] = (),
        exempt: typing.Mapping[str, str] | None = None,
    ) -> Callable[[Any], Any]:
        """Return a decorator that adds a class or function under the name."""

        def add(make: Any) -> Any:
            if name in self._entries:
                taken = self._entries[name].make
                raise SpecError(
                    f"the {self.noun} {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}; "
                    f"choose another name"
                )
            self._entries[name] = Entry(
                name=name,
                kind=kind or self.noun,
                make=make,
                cite=cite,
                needs=frozenset(needs),
                exempt=dict(exempt or {}),
            )
            return make

        return add

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries[name] for name in sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self, kind: str | None = None) -> list[str]:
        """All names, or those of one kind, sorted."""
        return [entry.name for entry in self if kind is None or entry.kind == kind]

    def entry(self, name: str) -> Entry[T]:
        """The entry of a name; the error for an unknown name suggests a similar one."""
        if name not in self._entries:
            raise SpecError(f"unknown {self.noun} {name!r}; {nearest(name, self.names())}")
        return self._entries[name]

    def with_arguments(self, call: Call, changes: typing.Mapping[str, str]) -> Call:
        """The call with these arguments. One that it has already, by its name or its place, is replaced.

        >>> numbers: Registry[complex] = Registry("number")
        >>> _ = numbers.register("pair")(complex)
        >>> str(numbers.with_arguments(parse_call("pair(1)"), {"real": "3", "imag": "2"}))
        'pair(3, imag=2)'
        """
        names = list(inspect.signature(self.entry(call.name).make).parameters)[: len(call.args)]
        places = [changes.get(name, value) for name, value in zip(names, call.args, strict=False)]
        named = {**dict(call.kwargs), **{name: value for name, value in changes.items() if name not in names}}
        return Call(call.name, (*places, *call.args[len(names) :]), tuple(named.items()))

    def make(self, text: str | Call) -> T:
        """An instance from its text form."""
        call = parse_call(text)
        return bind(call, self.entry(call.name).make)

    def text(self, instance: Any) -> str:
        """The text form of an instance of a registered dataclass, under the name by which its class is registered.

        The class name stands in for a class that is not registered, so that printing such an instance works, too.

        >>> numbers: Registry[complex] = Registry("number")
        >>> @numbers.register("pair")
        ... @dataclass(frozen=True)
        ... class Pair:
        ...     first: int
        ...     second: int = 2
        >>> numbers.text(Pair(1)), numbers.text(numbers.make("pair(1, second=3)"))
        ('pair(1)', 'pair(1, second=3)')
        """
        kind = type(instance)
        name = next((entry.name for entry in self._entries.values() if entry.make is kind), kind.__name__)
        return render(name, instance)
