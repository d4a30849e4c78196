"""Start the ranks, wait for them, show what came out."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..doctor import examine_startup
from ..errors import MegatronRLPatchesError
from ..settings import TRAIN_FUNCTIONS_VARIABLE, VARIABLE
from .figures import FIGURES, DistillationFigures, Figures, LearningFigures

_TRAIN_FUNCTION = "megatron_rl_patches.demo.training:train"
# The launcher gives its ranks 30 seconds before it kills them.
_STOPPING_SECONDS = 40.0

_UPSTREAM_ERROR = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
_EXPECTED = """\
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
) -> int:
    """Run the demo on this machine; progress and figures go to stdout, the ranks' errors to stderr.

    Args:
        rollouts: how often the program samples, scores and calls ``train()``.
        ranks: processes: on GPUs with NCCL if there are as many, else on the CPU with gloo.
        seed: of weights, prompts and sampling.
        tensor_parallel_size: ranks over which the weights and the vocabulary are split.
        pipeline_parallel_size: ranks over which the layers are split. Ranks beyond are replicas.
        distill: in place of reinforcement learning, distil the teachers into a student.
        json_file: where to write :class:`~megatron_rl_patches.demo.figures.Figures`.
        plot_file: where to draw the reward per rollout.
        without_patches: run the same program unpatched, to show the error of its second ``train()``.

    Returns:
        exit code: 0 when the run did what it is to show, which without patches is to fail with that error.

    Raises:
        MegatronRLPatchesError: an extra is not installed, the environment variable has no effect here, or the
            model is not to be split so.
    """
    _require_split(ranks, tensor_parallel_size, pipeline_parallel_size)
    _require(*(["matplotlib"] if plot_file else []))
    environ = _environment(without_patches)
    if not without_patches:
        _require_startup(environ)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        arguments = [
            f"--rollouts={rollouts}",
            f"--seed={seed}",
            f"--tensor-model-parallel-size={tensor_parallel_size}",
            f"--pipeline-model-parallel-size={pipeline_parallel_size}",
            f"--folder={folder}",
            *(["--distill"] if distill else []),
        ]
        code = _run_ranks(ranks, arguments, environ)
        if code != 0:
            print(f"the demo failed with exit code {code}: see the root cause above", file=sys.stderr)
            return 1
        figures = (DistillationFigures if distill else LearningFigures).read(Path(folder, FIGURES))
    figures.seconds = round(time.monotonic() - started, 1)
    _show(figures)
    if json_file:
        figures.write(json_file)
    if plot_file:
        figures.plot(plot_file)
    if without_patches and not _ended_as_upstream_does(figures):
        print("the error of upstream's second train() did not appear", file=sys.stderr)
        return 1
    if without_patches:
        print(_EXPECTED)
    return 0


def _require_split(ranks: int, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    if tensor_parallel_size not in (1, 2, 4) or pipeline_parallel_size not in (1, 2):
        raise MegatronRLPatchesError(
            f"tensor-parallel size {tensor_parallel_size}, pipeline-parallel size {pipeline_parallel_size}: "
            "the demo's model has 4 attention heads and 2 layers, so give 1, 2 or 4, and 1 or 2"
        )
    if ranks % (tensor_parallel_size * pipeline_parallel_size):
        raise MegatronRLPatchesError(
            f"{ranks} ranks are no multiple of tensor-parallel size {tensor_parallel_size} × "
            f"pipeline-parallel size {pipeline_parallel_size}: "
            f"give --ranks {tensor_parallel_size * pipeline_parallel_size}"
        )


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise MegatronRLPatchesError(
            f"the demo needs {' and '.join(missing)}: pip install 'megatron-rl-patches[demo]'"
        )


def _require_startup(environ: Mapping[str, str]) -> None:
    startup = examine_startup(environ)
    if not startup.fires:
        raise MegatronRLPatchesError(f"{VARIABLE}=1 has no effect in this environment: {startup.reason}")


def _environment(without_patches: bool) -> dict[str, str]:
    return {
        # The machine's own name often does not resolve on a laptop without a network.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **os.environ,
        # The program's train() is in no host that the patches know: this is how to name one's own.
        TRAIN_FUNCTIONS_VARIABLE: _TRAIN_FUNCTION,
        VARIABLE: "0" if without_patches else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _run_ranks(ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"),
        *("--module", "megatron_rl_patches.demo.worker"),
        *arguments,
    ]
    # A session of its own: an interrupt from the keyboard comes to us alone, and we stop the ranks once.
    with subprocess.Popen(command, env=environ, start_new_session=True) as launcher:
        try:
            return launcher.wait()
        finally:
            if launcher.poll() is None:
                _stop(launcher)


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Have the launcher end its ranks: they are in sessions of their own, so only it can."""
    launcher.terminate()
    try:
        launcher.wait(_STOPPING_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()


def _show(figures: Figures) -> None:
    from rich.console import Console

    if figures.error:
        print(figures.error, flush=True)
    Console().print(figures.table())


def _ended_as_upstream_does(figures: Figures) -> bool:
    first = figures.steps > 0
    return first and _UPSTREAM_ERROR in (figures.error or "")
