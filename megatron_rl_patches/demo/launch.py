"""Start the ranks of the demo, wait for them, and show the results."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from ..doctor import examine_startup
from ..errors import MegatronRLPatchesError
from ..settings import VARIABLE, variable_of
from ..testing.rank_pool import RankPool, Send
from ..testing.ranks import failure
from .figures import DistillationFigures, LearningFigures

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
    from rich.console import Console

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        options = {"rollouts": rollouts, "seed": seed, "sizes": sizes, "distill": distill, "folder": folder}
        # Each rank is a new interpreter, in which the patches start as in any program.
        pool = RankPool(ranks, Path(folder), _run_rank, context=SpawnContext(), env=variables)
        try:
            outcome = pool.run(options, _PATIENCE_SECONDS, once=True)
        finally:
            pool.stop()
    if not outcome.went_well:
        root_cause = failure(outcome, _PATIENCE_SECONDS)
        print(f"{root_cause}\nthe demo failed: see the root cause above", file=sys.stderr)
        return 1
    figures = (DistillationFigures if distill else LearningFigures)(**outcome.sent[0].value)
    figures.seconds = round(time.monotonic() - started, 1)
    if figures.error:
        print(figures.error, flush=True)
    Console().print(figures.table())
    if json_file:
        figures.write(json_file)
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


def _run_rank(options: dict[str, Any], send: Send) -> None:
    from . import worker  # which imports torch, and this process need not

    try:
        figures = worker.run(**options)
    except BaseException:
        send(traceback.format_exc(), True)
    else:
        if figures:
            send(figures, False)
