"""Start the ranks of the demo, run the program on each, and say what happens.

What a rank needs is imported there: this process need not load torch, and in a rank the patches start at the
first import of a framework, at which time the program's ``train()`` must not be half imported.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.context import SpawnContext

from ..common.lazy import require_megatron
from ..common.messages import is_rank_0
from ..doctor import examine_startup
from ..engine.settings import VARIABLE, variable_of
from ..errors import MegatronRLPatchesError
from ..testing import cpu_backend
from ..testing.ranks import RanksFailed, results_of, run_on_ranks

_say: Callable[[str], None] = partial(print, flush=True)
_TRAIN_FUNCTION = "megatron_rl_patches.demo.program:train"
_PATIENCE_SECONDS = 7 * 24 * 3600.0
_UPSTREAM_ERROR = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
_EXPLANATION = """
This is what the patches are for. The first train() left the model's own
no_sync_func on the model's config; the second takes it for a custom one and
refuses. With MEGATRON_RL_PATCHES=1 in its environment, and its train() named
in MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS, the same program runs to the end:
megatron-rl-patches demo"""


def run_demo(*, rollouts: int, ranks: int, seed: int, without_patches: bool = False) -> int:
    """Run the command ``demo`` with its options, and return the exit code.

    Progress and results go to stdout, and the ranks' errors to stderr. The code is 0 if the run succeeded,
    which without patches means that it failed with the error of upstream's second ``train()``.

    Raises:
        MegatronRLPatchesError: torch or megatron-core is absent, or the environment variable has no effect.
    """
    require_megatron("the demo")
    variables = {
        # The patches know the train() of frameworks. The program's own must be named.
        variable_of("train_functions"): _TRAIN_FUNCTION,
        VARIABLE: "0" if without_patches else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    startup = examine_startup({**os.environ, **variables})
    if not (without_patches or startup.fires):
        raise MegatronRLPatchesError(f"{VARIABLE}=1 has no effect in this environment: {startup.reason}")
    _say(f"starting {ranks} rank{'s' if ranks > 1 else ''} with {VARIABLE}={variables[VARIABLE]}")
    _say("importing torch and megatron-core takes 5 to 30 seconds …")
    started = time.monotonic()
    program = partial(_run_program, rollouts, seed)
    context = SpawnContext()  # each rank is a new interpreter, in which patches start as in any program
    try:
        outcome = run_on_ranks(program, ranks, _PATIENCE_SECONDS, variables, context)
        error, *_ = results_of(outcome, _PATIENCE_SECONDS)
    except RanksFailed as root_cause:
        print(f"{root_cause}\nthe demo failed: see the root cause above", file=sys.stderr)
        return 1
    if not without_patches:
        _say(f"{rollouts} rollouts, one train() call each: {time.monotonic() - started:.0f} seconds in all")
        return 0
    _say(error or "")
    if _UPSTREAM_ERROR not in (error or ""):
        print("the error of upstream's second train() did not appear", file=sys.stderr)
        return 1
    _say(_EXPLANATION)
    return 0


def _run_program(rollouts: int, seed: int, start: Callable[[], None]) -> str | None:
    """Run the program on this rank and report progress on rank 0; return the error that patches avoid.

    ``start`` is not called: the program initializes ``torch.distributed`` itself.
    """
    import torch.distributed

    # Otherwise every rank prints warnings of Megatron and torch about optional packages and deprecated names.
    warnings.simplefilter("ignore")
    # A GPU of its own for this rank, or the CPU if there is not one for each.
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with torch.cuda.device(int(os.environ["LOCAL_RANK"])) if has_gpu else cpu_backend():
        torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=60))
        import megatron.core

        from .program import Program

        say = _say if is_rank_0() else lambda line: None
        versions = f"megatron-core {megatron.core.__version__}, torch {torch.__version__}"
        say(f"{versions}, Python {platform.python_version()}; {torch.distributed.get_backend()}, seed {seed}")
        say("building a GPT that learns, and a reference that scores; the first rollout …")
        error = None
        try:
            program = Program(seed)
            for number, rollout in enumerate(program.learn(rollouts), 1):
                say(f"rollout {number:3d}  {rollout}")
            say(program.memory())
        except AssertionError as raised:
            if os.environ[VARIABLE] != "0":
                raise
            place = traceback.extract_tb(raised.__traceback__)[-1]
            error = f"{place.filename}, line {place.lineno}, in {place.name}\nAssertionError: {raised}"
        # Skipped after an exception, since it may wait for a rank that has exited.
        torch.distributed.destroy_process_group()
        return error
