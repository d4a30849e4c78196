"""What the package offers: put patches in place, take them away, ask for their state, compare ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..common.messages import Message
from ..common.text import listed
from ..errors import PatchError
from . import installer, registry
from .judge import judge_all, refuse_faults
from .records import ApplyCall
from .settings import VARIABLE, Settings, parse_selection
from .sources import Environment
from .statuses import Statuses

_BAD_VALUES = Message(
    "some variables have bad values: {problems}",
    "An unknown patch is not in place, and an option with a bad value keeps its default.",
    "megatron-rl-patches doctor prints what to write; MEGATRON_RL_PATCHES_STRICT=1 makes this an error.",
)


def apply(
    *names: str, exclude: Collection[str] = (), settings: Settings | None = None, strict: bool | None = None
) -> Statuses:
    """Put patches in place, by default the repairs. You can call it before or after the frameworks are
    imported, any number of times, from any thread.

    Patches that are named must fit every framework that is present. A patch of a set that does not fit is
    skipped with a warning, unless ``strict`` is true.

    Args:
        names: names of patches, see ``available()``, or of one set. Without names it is ``default``, the set
            of repairs; ``all`` adds the patches that are not proven enough for that. To name patches and a
            set, call ``apply()`` twice.
        exclude: names of patches to leave out.
        settings: options; by default ``Settings.from_environment()``, but a patch in place keeps its own.
        strict: overrides ``settings.strict``.

    Returns:
        the state of every function of the selected patches.

    Raises:
        PatchError: unknown name, a patch that must take effect cannot, or a patch is in a running
            :func:`applied` block with other options. Exactly what this call did is undone; what other threads
            apply at the same time stays.
    """
    _apply(names, exclude, settings, strict, lasts=True)
    return status()


@contextmanager
def applied(
    *names: str, exclude: Collection[str] = (), settings: Settings | None = None, strict: bool | None = None
) -> Iterator[Statuses]:
    """:func:`apply` for the length of a ``with`` block. Patches that another call asks for stay after it, and
    the options of the last :func:`apply` are back. Blocks that overlap must agree about the options.
    """
    apply_call = _apply(names, exclude, settings, strict, lasts=False)
    try:
        yield status()
    finally:
        installer.installer.release(apply_call)


def _apply(
    names: tuple[str, ...],
    exclude: Collection[str],
    settings: Settings | None,
    strict: bool | None,
    lasts: bool,
) -> ApplyCall:
    chosen = settings or Settings.from_environment()
    patches = registry.select(names or (registry.DEFAULT,), exclude)
    required = not {*names} <= {*registry.SETS} or (chosen.strict if strict is None else strict)
    if required:
        # Judged by source before anything is changed, frameworks that are not imported yet included.
        refuse_faults(judge_all(Environment(), patches, chosen))
    apply_call = ApplyCall(required, lasts)
    installer.installer.add(patches, chosen, apply_call, replace_options=settings is not None)
    return apply_call


def activate_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Put in place what the variable ``MEGATRON_RL_PATCHES`` selects; nothing is checked before its import.

    Raises:
        PatchError: only with ``MEGATRON_RL_PATCHES_STRICT=1``; otherwise bad values cost one warning, and
            leave the defaults of their variables.
    """
    settings, refused = Settings.without_bad_values(environ)
    messages = list(refused.values())
    patches, unknown = parse_selection(environ.get(VARIABLE, ""))
    if unknown:
        messages.append(f"{VARIABLE}: {registry.unknown_names(unknown)}")
    if messages and settings.strict:
        raise PatchError("; ".join(messages))
    if messages:
        _BAD_VALUES.log(problems="; ".join(messages))
    # Options of an apply() that the program has called itself stay in force.
    installer.installer.add(patches, settings, ApplyCall(settings.strict, lasts=True), replace_options=False)


def revert(*names: str) -> None:
    """Put the original objects back, by default for all patches; a copy of a wrapper does nothing then.

    Raises:
        PatchError: unknown name.
    """
    installer.installer.remove({patch.name for patch in registry.select(names or registry.patches())})


def status() -> Statuses:
    """Return the state of every function of the patches selected so far, read from the live objects.

    ``print`` shows a table of patches and frameworks; the list has a :class:`.SiteStatus` of each function,
    also for those that :func:`~megatron_rl_patches.reentry.reentrant_train` decorates.
    """
    decorated = [status for patch in registry.patches().values() for status in patch.decorated()]
    return Statuses([*installer.installer.status(), *decorated])


def available() -> dict[str, str]:
    """Return the names of all registered patches, each with its one-line summary."""
    return {name: patch.summary for name, patch in registry.patches().items()}


def verify_ranks(group: Any = None) -> None:
    """Check that every rank of the group has the same patched functions in the same state on the same code.

    A patch on some ranks only makes the job hang in the first collective that the patch adds or leaves out.
    Collective: one ``all_gather_object``. Call it after the frameworks are imported on all ranks.

    Args:
        group: a ``torch.distributed`` process group; default: all ranks.

    Raises:
        PatchError: no process group is initialized; or ranks differ. Then every rank of the group raises it,
            with the functions, their states and the ranks; states that few ranks have come first.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise PatchError("verify_ranks: torch.distributed is not initialized; call init_process_group first")
    from ..common.agreement import gathered, world

    sites = installer.installer.status()  # decorated functions are deleted at another time on each rank
    own = {f"{s.patch}: {s.target}": f"{s.word} (code {s.fingerprint or 'unknown'})" for s in sites}
    by_rank = dict(gathered((dist.get_rank(), own), group or world()))
    differences = []
    for target in sorted(set().union(*by_rank.values())):
        ranks_by_state: dict[str, list[int]] = {}
        for rank, states in by_rank.items():
            ranks_by_state.setdefault(states.get(target, "not selected"), []).append(rank)
        if len(ranks_by_state) > 1:
            rarest_first = sorted(ranks_by_state.items(), key=lambda item: len(item[1]))
            parts = (f"{state} on rank {listed(ranks)}" for state, ranks in rarest_first)
            differences.append(f"{target}: {'; '.join(parts)}")
    if differences:
        raise PatchError("patches differ between ranks:\n  " + "\n  ".join(differences))
