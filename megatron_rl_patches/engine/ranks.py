"""A patch on some ranks only is a hang; this finds it before the first collective of the patch does."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import PatchError
from .api import status


def verify_ranks(group: Any = None) -> None:
    """Check that every rank of the group has the same sites in the same state on the same code.

    Collective: one ``all_gather_object``. Call it after the hosts are imported on all ranks.

    Args:
        group: a ``torch.distributed`` process group; default: all ranks.

    Raises:
        PatchError: no process group is initialised; or ranks differ, and then on every rank of the group
            alike, with the sites and the ranks that differ from the rest.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise PatchError(
            "verify_ranks: torch.distributed is not initialised; call init_process_group() first"
        )
    mine = {f"{s.patch}: {s.target}": f"{s.state} (code {s.fingerprint or 'unknown'})" for s in status()}
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(len(everyone))
    by_rank = dict(zip(ranks, everyone, strict=True))
    differences = []
    for target in sorted({target for states in everyone for target in states or {}}):
        states = {rank: (told or {}).get(target, "not selected") for rank, told in by_rank.items()}
        (usual, most), *others = Counter(states.values()).most_common()
        if others and others[0][1] == most:  # of two ranks, say: no one knows which is wrong
            each = "; ".join(f"rank {rank}: {state}" for rank, state in states.items())
            differences.append(f"{target}: {each}")
            continue
        differences += [
            f"{target}: rank {rank}: {state}; most ranks: {usual}"
            for rank, state in states.items()
            if state != usual
        ]
    if differences:
        raise PatchError("patches differ between ranks:\n  " + "\n  ".join(differences))
