"""One rank of the demo: it chooses a backend, runs the program, and reports progress on rank 0."""

from __future__ import annotations

import os
import platform
import threading
import traceback
import warnings
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from tqdm import tqdm

from .. import __version__, status
from ..common.ranks import is_rank_0
from ..engine.announce import summary
from ..engine.settings import VARIABLE
from .figures import DistillationFigures, Figures, LearningFigures

if TYPE_CHECKING:
    from .teachers import Teachers


def run(folder: str, **options: Any) -> dict[str, Any] | None:
    """Run this rank and return the figures, on rank 0 only."""
    # Otherwise every rank prints warnings of Megatron and torch about optional packages and deprecated names.
    warnings.simplefilter("ignore")
    with _device():
        torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=60))
        figures = _run(folder=folder, **options)
        is_first = is_rank_0()
        # Skipped after an exception, since it may wait for a rank that has exited.
        torch.distributed.destroy_process_group()
        return asdict(figures) if is_first else None


def _device() -> AbstractContextManager[Any]:
    """Return a context in which this rank has a GPU of its own, or the CPU if there is not one for each."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.cuda.device(int(os.environ["LOCAL_RANK"]))
    from ..testing import cpu_backend

    return cpu_backend()


def _run(rollouts: int, seed: int, sizes: list[int], distill: bool, folder: str) -> Figures:
    # Megatron is imported before the program's modules: the patches start at the first import of a framework,
    # and the program's train() must not be half imported at that time.
    import megatron.core

    from . import policy
    from .teachers import Teachers

    figures = (DistillationFigures if distill else LearningFigures)(
        patched=os.environ[VARIABLE] != "0",
        patches="off",
        ranks=torch.distributed.get_world_size(),
        seed=seed,
        backend=torch.distributed.get_backend(),
        versions={
            "megatron_rl_patches": __version__,
            "megatron-core": megatron.core.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    policy.initialize(seed, *sizes)
    teachers = Teachers(Path(folder), seed)
    try:
        if isinstance(figures, DistillationFigures):
            _distill(figures, rollouts, teachers)
        else:
            _learn(figures, rollouts, teachers)
    except AssertionError:  # expected without patches, and then a part of the figures
        if figures.patched:
            raise
        figures.error = traceback.format_exc()
    if figures.patched:
        figures.patches = summary(status(), __version__)
    return figures


def _learn(figures: LearningFigures, count: int, teachers: Teachers) -> None:
    from . import program

    figures.set_memory(teachers.memory())
    figures.logits = program.logits_bytes()
    figures.makes_logits = not any(s.patch == "lean-head" and s.state == "applied" for s in status())
    with _progress(count) as bar:
        for rollout in program.rollouts(count, figures.seed, teachers):
            figures.add(rollout)
            _log(
                bar,
                f"reward {rollout.reward:.3f}  exact match {rollout.exact_match:.3f}  "
                f"reverse KL (nats) {rollout.reverse_kl:.3f}",
            )


def _distill(figures: DistillationFigures, count: int, teachers: Teachers) -> None:
    from . import distillation

    scores = distillation.scores_of_teachers(teachers, figures.seed)
    figures.teachers = {order: round(score, 4) for order, score in scores.items()}
    for target, way in product(distillation.TARGETS, distillation.WAYS):
        with _progress(count) as bar:
            for rollout in distillation.rollouts(count, figures.seed, teachers, target, way):
                figures.add(f"{target}, {way}", rollout)
                results = [
                    f"{order} {rollout.reverse_kl[order]:.3f} nats, score {rollout.score[order]:.3f}"
                    for order in scores
                ]
                _log(bar, f"{target}, {way}: {'  '.join(results)}")


def _progress(count: int) -> tqdm[Any]:
    tqdm.set_lock(threading.RLock())  # tqdm's own is for several processes, and would be left behind
    return tqdm(total=count, unit="rollout", disable=not is_rank_0())


def _log(bar: tqdm[Any], text: str) -> None:
    """Move the progress bar and print a line for a rollout, on rank 0 only."""
    bar.update()
    if not bar.disable:
        bar.write(f"rollout {bar.n:3d}  {text}")
    bar.set_postfix_str(text, refresh=False)
