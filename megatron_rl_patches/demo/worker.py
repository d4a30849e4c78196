"""One rank of the demo: a backend for the machine at hand, the program, and its progress on rank 0.

Started by :func:`megatron_rl_patches.demo.run_demo` through ``torch.distributed.run``.
"""

from __future__ import annotations

import argparse
import os
import platform
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from .. import __version__, status
from ..engine.report import summary
from ..settings import VARIABLE
from .figures import FIGURES, Figures

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

    from . import policy, program, teachers

    count, seed = options.rollouts, options.seed
    figures = _no_figures_yet(seed, megatron.core.__version__)
    rank = torch.distributed.get_rank()
    policy.initialize(seed, options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    teacher = teachers.Teachers(options.folder, seed)
    figures.keep_memory(teacher.memory())
    try:
        with tqdm(total=count, unit="rollout", disable=rank != 0) as bar:
            for number, rollout in enumerate(program.rollouts(count, seed, teacher), 1):
                figures.reward_per_rollout.append(round(rollout.reward, 4))
                figures.solved_per_rollout.append(round(rollout.solved, 4))
                figures.divergence_per_rollout.append(round(rollout.divergence, 4))
                figures.steps += rollout.steps
                told = (
                    f"reward {rollout.reward:.3f}  solved {rollout.solved:.3f}  "
                    f"nats from teacher {rollout.divergence:.3f}"
                )
                if rank == 0:
                    bar.write(f"rollout {number:3d}  {told}")
                bar.set_postfix_str(told, refresh=False)
                bar.update()
    except AssertionError:
        if figures.patched:
            raise
        figures.error = traceback.format_exc()
    if figures.patched:
        figures.patches = summary(status(), __version__)
    return figures


def _no_figures_yet(seed: int, megatron_core: str) -> Figures:
    return Figures(
        patched=os.environ[VARIABLE] != "0",
        patches="off",
        ranks=torch.distributed.get_world_size(),
        seed=seed,
        backend=torch.distributed.get_backend(),
        versions={
            "megatron_rl_patches": __version__,
            "megatron-core": megatron_core,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


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
