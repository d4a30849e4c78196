"""Start the ranks of the demo, run the program on each without and with the patches, and sum up.

Ranks import torch and Megatron themselves, so that this process loads neither.
"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.context import SpawnContext
from typing import Any

from .. import Settings, __version__, apply
from ..common.lazy import require_megatron
from ..common.messages import is_rank_0, log
from ..engine.settings import VARIABLE
from ..engine.statuses import summary
from ..testing import cpu_backend
from ..testing.ranks import RanksFailed, results_of, run_on_ranks

_TRAIN_FUNCTION = "megatron_rl_patches.demo.program:train"
_UPSTREAM_ERROR = "config.no_sync_func must be None"
_PATIENCE_SECONDS = 7 * 24 * 3600.0
_TOKENS, _SIZES = 8192, {"hidden_size": 4096, "vocab_size": 151_936}
_SUMMARY = """
What failed    the second train(): the first left no_sync_func on the config
Fixed by       {fixed_by}
Same numbers   {same}, in rollouts 1 and 2, without and with patches
Reference      {reference} kB on a rank; built like the policy, as frameworks do
               without inference-only, it would take {policy} kB
Logits, loss   {loss[0]} GB as they are, {loss[1]} with lean-loss, {loss[2]} with lean-head:
               the peak on a GPU, estimated for {tokens} tokens, a hidden size of
               {hidden_size} and a vocabulary of {vocab_size}, in bfloat16"""
_NEXT = """Next, in your own job. slime:
  python3 train.py ${MODEL_ARGS[@]} \\
   --train-env-vars '{"MEGATRON_RL_PATCHES": "reentrant-train"}'
verl:
  python3 -m verl.trainer.main_ppo model_engine=megatron \\
  +ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_RL_PATCHES=reentrant-train
Your own loop, if my_rl/model.py has its train():
  export MEGATRON_RL_PATCHES=reentrant-train
  export MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS=my_rl.model:train
  torchrun --nproc-per-node 8 train.py"""


def run_demo(*, rollouts: int, ranks: int, seed: int) -> int:
    """Run the command ``demo`` with its options, and return the exit code: 0, or 1 if a rank failed.

    Progress and results go to stdout, and the ranks' errors to stderr.

    Raises:
        MegatronRLPatchesError: torch or megatron-core is absent.
    """
    require_megatron("the demo")
    _say(f"starting {ranks} rank{'s' * (ranks > 1)}; importing torch and megatron-core takes seconds …")
    started = time.monotonic()
    work = partial(_run, rollouts, seed)
    # Each rank is a new interpreter, in which no patch starts by itself.
    variables = {VARIABLE: "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    try:
        outcome = run_on_ranks(work, ranks, _PATIENCE_SECONDS, variables, SpawnContext())
        results_of(outcome, _PATIENCE_SECONDS)
    except RanksFailed as root_cause:
        print(f"{root_cause}\nthe demo failed: see the root cause above", file=sys.stderr)
        return 1
    print(f"Time           {time.monotonic() - started:.0f} seconds in all\n\n{_NEXT}")
    return 0


def _say(text: str) -> None:
    for line in text.splitlines():
        print(textwrap.fill(line, 78, break_on_hyphens=False), flush=True)


def _run(rollouts: int, seed: int, _: Callable[[], None]) -> None:
    """Run the program on this rank until it fails, then again with the patches; report on rank 0."""
    import torch.distributed

    # Otherwise every rank prints warnings of Megatron and torch about optional packages and deprecated names.
    warnings.simplefilter("ignore")
    log.setLevel(logging.WARNING)  # the line that says what is in place is printed below, in 80 columns
    # A GPU of its own for this rank, or the CPU if there is not one for each.
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with torch.cuda.device(int(os.environ["LOCAL_RANK"])) if has_gpu else cpu_backend():
        torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=60))  # start() knows no GPU
        import megatron.core

        from ..inference.memory.estimate import loss_memory
        from .program import Program, train

        say = _say if is_rank_0() else lambda text: None
        versions = f"megatron-core {megatron.core.__version__}, torch {torch.__version__}"
        say(f"{versions}, Python {sys.version.split()[0]}; {torch.distributed.get_backend()}, seed {seed}")
        say("\nWithout patches, a GPT learns to sort digits, with one train() per rollout:")
        before: list[Any] = []
        try:
            before.extend(_reported(Program(seed), rollouts, say))
            raise RuntimeError("without patches, the second train() did not fail")
        except AssertionError as error:
            if _UPSTREAM_ERROR not in str(error):
                raise
            say(f"rollout {len(before):3d}  train() raises AssertionError: … {_UPSTREAM_ERROR}")
        say("\nThe same program and seed, after megatron_rl_patches.apply():")
        statuses = apply(settings=Settings(train_functions=(_TRAIN_FUNCTION,)))
        say(summary(statuses, __version__))
        program = Program(seed)
        after = list(_reported(program, rollouts, say))
        say(_plot([rollout.reward for rollout in after]))
        policy, reference = (size // 1000 for size in program.memory())
        [fixed_by] = [status.patch for status in statuses if status.target == f"{train.__module__}.train"]
        loss = [f"{size / 1e9:.1f}" for size in loss_memory(_TOKENS, 1.0, _SIZES, "bf16").values()]
        same = "yes" if before == after[:2] else "no"
        sizes = {"tokens": _TOKENS, **_SIZES, "reference": reference, "policy": policy}
        say(_SUMMARY.format(fixed_by=fixed_by, same=same, loss=loss, **sizes))
        torch.distributed.destroy_process_group()


def _reported(program: Any, rollouts: int, say: Callable[[str], None]) -> Iterator[Any]:
    """Yield the rollouts of a run, and report the first two, about ten later ones, and the last."""
    for number, rollout in enumerate(program.learn(rollouts), 1):
        if number in (1, 2, rollouts) or number % -(-rollouts // 10) == 0:
            say(f"rollout {number:3d}  {rollout}")
        yield rollout


def _plot(rewards: Sequence[float]) -> str:
    """Return a plot with a column for each rollout, or for each nth if there are more than 72."""
    rewards = rewards[:: -(-len(rewards) // 72)]
    plot = "\nreward of each rollout"
    for row, label in enumerate(("1.0", "   ", "0.5", "   ", "0.0")):
        blocks = (" ▁▂▃▄▅▆▇█"[min(8, max(0, round(40 * reward) - 32 + 8 * row))] for reward in rewards)
        plot += f"\n{label} │" + "".join(block * (72 // len(rewards)) for block in blocks)
    return plot
