"""What frameworks need to build models by role: arguments, a provider, a checkpoint.

And what a teacher costs, in a stand-in or in a framework itself. Import it on ranks only, inside
``cpu_backend()``, with one of them on the path.
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.training import checkpointing, global_vars

from megatron_rl_patches.testing import TinyModel
from tests.frameworks import jobs
from tests.frameworks.jobs import SAMPLES, Batches
from tests.frameworks.loss_jobs import Arguments
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes

ITERATION = 7
WEIGHTS = Path(f"iter_{ITERATION:07d}", "mp_rank_00", "model_optim_rng.pt")


def provider(pre_process: bool = True, post_process: bool = True, **unused: Any) -> torch.nn.Module:
    """Draws its weights from the global generators, as real providers do; each model has a config."""
    args = global_vars.get_args()
    return TinyModel(bf16=args.bf16, **(args.tiny_model or {})).provider()


def arguments(**values: Any) -> Arguments:
    """A fresh process' global arguments, installed."""
    args = jobs.arguments(**{"load": None, "model_provider": provider, **values})
    global_vars.set_global_variables(args)
    return args


def process(seed: int = 1234) -> None:
    """What a framework has initialized before it builds a model."""
    TinyModel(seed=seed).initialize()
    torch.manual_seed(seed)
    destroy_num_microbatches_calculator()
    # A global batch that grows with the samples consumed: 2, 4, ... 8.
    init_num_microbatches_calculator(0, [2, 2, 64], 8, tiny_gpt.BATCH, 1)


def slime_model() -> ModuleType:
    return importlib.import_module("slime.backends.megatron_utils.model")


def train(state: Sequence[Any], steps: int, batches: Batches) -> None:
    """One call of slime's ``train`` with ``(model, optimizer, scheduler)``."""
    jobs.train_rollout(slime_model(), state, batches, steps, SAMPLES)


def checkpoints(folder: Path) -> tuple[str, str]:
    """Of a former policy and of a teacher, at the iteration, as the stand-in of Megatron-LM loads them."""
    for seed, name in ((5, "policy"), (6, "teacher")):
        process(seed)
        state = slime_model().setup_model_and_optimizer(arguments())
        # Adam's moments are there from the first step on.
        train(state, 1, Batches())
        model, optimizer, scheduler = state
        consumed = {"consumed_train_samples": ITERATION * SAMPLES, "consumed_valid_samples": 1}
        state_dict = {
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "args": SimpleNamespace(hidden_size=tiny_gpt.HIDDEN, skipped_train_samples=2, **consumed),
            "model": model[0].module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": scheduler.state_dict() | {"num_steps": ITERATION * SAMPLES},
            "rng_state": torch.Generator().manual_seed(99).get_state(),
        }
        (folder / name / WEIGHTS).parent.mkdir(parents=True)
        torch.save(state_dict, folder / name / WEIGHTS)
        (folder / name / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    process()
    return str(folder / "policy"), str(folder / "teacher")


def build_teacher(initialize: Callable[..., Any], args: Any, role: str) -> Any:
    """Build a patched framework's teacher: it costs its weights, is frozen, and leaves no trace."""
    before, bytes_before = globals_of(args), reachable_bytes()
    [chunk], *rest = initialize(args, role)
    assert rest == [None, None, ITERATION]
    weights = sum(parameter.nbytes for parameter in chunk.parameters())
    assert reachable_bytes() - bytes_before == pytest.approx(weights, rel=0.01)
    assert globals_of(args) == before
    assert not chunk.training and not any(p.requires_grad for p in chunk.parameters())
    return chunk


def has_weights(chunk: Any, state_dict: Mapping[str, Any]) -> bool:
    weights = ((name, value) for name, value in chunk.state_dict().items() if torch.is_tensor(value))
    return all(torch.equal(value, state_dict[name]) for name, value in weights)


def globals_of(args: Any) -> dict[str, Any]:
    """All that building and loading a second model must leave alone, as comparable values."""
    return copy.deepcopy(
        {
            "arguments": {name: value for name, value in vars(args).items() if name != "model_type"},
            "random": random.getstate(),
            "torch": torch.get_rng_state().tolist(),
            "tracker": {name: s.tolist() for name, s in get_cuda_rng_tracker().get_states().items()},
            "global batch": get_current_global_batch_size(),
            "rerun": get_rerun_state_machine().state.name,
            "checkpoint version": checkpointing._CHECKPOINT_VERSION,
        }
    )
