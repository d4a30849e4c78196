"""Start the ranks of the demo, run a program on each, and show the results.

What a rank needs is imported there: this process need not load torch, and in a rank the patches start at the
first import of a framework, at which time the program's ``train()`` must not be half imported.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tqdm import tqdm

from .. import __version__, status
from ..common.ranks import is_rank_0
from ..doctor import examine_startup
from ..engine.announce import summary
from ..engine.settings import VARIABLE, variable_of
from ..errors import MegatronRLPatchesError
from ..testing import RanksFailed, cpu_backend
from ..testing.ranks import call_on_ranks
from .figures import DistillationFigures, Figures, LearningFigures

if TYPE_CHECKING:
    from .teachers import Teachers

_TRAIN_FUNCTION = "megatron_rl_patches.demo.training:train"
_PATIENCE_SECONDS = 7 * 24 * 3600.0

_UPSTREAM_ERROR = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
_EXPLANATION = """\
This is what the patches are for. The first train() left the model's own no_sync_func on the model's config;
the second takes it for a custom one and refuses. With MEGATRON_RL_PATCHES=1 in its environment, and its
train() named in MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS, the same program runs to the end:
megatron-rl-patches demo"""


def run_demo(
    *,
    rollouts: int,
    ranks: int,
    seed: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    distill: bool = False,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    without_patches: bool = False,
    without_lean_head: bool = False,
) -> int:
    """Run the demo on this machine, with progress and results on stdout and the ranks' errors on stderr.

    The parameters are the options of the command ``megatron-rl-patches demo``.

    Returns:
        The exit code: 0 if the run succeeded, which without patches means that it failed with the error of
        upstream's second ``train()``.

    Raises:
        MegatronRLPatchesError: the sizes do not fit the model, or the environment variable has no effect in
            this environment.
    """
    _check_sizes(ranks, tensor_parallel_size, pipeline_parallel_size)
    variables = {
        # The patches know the train() of frameworks. The program's own must be named.
        variable_of("train_functions"): _TRAIN_FUNCTION,
        VARIABLE: "0" if without_patches else "all,-lean-head" if without_lean_head else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    startup = examine_startup({**os.environ, **variables})
    if not (without_patches or startup.fires):
        raise MegatronRLPatchesError(f"{VARIABLE}=1 has no effect in this environment: {startup.reason}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        program = partial(_run_program, rollouts, seed, sizes, distill, folder)
        context = SpawnContext()  # each rank is a new interpreter, in which patches start as in any program
        try:
            figures, *_ = call_on_ranks(program, ranks, Path(folder), _PATIENCE_SECONDS, variables, context)
        except RanksFailed as root_cause:
            print(f"{root_cause}\nthe demo failed: see the root cause above", file=sys.stderr)
            return 1
    figures.seconds = round(time.monotonic() - started, 1)
    if figures.error:
        print(figures.error, flush=True)
    Console().print(figures.table())
    if json_file:
        json_file.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    if plot_file:
        figures.plot(plot_file)
    if without_patches:
        if figures.steps == 0 or _UPSTREAM_ERROR not in (figures.error or ""):
            print("the error of upstream's second train() did not appear", file=sys.stderr)
            return 1
        print(_EXPLANATION)
    return 0


def _check_sizes(ranks: int, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    if tensor_parallel_size not in (1, 2, 4) or pipeline_parallel_size not in (1, 2):
        raise MegatronRLPatchesError(
            f"tensor-parallel size {tensor_parallel_size}, pipeline-parallel size {pipeline_parallel_size}: "
            "the demo's model has 4 attention heads and 2 layers, so pass 1, 2 or 4, and 1 or 2"
        )
    if ranks % (size := tensor_parallel_size * pipeline_parallel_size):
        raise MegatronRLPatchesError(
            f"{ranks} ranks are no multiple of tensor-parallel size {tensor_parallel_size} × "
            f"pipeline-parallel size {pipeline_parallel_size}: pass --ranks {size}"
        )


# --- on each rank


def _run_program(rollouts: int, seed: int, sizes: Sequence[int], distill: bool, folder: str) -> Figures:
    """Run a program on this rank, report progress on rank 0, and return the figures."""
    import torch.distributed

    # Otherwise every rank prints warnings of Megatron and torch about optional packages and deprecated names.
    warnings.simplefilter("ignore")
    # A GPU of its own for this rank, or the CPU if there is not one for each.
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with torch.cuda.device(int(os.environ["LOCAL_RANK"])) if has_gpu else cpu_backend():
        torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=60))
        import megatron.core

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
        from . import policy, teachers

        policy.initialize(seed, *sizes)
        pool = teachers.Teachers(Path(folder), seed)
        try:
            if isinstance(figures, DistillationFigures):
                _distill(figures, rollouts, pool)
            else:
                _learn(figures, rollouts, pool)
        except AssertionError:  # expected without patches, and then a part of the figures
            if figures.patched:
                raise
            figures.error = traceback.format_exc()
        if figures.patched:
            figures.patches = summary(status(), __version__)
        # Skipped after an exception, since it may wait for a rank that has exited.
        torch.distributed.destroy_process_group()
        return figures


def _learn(figures: LearningFigures, count: int, teachers: Teachers) -> None:
    from . import program

    figures.set_memory(teachers.memory())
    figures.logits = program.logits_bytes()
    figures.makes_logits = not any(s.patch == "lean-head" and s.state == "applied" for s in status())
    for rollout in _with_progress(program.learn(count, figures.seed, teachers), count):
        figures.add(rollout)


def _distill(figures: DistillationFigures, count: int, teachers: Teachers) -> None:
    from . import program

    scores = program.scores_of_teachers(teachers, figures.seed)
    figures.teachers = {order: round(score, 4) for order, score in scores.items()}
    for target, way in product(program.TARGETS, program.WAYS):
        name, rollouts = f"{target}, {way}", program.distill(count, figures.seed, teachers, target, way)
        for rollout in _with_progress(rollouts, count, f"{name}: "):
            figures.add(name, rollout)


def _with_progress(rollouts: Iterator[Any], count: int, prefix: str = "") -> Iterator[Any]:
    """Yield the rollouts; move a progress bar and print a line for each, on rank 0 only."""
    tqdm.set_lock(threading.RLock())  # tqdm's own is for several processes, and would be left behind
    with tqdm(total=count, unit="rollout", disable=not is_rank_0()) as bar:
        for rollout in rollouts:
            yield rollout
            bar.update()
            if not bar.disable:
                bar.write(f"rollout {bar.n:3d}  {prefix}{rollout}")
