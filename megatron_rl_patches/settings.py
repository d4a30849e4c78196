"""What the user chose: one frozen object, and the variables that it is read from.

| variable                     | meaning                                                             |
|------------------------------|---------------------------------------------------------------------|
| MEGATRON_RL_PATCHES          | ``1``/``all``, names, ``all,-name``; ``0`` or unset: off            |
| MEGATRON_RL_PATCHES_STRICT   | ``1``: a patch that cannot take effect is an error, not a warning   |
| MEGATRON_RL_PATCHES_ROOTS    | ``pkg,...``: frameworks of other packages' patches                  |
| MEGATRON_RL_PATCHES_<OPTION> | an option of a patch; the dataclass in the patch's file declares it |
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any

from .engine import registry
from .engine.options import OFF, ON, build, convert, field_types, items, read
from .errors import PatchError

if TYPE_CHECKING:
    from .engine.spec import Patch

VARIABLE = "MEGATRON_RL_PATCHES"
STRICT_VARIABLE = f"{VARIABLE}_STRICT"
#: Only the import trigger reads this variable.
ROOTS_VARIABLE = f"{VARIABLE}_ROOTS"


def variable_of(option: str) -> str:
    """Return the name of the variable that an option is read from."""
    return f"{VARIABLE}_{option.upper()}"


def variables() -> list[str]:
    """Return the names of all variables that mean something to the registered patches."""
    return [VARIABLE, STRICT_VARIABLE, ROOTS_VARIABLE, *map(variable_of, registry.option_types())]


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

    if TYPE_CHECKING:
        strict: bool
        _options: dict[type, Any]

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *, strict: bool = False, **options: Any) -> None:
        types = registry.option_types()
        if unknown := [name for name in options if name not in types]:
            raise PatchError(f"unknown option {', '.join(unknown)}; known: {', '.join(['strict', *types])}")
        chosen = {
            declared: build(declared, {name: options[name] for name in options if types[name] is declared})
            for declared in dict.fromkeys(types.values())
        }
        values = {field.name: getattr(one, field.name) for one in chosen.values() for field in fields(one)}
        vars(self).update(values, strict=convert("strict", strict, bool), _options=chosen)

    def options_of(self, patch: Patch) -> Any:
        """Return the instance of the dataclass that the patch declares, or ``None`` if it declares none."""
        if patch.options is None:
            return None
        return self._options.get(patch.options) or patch.options()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from the variables above; unset and empty ones leave the defaults.

        Raises:
            PatchError: a value does not fit.
        """
        types = {"strict": bool}
        for declared in registry.option_types().values():
            types |= field_types(declared)
        texts = {name: environ.get(variable_of(name), "") for name in types}
        chosen = {name: text for name, text in texts.items() if text.strip()}
        return cls(**{name: read(variable_of(name), text, types[name]) for name, text in chosen.items()})

    @classmethod
    def without_bad_values(cls, environ: Mapping[str, str] = os.environ) -> tuple[Settings, dict[str, str]]:
        """Read the settings without values that are refused; return the reasons, too, by variable."""
        chosen, accepted = cls(), dict[str, str]()
        names = [STRICT_VARIABLE, *map(variable_of, registry.option_types())]
        untried = {name: environ[name] for name in names if environ.get(name, "").strip()}
        while untried:
            refused = {}
            for name, text in untried.items():
                try:
                    chosen = cls.from_environment({**accepted, name: text})
                except PatchError as error:
                    refused[name] = str(error)
                else:
                    accepted[name] = text
            # Some values are good only beside others, so those that were refused are tried once more.
            if len(refused) == len(untried):
                return chosen, refused
            untried = {name: environ[name] for name in refused}
        return chosen, {}

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.strict, *self._options.values()))

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in vars(self).items() if name != "_options")
        return f"Settings({', '.join(values)})"


@dataclass(frozen=True)
class Selection:
    """Which patches a value of the variable asks for.

    ``names`` is ``None`` for all but the explicit ones, and ``also`` what was named beside these; ``unknown``
    are words that name no patch.
    """

    names: tuple[str, ...] | None
    exclude: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.names is None or bool(self.names)

    def patches(self) -> list[Patch]:
        """Return the patches that are asked for."""
        return registry.select(self.names or (), self.exclude, self.also) if self else []


def parse_selection(value: str, known: Collection[str]) -> Selection:
    """Parse a value of ``MEGATRON_RL_PATCHES``: ``all|1|name,name|all,-name|all,explicit-name|0``."""
    if not value.strip() or value.strip().lower() in OFF:
        return Selection(())
    if not items(value):
        return Selection((), (), (value,))
    everything = {item for item in items(value) if item.lower() in {"all", *ON}}
    words = {item: item.removeprefix("-") for item in items(value) if item not in everything}
    unknown = tuple(item for item, name in words.items() if name not in known)
    names = tuple(item for item, name in words.items() if item == name and name in known)
    exclude = tuple(name for item, name in words.items() if item != name and name in known)
    if everything or (exclude and not names):
        return Selection(None, exclude, unknown, names)
    return Selection(names, exclude, unknown)
