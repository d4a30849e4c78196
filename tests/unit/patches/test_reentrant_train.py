"""The judgements of ``reentrant-train``, on code in the shapes that upstream has or may have."""

from __future__ import annotations

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.reentrant_train import patch

from .judging import assert_judged

DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
TIMED = "megatron.training.training.save_checkpoint_and_time"
LOGS = "megatron.training.training.training_log"
SLIME = "slime.backends.megatron_utils.model"
VERL = "verl.utils.megatron_utils.register_megatron_training_hooks"
FITS = "fits: has the bug that the patch fixes"


HANDLES = "self.remove_forward_pre_hook_handles"
ONE = f"{HANDLES}[module].remove()"
REMOVES = f"for module in self.module.modules(): {ONE}"


@pytest.mark.parametrize(
    ("parameters", "body", "expected"),
    [
        ("self, param_sync: bool = True", f"assert self.use_forward_hook\n    {REMOVES}", FITS),
        ("self, param_sync=True", f"for handle in {HANDLES}.values(): handle.remove()", "not needed"),
        ("self, param_sync=True", f"if not {HANDLES}: return\n    {REMOVES}", "not needed"),
        (
            "self, param_sync=True",
            f"for module in modules:\n        if module in {HANDLES}: {ONE}",
            "not needed",
        ),
        ("self", REMOVES, "drifted: it no longer takes param_sync"),
    ],
)
def test_disable(parameters: str, body: str, expected: str) -> None:
    source = f"def disable_forward_pre_hook({parameters}):\n    {body}"
    assert_judged(patch, f"{DDP}.disable_forward_pre_hook", source, expected)


ENABLE = "def enable_forward_pre_hook(self):\n    assert self.use_forward_hook\n    {}"
ENABLING = f"{DDP}.enable_forward_pre_hook"
TRAIN = """
def train(rollout_id, model, optimizer, opt_param_scheduler):
    if overlap{condition}:
        {asserts}config.no_sync_func = [chunk.no_sync for chunk in model]
"""
GUARDED = TRAIN.format(condition=" and config.no_sync_func is None", asserts="")
CLEARS = """
    try:
        train_one_step(model)
    finally:
        config.no_sync_func = None
"""
SAVE = """
def save(iteration, model, optimizer, opt_param_scheduler):
    disable_forward_pre_hook(model)
    {}
        save_checkpoint(model)
    {}
        enable_forward_pre_hook(model)
"""
TIMED_SAVE = """
def save_checkpoint_and_time(iteration, model):
    force_param_sync(model)
"""
LOG = "def training_log(total_loss_dict, iteration, is_first_iteration=False):\n    should_reset = {}"
VERL_HOOKS = """
def register_megatron_training_hooks(model, optimizer):
    for one_model in model:
        assert config.no_sync_func is None
"""


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        (ENABLING, ENABLE.format(f"assert len({HANDLES}) == 0"), FITS),
        (ENABLING, ENABLE.format(f"if {HANDLES}: return"), "not needed"),
        *(
            (f"{framework}.backends.megatron_utils.model.train", source, expected)
            for framework in ("slime", "vime", "miles")
            for source, expected in (
                (TRAIN.format(condition="", asserts="assert config.no_sync_func is None; "), FITS),
                (GUARDED, FITS),  # an exception still leaves everything behind
                (GUARDED + CLEARS, "not needed"),
            )
        ),
        (f"{SLIME}.save", SAVE.format("if model:", "if model:"), FITS),
        (f"{SLIME}.save", SAVE.format("try:", "finally:"), "not needed"),
        (TIMED, f"{TIMED_SAVE}    timers('interval-time').stop()", FITS),
        (TIMED, TIMED_SAVE, "not needed: it does not switch forward pre-hooks"),
        # The first iteration of a call ends no interval.
        (LOGS, LOG.format("not is_first_iteration"), FITS),
        (LOGS, LOG.format("not is_first_iteration or iteration % args.log_interval == 0"), "not needed"),
        # Up to 0.15.
        (LOGS, "def training_log(total_loss_dict, iteration): pass", "not needed"),
        (LOGS, "def train(): pass", "not needed"),
        (LOGS, "def train(): is_first_iteration = True", "missing"),
        # verl asserts once per chunk; before, it did not install the function.
        (VERL, VERL_HOOKS, FITS),
        (VERL, VERL_HOOKS.replace("for one_model in model", "if model"), "not needed"),
        (VERL, "def get_model(): pass", "not needed"),
        (VERL, "def register(config): config.no_sync_func = None", "missing"),
    ],
)
def test_judgements(target: str, source: str, expected: str) -> None:
    assert_judged(patch, target, source, expected)


def test_train_functions_of_unknown_frameworks_are_sites() -> None:
    settings = Settings(train_functions=("fork.backends.model:train", "fork.loop:Trainer.fit"))
    extra = patch.sites_for(settings.options_of(patch))[len(patch.sites) :]
    assert [(site.module, site.qualname, site.framework) for site in extra] == [
        ("fork.backends.model", "train", "fork"),
        ("fork.loop", "Trainer.fit", "fork"),
    ]
