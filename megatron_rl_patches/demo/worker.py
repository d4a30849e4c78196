"""One rank of the demo: a backend for the machine at hand, the program, and its progress on rank 0.

Started by :func:`megatron_rl_patches.demo.run_demo` through ``torch.distributed.run``.
"""

from __future__ import annotations

import argparse
import os
import platform
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from .. import __version__, status
from ..engine.report import summary
from ..settings import VARIABLE
from .figures import FIGURES, DistillationFigures, Figures, LearningFigures

if TYPE_CHECKING:
    from .teachers import Teachers

# A rank that waits longer than this for another waits in vain.
_PATIENCE = timedelta(seconds=60)


@record  # the launcher's last words then hold the traceback of the rank that failed first
def main() -> None:
    """Run this rank; rank 0 writes the figures.

    Without patches a failed assertion is what the run is to show: it goes into the figures.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--distill", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="for figures and checkpoints")
    options = parser.parse_args()
    with _distributed():
        figures = _run(options)
        if torch.distributed.get_rank() == 0:
            figures.write(options.folder / FIGURES)


def _run(options: argparse.Namespace) -> Figures:
    # Before the program's own modules: the patches arm themselves when the first host is imported, and the
    # program's train() must not be half imported by then.
    import megatron.core

    from . import policy, teachers

    figures = (DistillationFigures if options.distill else LearningFigures)(
        patched=os.environ[VARIABLE] != "0",
        patches="off",
        ranks=torch.distributed.get_world_size(),
        seed=options.seed,
        backend=torch.distributed.get_backend(),
        versions={
            "megatron_rl_patches": __version__,
            "megatron-core": megatron.core.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    policy.initialize(options.seed, options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    of_orders = teachers.Teachers(options.folder, options.seed)
    try:
        if isinstance(figures, DistillationFigures):
            _distil(figures, options.rollouts, of_orders)
        else:
            _learn(figures, options.rollouts, of_orders)
    except AssertionError:
        if figures.patched:
            raise
        figures.error = traceback.format_exc()
    if figures.patched:
        figures.patches = summary(status(), __version__)
    return figures


def _learn(figures: LearningFigures, count: int, teachers: Teachers) -> None:
    from . import program

    figures.keep_memory(teachers.memory())
    with _bar(count) as tell:
        for rollout in program.rollouts(count, figures.seed, teachers):
            figures.reward_per_rollout.append(round(rollout.reward, 4))
            figures.solved_per_rollout.append(round(rollout.solved, 4))
            figures.divergence_per_rollout.append(round(rollout.divergence, 4))
            figures.steps += rollout.steps
            tell(
                f"reward {rollout.reward:.3f}  solved {rollout.solved:.3f}  "
                f"nats from teacher {rollout.divergence:.3f}"
            )


def _distil(figures: DistillationFigures, count: int, teachers: Teachers) -> None:
    from . import distillation

    figures.teachers = {
        order: round(score, 4)
        for order, score in distillation.scores_of_teachers(teachers, figures.seed).items()
    }
    for target in distillation.TARGETS:
        nats, scores = ({order: [] for order in figures.teachers} for _ in range(2))  # type: ignore[var-annotated]
        figures.divergence_per_rollout[target], figures.score_per_rollout[target] = nats, scores
        with _bar(count) as tell:
            for rollout in distillation.rollouts(count, figures.seed, teachers, target):
                for order in figures.teachers:
                    nats[order].append(round(rollout.divergence[order], 4))
                    scores[order].append(round(rollout.score[order], 4))
                figures.steps += rollout.steps
                tell(
                    f"{target}: "
                    + "  ".join(
                        f"{order} {nats[order][-1]:.3f} nats, score {scores[order][-1]:.3f}"
                        for order in figures.teachers
                    )
                )


@contextmanager
def _bar(count: int) -> Iterator[Callable[[str], None]]:
    """On rank 0 a progress bar, and a line for each rollout."""
    is_first_rank = torch.distributed.get_rank() == 0
    with tqdm(total=count, unit="rollout", disable=not is_first_rank) as bar:

        def tell(text: str) -> None:
            bar.update()
            if is_first_rank:
                bar.write(f"rollout {bar.n:3d}  {text}")
            bar.set_postfix_str(text, refresh=False)

        yield tell


@contextmanager
def _distributed() -> Iterator[None]:
    """Process group over all ranks: NCCL if each has a GPU, else gloo on the CPU."""
    # Every rank would be told about optional packages and deprecated names, by Megatron and by torch.
    warnings.simplefilter("ignore")
    with _device():
        torch.distributed.init_process_group("nccl", timeout=_PATIENCE)
        yield
        # Not after an exception: an orderly end may wait for a rank that is gone.
        torch.distributed.destroy_process_group()


@contextmanager
def _device() -> Iterator[None]:
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        yield
    else:
        from ..testing import cpu_backend

        with cpu_backend():
            yield


if __name__ == "__main__":
    main()
