"""Options that patches declare as fields of a dataclass: checked by their types, and read from variables.

The type of a field is ``bool``, ``int``, ``float``, ``str``, ``Literal``, or ``tuple[X, ...]`` of these or of
pairs ``tuple[str, str]``, or a union of such types, of which the first that fits is taken. A field of any
other type gets its value, or the text of its variable, as it is; ``__post_init__`` may check it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import MegatronRLPatchesError, PatchError

ON = frozenset({"1", "true", "on", "yes"})
OFF = frozenset({"0", "false", "off", "no", "none"})

# Type -> what is accepted for it, how that becomes a value of the type, and the name for one and for many.
_SCALARS: dict[Any, tuple[Any, Any, str, str]] = {
    bool: (bool, bool, "True or False", ""),
    int: (Integral, int, "an integer", "integers"),
    float: (Real, float, "a number", "numbers"),
    str: ((str, os.PathLike), os.fspath, "a string", "strings"),
    tuple[str, str]: (object, None, "", "pairs of strings"),
}
_UNIONS = (Union, UnionType)


def field_types(options: Any) -> dict[str, Any]:
    """Return the type of every field of a dataclass, by the field's name; ``TypeError`` if it is none."""
    if not (isinstance(options, type) and is_dataclass(options)):
        raise TypeError(f"options are declared as a dataclass, not as {options!r}")
    types = get_type_hints(options)
    return {field.name: types[field.name] for field in fields(options)}


def build(options: Any, values: Mapping[str, Any]) -> Any:
    """Make an instance of the dataclass; ``PatchError`` if a value is not of its field's type, or refused."""
    types = field_types(options)
    arguments = {name: convert(name, value, types[name]) for name, value in values.items()}
    try:
        return options(**arguments)
    except MegatronRLPatchesError:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise PatchError(f"{shown}: {error}") from error


def convert(name: str, value: object, kind: Any) -> Any:
    """Convert a value to the type of its field: a list to a tuple, a mapping to a tuple of pairs."""
    try:
        return _converted(value, kind)
    except TypeError:
        raise PatchError(f"{name}={value!r}: expected {_expected(kind, 'a tuple of {}')}") from None


def read(variable: str, text: str, kind: Any) -> Any:
    """Return what the text of a variable means for a field of this type."""
    try:
        return _converted(_parsed(text.strip(), kind), kind)
    except TypeError:
        expected = "1 or 0" if kind is bool else _expected(kind, "{}, separated by commas")
        raise PatchError(f"{variable}={text!r}: expected {expected}") from None


def items(text: str) -> tuple[str, ...]:
    """Return what stands between the commas, without empty items."""
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


def _converted(value: Any, kind: Any) -> Any:
    if get_origin(kind) in _UNIONS:
        for member in get_args(kind):
            with suppress(TypeError):
                return _converted(value, member)
        raise TypeError
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise TypeError
    if get_origin(kind) is tuple:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise TypeError
        members = tuple(value.items() if isinstance(value, Mapping) else value)
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(members)
        if len(members) != len(kinds):
            raise TypeError
        return tuple(map(_converted, members, kinds))
    accepted, make, *_ = _SCALARS.get(kind, (object, None))
    is_switch = isinstance(value, bool) and kind in (int, float)
    if is_switch or not isinstance(value, accepted):
        raise TypeError
    return value if make is None else make(value)


def _parsed(text: str, kind: Any) -> object:
    """Parse the text; text that does not parse is returned unchanged and refused by the type check."""
    if get_origin(kind) in _UNIONS:
        parsed = (_parsed(text, member) for member in get_args(kind))
        return next((value for value in parsed if value is not text), text)
    if kind is bool:
        return True if text.lower() in ON else False if text.lower() in OFF else text
    if kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is not Ellipsis:  # name=value
            return tuple(part.strip() for part in text.split("=", 1))
        return () if text.lower() in OFF else tuple(_parsed(item, kinds[0]) for item in items(text))
    return text


def _expected(kind: Any, many: str) -> str:
    """Say what a value of this type looks like; ``many`` has ``{}`` for the plural of a tuple's members."""
    if kind in _SCALARS:
        return _SCALARS[kind][2]
    if get_origin(kind) in _UNIONS:
        return " or ".join(_expected(member, many) for member in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    member = (get_args(kind) or (kind,))[0]
    return many.format(_SCALARS[member][3] if member in _SCALARS else member)
