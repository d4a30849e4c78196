"""What the user chose: one frozen object, one grammar, one place for every default.

| variable                            | meaning                                                           |
|-------------------------------------|-------------------------------------------------------------------|
| MEGATRON_RL_PATCHES                 | ``1``/``all``, names, ``all,-name``; ``0`` or unset: off           |
| MEGATRON_RL_PATCHES_STRICT          | ``1``: a patch that cannot take effect is an error, not a warning  |
| MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS | ``pkg.module:function,...``: further ``train``-like functions      |
| MEGATRON_RL_PATCHES_INFERENCE_ROLES | ``name,...``: roles that only score; ``none``: no role does         |
| MEGATRON_RL_PATCHES_ROOTS           | ``pkg,...``: hosts of patches that other packages register         |
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .errors import PatchError

VARIABLE = "MEGATRON_RL_PATCHES"
STRICT_VARIABLE = f"{VARIABLE}_STRICT"
TRAIN_FUNCTIONS_VARIABLE = f"{VARIABLE}_TRAIN_FUNCTIONS"
INFERENCE_ROLES_VARIABLE = f"{VARIABLE}_INFERENCE_ROLES"
#: Read by the import trigger alone.
ROOTS_VARIABLE = f"{VARIABLE}_ROOTS"

_ON = {"1", "true", "on", "yes"}
_OFF = {"", "0", "false", "off", "no", "none"}
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class Settings:
    """Options of the patches; what to patch is chosen by ``apply()`` or the variable.

    Attributes:
        strict: raise :class:`PatchError` at the import of a host whose code a selected patch does not fit,
            instead of warning and leaving that host alone.
        train_functions: ``"package.module:function"`` of further ``train``-like functions, for hosts that
            this package has never seen. Each takes the list of model chunks as a parameter named ``model``.
        inference_roles: roles of a host whose models only score: built with neither DDP nor optimizer.

    Raises:
        PatchError: a tuple is given as a bare string, or a train function is not of the form
            ``package.module:function``.
    """

    strict: bool = False
    train_functions: tuple[str, ...] = ()
    inference_roles: tuple[str, ...] = ("prm_teacher", "teacher", "ref", "reward")

    def __post_init__(self) -> None:
        self._freeze("train_functions", "'package.module:function'")
        self._freeze("inference_roles", "names of roles")
        for path in self.train_functions:
            if not _FUNCTION_PATH.fullmatch(path):
                raise PatchError(
                    f"train function {path!r}: expected 'package.module:function', for example "
                    "'my_rl.megatron.model:train'"
                )

    def _freeze(self, name: str, items: str) -> None:
        given: object = getattr(self, name)
        if isinstance(given, str):
            raise PatchError(f"{name}={given!r}: expected a tuple of {items}")
        object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Settings from ``MEGATRON_RL_PATCHES_*``.

        Raises:
            PatchError: a value that does not fit the grammar above.
        """
        roles = environ.get(INFERENCE_ROLES_VARIABLE, "").strip()
        return cls(
            strict=_switch(STRICT_VARIABLE, environ.get(STRICT_VARIABLE, "")),
            train_functions=_items(environ.get(TRAIN_FUNCTIONS_VARIABLE, "")),
            **({"inference_roles": () if roles.lower() in _OFF else _items(roles)} if roles else {}),
        )


@dataclass(frozen=True)
class Selection:
    """Which patches a value of the variable asks for.

    ``names`` is ``None`` for all of them; ``unknown`` are words that name no patch.
    """

    names: tuple[str, ...] | None
    exclude: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.names is None or bool(self.names)


def parse_selection(value: str, known: Collection[str]) -> Selection:
    """The grammar of ``MEGATRON_RL_PATCHES``: ``all|1|name,name|all,-name|0``."""
    if value.strip().lower() in _OFF:
        return Selection(())
    if not _items(value):
        return Selection((), (), (value,))
    wanted: list[str] = []
    exclude: list[str] = []
    unknown: list[str] = []
    everything = False
    for item in _items(value):
        name = item.removeprefix("-")
        if item.lower() == "all" or item.lower() in _ON:
            everything = True
        elif name not in known:
            unknown.append(item)
        elif item.startswith("-"):
            exclude.append(name)
        else:
            wanted.append(name)
    if exclude and not wanted:
        everything = True
    return Selection(None if everything else tuple(wanted), tuple(exclude), tuple(unknown))


def _items(value: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in value.split(",")) if item)


def _switch(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in _ON:
        return True
    if lowered in _OFF:
        return False
    raise PatchError(f"{name}={value!r}: expected 1 or 0")
