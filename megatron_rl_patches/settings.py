"""What the user chose: one frozen object, one grammar, one place for every default.

| variable                                | meaning                                                          |
|-----------------------------------------|------------------------------------------------------------------|
| MEGATRON_RL_PATCHES                     | ``1``/``all``, names, ``all,-name``; ``0`` or unset: off         |
| MEGATRON_RL_PATCHES_STRICT              | ``1``: a patch that cannot take effect is an error, no warning |
| MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS     | ``pkg.module:function,...``: further ``train``-like functions    |
| MEGATRON_RL_PATCHES_INFERENCE_ROLES     | ``name,...``: roles that only score; ``none``: no role does      |
| MEGATRON_RL_PATCHES_OPD_TOP_K           | how many of the student's most probable tokens to distil on      |
| MEGATRON_RL_PATCHES_OPD_DIVERGENCE      | ``reverse_kl``, ``forward_kl``, ...: see ``OPD_DIVERGENCES``     |
| MEGATRON_RL_PATCHES_OPD_TEACHERS        | ``name=path,...``: checkpoints to distil                         |
| MEGATRON_RL_PATCHES_OPD_TEACHER_WEIGHTS | ``number,...``: of their mixture, one per teacher                |
| MEGATRON_RL_PATCHES_ROOTS               | ``pkg,...``: hosts of patches that other packages register       |
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .errors import PatchError

VARIABLE = "MEGATRON_RL_PATCHES"
STRICT_VARIABLE = f"{VARIABLE}_STRICT"
TRAIN_FUNCTIONS_VARIABLE = f"{VARIABLE}_TRAIN_FUNCTIONS"
INFERENCE_ROLES_VARIABLE = f"{VARIABLE}_INFERENCE_ROLES"
OPD_TOP_K_VARIABLE = f"{VARIABLE}_OPD_TOP_K"
OPD_DIVERGENCE_VARIABLE = f"{VARIABLE}_OPD_DIVERGENCE"
OPD_TEACHERS_VARIABLE = f"{VARIABLE}_OPD_TEACHERS"
OPD_TEACHER_WEIGHTS_VARIABLE = f"{VARIABLE}_OPD_TEACHER_WEIGHTS"
#: Read by the import trigger alone.
ROOTS_VARIABLE = f"{VARIABLE}_ROOTS"

#: What on-policy distillation can minimise: functions of ``megatron_rl_patches.losses``.
OPD_DIVERGENCES = (
    "reverse_kl",
    "forward_kl",
    "jensen_shannon",
    "generalised_kl",
    "importance_weighted_reverse_kl",
)

N = TypeVar("N")

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
        opd_top_k: for ``topk-distillation``, as all ``opd_...``: how many tokens are compared one by one.
        opd_divergence: one of ``OPD_DIVERGENCES``.
        opd_teachers: names and checkpoints of the teachers; a mapping, or pairs.
        opd_teacher_weights: of the teachers in their mixture; none: all the same.

    Raises:
        PatchError: a tuple is given as a bare string, a train function is not of the form
            ``package.module:function``, or an ``opd_...`` is out of its range. Whether a checkpoint exists is
            not looked at here.
    """

    strict: bool = False
    train_functions: tuple[str, ...] = ()
    inference_roles: tuple[str, ...] = ("prm_teacher", "teacher", "ref", "reward")
    opd_top_k: int = 64
    opd_divergence: str = "reverse_kl"
    opd_teachers: tuple[tuple[str, str], ...] = ()
    opd_teacher_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._freeze("train_functions", "'package.module:function'")
        self._freeze("inference_roles", "names of roles")
        for path in self.train_functions:
            if not _FUNCTION_PATH.fullmatch(path):
                raise PatchError(
                    f"train function {path!r}: expected 'package.module:function', for example "
                    "'my_rl.megatron.model:train'"
                )
        self._check_distillation()

    def _check_distillation(self) -> None:
        if isinstance(self.opd_teachers, Mapping):
            object.__setattr__(self, "opd_teachers", tuple(self.opd_teachers.items()))
        self._freeze("opd_teachers", "pairs of name and checkpoint")
        self._freeze("opd_teacher_weights", "numbers")
        if self.opd_top_k < 1:
            raise PatchError(f"opd_top_k={self.opd_top_k}: expected at least 1")
        if self.opd_divergence not in OPD_DIVERGENCES:
            raise PatchError(
                f"opd_divergence={self.opd_divergence!r}: expected one of {', '.join(OPD_DIVERGENCES)}"
            )
        names = [name for name, _ in self.opd_teachers]
        if len(set(names)) < len(names) or not all(name and path for name, path in self.opd_teachers):
            raise PatchError(f"opd_teachers={self.opd_teachers}: expected distinct names, each with a path")
        weights = self.opd_teacher_weights
        if weights and (
            len(weights) != len(names)
            or not all(0 <= weight < math.inf for weight in weights)
            or not 0 < sum(weights) < math.inf
        ):
            raise PatchError(
                f"opd_teacher_weights={weights} of the teachers {names}: expected one each, not negative, "
                "not all zero"
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
        top_k = environ.get(OPD_TOP_K_VARIABLE, "").strip()
        divergence = environ.get(OPD_DIVERGENCE_VARIABLE, "").strip()
        weights = _items(environ.get(OPD_TEACHER_WEIGHTS_VARIABLE, ""))
        return cls(
            strict=_switch(STRICT_VARIABLE, environ.get(STRICT_VARIABLE, "")),
            train_functions=_items(environ.get(TRAIN_FUNCTIONS_VARIABLE, "")),
            inference_roles=(() if roles.lower() in _OFF else _items(roles))
            if roles
            else cls.inference_roles,
            opd_top_k=_number(OPD_TOP_K_VARIABLE, top_k, int) if top_k else cls.opd_top_k,
            opd_divergence=divergence or cls.opd_divergence,
            opd_teachers=tuple(map(_named_path, _items(environ.get(OPD_TEACHERS_VARIABLE, "")))),
            opd_teacher_weights=tuple(
                _number(OPD_TEACHER_WEIGHTS_VARIABLE, weight, float) for weight in weights
            ),
        )


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


def parse_selection(value: str, known: Collection[str]) -> Selection:
    """The grammar of ``MEGATRON_RL_PATCHES``: ``all|1|name,name|all,-name|all,explicit-name|0``."""
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
    if everything:
        return Selection(None, tuple(exclude), tuple(unknown), tuple(wanted))
    return Selection(tuple(wanted), tuple(exclude), tuple(unknown))


def _items(value: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in value.split(",")) if item)


def _switch(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in _ON:
        return True
    if lowered in _OFF:
        return False
    raise PatchError(f"{name}={value!r}: expected 1 or 0")


def _named_path(item: str) -> tuple[str, str]:
    name, equals, path = (part.strip() for part in item.partition("="))
    if not (name and equals and path):
        raise PatchError(
            f"{OPD_TEACHERS_VARIABLE}: {item!r}: expected name=path, for example math=/teachers/math"
        )
    return name, path


def _number(name: str, value: str, kind: Callable[[str], N]) -> N:
    try:
        return kind(value)
    except ValueError:
        raise PatchError(f"{name}: {value!r}: expected a number") from None
