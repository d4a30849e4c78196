"""What the user chose: one frozen object, and the variables that it is read from (``docs/options.md``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from _megatron_rl_patches_startup import OFF, ON

from ..errors import MegatronRLPatchesError, PatchError
from . import registry
from .patch import Patch, third_party

VARIABLE = "MEGATRON_RL_PATCHES"
STRICT_VARIABLE = f"{VARIABLE}_STRICT"
#: Only the import trigger reads this variable.
ROOTS_VARIABLE = f"{VARIABLE}_ROOTS"

# Type -> what is accepted for it, how that becomes a value of the type, and the name for one and for many.
_SCALARS: dict[Any, tuple[Any, Any, str, str]] = {
    bool: (bool, bool, "True or False", ""),
    int: (Integral, int, "an integer", "integers"),
    float: (Real, float, "a number", "numbers"),
    str: ((str, os.PathLike), os.fspath, "a string", "strings"),
    tuple[str, str]: (object, None, "", "pairs of strings"),
}
_UNIONS = (Union, UnionType)


def variable_of(option: str) -> str:
    """Return the name of the variable that an option is read from."""
    return f"{VARIABLE}_{option.upper()}"


def variables() -> list[str]:
    """Return the names of all variables that mean something to the registered patches."""
    return [VARIABLE, STRICT_VARIABLE, ROOTS_VARIABLE, *map(variable_of, registry.option_types())]


@dataclass(frozen=True, init=False, repr=False)
class Settings:
    """Options of the patches; what to patch is chosen by ``apply()`` or the variable.

    Every field of a dataclass that a registered patch declares as its ``options`` is a keyword argument, and
    an attribute: ``Settings(train_functions=["my_rl.megatron.model:train"]).train_functions``.

    Args:
        strict: raise :class:`PatchError` at the import of a framework whose code a selected patch does not
            fit, instead of warning and leaving that framework alone.
        **options: by name; those of the patches in this package stand on the pages of the patches.

    Raises:
        PatchError: no patch has such an option, or its value is not of the declared type, or is out of range.
    """

    strict: bool
    _options: tuple[Any, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *, strict: bool = False, **options: Any) -> None:
        types = registry.option_types()
        if unknown := [name for name in options if name not in types]:
            raise PatchError(f"unknown option {', '.join(unknown)}; known: {', '.join(['strict', *types])}")
        chosen = tuple(
            build(declared, {name: options[name] for name in options if types[name] is declared})
            for declared in dict.fromkeys(types.values())
        )
        values = {field.name: getattr(one, field.name) for one in chosen for field in fields(one)}
        vars(self).update(values, strict=convert("strict", strict, bool), _options=chosen)

    def options_of(self, patch: Patch) -> Any:
        """Return the instance of the dataclass that the patch declares, or ``None`` if it declares none."""
        if patch.options is None:
            return None
        return next((one for one in self._options if type(one) is patch.options), None) or patch.options()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from their variables; unset and empty ones leave the defaults.

        Raises:
            PatchError: a value does not fit.
        """
        types = {"strict": bool}
        for declared in registry.option_types().values():
            types |= registry.field_types(declared)
        texts = {name: environ.get(variable_of(name), "") for name in types}
        chosen = {name: text for name, text in texts.items() if text.strip()}
        return cls(**{n: convert(variable_of(n), text, types[n], is_text=True) for n, text in chosen.items()})

    @classmethod
    def without_bad_values(cls, environ: Mapping[str, str] = os.environ) -> tuple[Settings, dict[str, str]]:
        """Read the settings without values that are refused; return the reasons, too, by variable."""
        settings, accepted, refused = cls(), dict[str, str](), dict[str, str]()
        names = [STRICT_VARIABLE, *map(variable_of, registry.option_types())]
        for name in (*names, *names):  # twice: an option may need another one, which is read after it
            text = environ.get(name, "")
            if text.strip() and name not in accepted:
                try:
                    settings = cls.from_environment({**accepted, name: text})
                except PatchError as error:
                    refused[name] = str(error)
                else:
                    accepted[name] = text
        return settings, {name: refused[name] for name in refused if name not in accepted}

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in vars(self).items() if name != "_options")
        return f"Settings({', '.join(values)})"


def parse_selection(value: str) -> tuple[list[Patch], list[str]]:
    """Return the patches that a value of ``MEGATRON_RL_PATCHES`` selects, and the words that name no patch.

    The value is ``0``, or names of patches and sets, separated by commas: ``1`` is the set ``default``, and
    ``-name`` leaves a patch out, by default of that set.
    """
    if value.strip().lower() in OFF:
        return [], []
    lowered = {name: name for name in registry.SETS} | dict.fromkeys(ON, registry.DEFAULT)
    words = [lowered.get(word.lower(), word) for word in items(value) or (value,)]
    known = registry.patches()
    names = [word for word in words if word in (*registry.SETS, *known)]
    excluded = [word for word in words if word[0] == "-" and word[1:] in known]
    unknown = [word for word in words if word not in (*names, *excluded)]
    names = names or [registry.DEFAULT] * bool(excluded)
    return registry.select(names, [word[1:] for word in excluded]), unknown


# --- values of options


def build(options: Any, values: Mapping[str, Any]) -> Any:
    """Make an instance of the dataclass; ``PatchError`` if a value is not of its field's type, or refused."""
    types = registry.field_types(options)
    arguments = {name: convert(name, value, types[name]) for name, value in values.items()}
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    with third_party(f"{options.__name__}({shown})", passing=MegatronRLPatchesError):
        return options(**arguments)


def convert(name: str, value: Any, kind: Any, is_text: bool = False) -> Any:
    """Convert a value (with ``is_text``, of a variable) to its field's type, such as a list to a tuple."""
    try:
        return _converted(value.strip() if is_text else value, kind, is_text)
    except TypeError:
        expected = _expected(kind, "{}, separated by commas" if is_text else "a tuple of {}")
        expected = "1 or 0" if is_text and kind is bool else expected
        raise PatchError(f"{name}={value!r}: expected {expected}") from None


def items(text: str) -> tuple[str, ...]:
    """Return what stands between the commas, without empty items."""
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


def _converted(value: Any, kind: Any, is_text: bool) -> Any:
    """Return the value as one of the type; ``TypeError`` if it is none."""
    members = get_args(kind)
    if get_origin(kind) in _UNIONS:
        for member in members:
            with suppress(TypeError):
                return _converted(value, member, is_text)
        raise TypeError
    if get_origin(kind) is Literal and value not in members:
        raise TypeError
    if get_origin(kind) is tuple:
        if is_text and members[-1] is Ellipsis:
            value = () if value.lower() in OFF else items(value)
        elif is_text:  # name=value
            value = [part.strip() for part in value.split("=", 1)]
        elif isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise TypeError
        values = tuple(value.items() if isinstance(value, Mapping) else value)
        kinds = members[:1] * len(values) if members[-1] is Ellipsis else members
        if len(values) != len(kinds):
            raise TypeError
        return tuple(_converted(one, kind, is_text) for one, kind in zip(values, kinds, strict=True))
    if is_text and kind is bool:
        value = True if value.lower() in ON else False if value.lower() in OFF else value
    elif is_text and kind in (int, float):
        with suppress(ValueError):
            value = kind(value)
    accepted, make, *_ = _SCALARS.get(kind, (object, None))
    is_switch = isinstance(value, bool) and kind in (int, float)
    if is_switch or not isinstance(value, accepted):
        raise TypeError
    return value if make is None else make(value)


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
