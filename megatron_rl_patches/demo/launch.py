"""Start the ranks of the demo, wait for them, and show the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..doctor import examine_startup
from ..engine.settings import VARIABLE, variable_of
from ..errors import MegatronRLPatchesError
from .figures import FIGURES, DistillationFigures, LearningFigures

_TRAIN_FUNCTION = "megatron_rl_patches.demo.training:train"
# torch's launcher kills ranks that do not end within 30 seconds.
_STOPPING_SECONDS = 40.0

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
    json_file: Path | None,
    plot_file: Path | None,
    without_patches: bool,
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
    environ = {
        # The machine's own name often does not resolve on a laptop without a network.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **os.environ,
        # The patches know the train() of frameworks. The program's own must be named.
        variable_of("train_functions"): _TRAIN_FUNCTION,
        VARIABLE: "0" if without_patches else "all,-lean-head" if without_lean_head else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    startup = examine_startup(environ)
    if not (without_patches or startup.fires):
        raise MegatronRLPatchesError(f"{VARIABLE}=1 has no effect in this environment: {startup.reason}")
    from rich.console import Console

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        options = {"rollouts": rollouts, "seed": seed, "sizes": sizes, "distill": distill, "folder": folder}
        if code := _run_ranks(ranks, {"pid": os.getpid(), **options}, environ):
            print(f"the demo failed with exit code {code}: see the root cause above", file=sys.stderr)
            return 1
        figures = (DistillationFigures if distill else LearningFigures).read(Path(folder, FIGURES))
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


def _run_ranks(ranks: int, options: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run :mod:`.worker` on all ranks and return the exit code of torch's launcher."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"),
        *("--module", "megatron_rl_patches.demo.worker", json.dumps(options)),
    ]
    # The launcher has a session of its own, so that an interrupt from the keyboard reaches this process only.
    # The ranks have sessions of their own too, so only the launcher can end them.
    with subprocess.Popen(command, env=environ, start_new_session=True) as launcher:
        try:
            return launcher.wait()
        finally:
            launcher.terminate()
            try:
                launcher.wait(_STOPPING_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
