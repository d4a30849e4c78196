"""The judgements of ``reentrant-train``, on code in the shapes that upstream has or may have."""

from __future__ import annotations

import textwrap
from functools import partial

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.reentrant_train import patch

from .judging import judged

verdict = partial(judged, patch)

FITS = ("fits", "has the bug that the patch fixes")


DISABLE = (
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.disable_forward_pre_hook"
)
ENABLE = DISABLE.replace("disable_", "enable_")


def test_disable_as_upstream_has_it_is_needed() -> None:
    source = """
        def disable_forward_pre_hook(self, param_sync: bool = True):
            assert self.use_forward_hook
            for module in self.module.modules():
                self.remove_forward_pre_hook_handles[module].remove()
                del self.remove_forward_pre_hook_handles[module]
            if param_sync:
                self.start_param_sync(force_sync=True)
    """
    assert verdict(DISABLE, source) == FITS


@pytest.mark.parametrize(
    "body",
    [
        "for handle in self.remove_forward_pre_hook_handles.values(): handle.remove()",
        """
            if not self.remove_forward_pre_hook_handles:
                return
            for module in self.module.modules():
                self.remove_forward_pre_hook_handles[module].remove()
        """,
        """
            for module in self.module.modules():
                if module in self.remove_forward_pre_hook_handles:
                    self.remove_forward_pre_hook_handles[module].remove()
        """,
    ],
)
def test_disable_mended_upstream_is_not_needed(body: str) -> None:
    source = "def disable_forward_pre_hook(self, param_sync=True):\n" + textwrap.indent(
        textwrap.dedent(body), "    "
    )
    assert verdict(DISABLE, source)[0] == "not needed"


def test_disable_without_the_parameter_is_drift() -> None:
    source = """
        def disable_forward_pre_hook(self):
            assert self.use_forward_hook
            for module in self.module.modules():
                del self.remove_forward_pre_hook_handles[module]
    """
    assert verdict(DISABLE, source) == ("drifted", "it no longer takes param_sync")


def test_enable() -> None:
    asserting = """
        def enable_forward_pre_hook(self):
            assert self.use_forward_hook
            assert len(self.remove_forward_pre_hook_handles) == 0
    """
    assert verdict(ENABLE, asserting) == FITS
    mended = """
        def enable_forward_pre_hook(self):
            assert self.use_forward_hook
            if self.remove_forward_pre_hook_handles:
                return
    """
    assert verdict(ENABLE, mended)[0] == "not needed"


@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_train_with_the_assertion_is_needed_and_without_it_is_not(framework: str) -> None:
    target = f"{framework}.backends.megatron_utils.model.train"
    needed = """
        def train(rollout_id, model, optimizer, opt_param_scheduler):
            if overlap:
                assert config.no_sync_func is None, "must be None"
                config.no_sync_func = [chunk.no_sync for chunk in model]
    """
    assert verdict(target, needed) == FITS
    guarded = """
        def train(rollout_id, model, optimizer, opt_param_scheduler):
            if overlap and config.no_sync_func is None:
                config.no_sync_func = [chunk.no_sync for chunk in model]
    """
    assert verdict(target, guarded) == FITS  # an exception still leaves everything behind
    mended = (
        guarded
        + """
            try:
                train_one_step(model)
            finally:
                config.no_sync_func = None
    """
    )
    assert verdict(target, mended)[0] == "not needed"


def test_save_is_needed_until_it_restores_the_hooks() -> None:
    target = "slime.backends.megatron_utils.model.save"
    plain = """
        def save(iteration, model, optimizer, opt_param_scheduler):
            disable_forward_pre_hook(model)
            save_checkpoint(model)
            enable_forward_pre_hook(model)
    """
    assert verdict(target, plain) == FITS
    safe = """
        def save(iteration, model, optimizer, opt_param_scheduler):
            disable_forward_pre_hook(model)
            try:
                save_checkpoint(model)
            finally:
                enable_forward_pre_hook(model)
    """
    assert verdict(target, safe)[0] == "not needed"


def test_megatron_save_is_needed_for_the_timer_alone() -> None:
    target = "megatron.training.training.save_checkpoint_and_time"
    source = """
        def save_checkpoint_and_time(iteration, model):
            timers('interval-time').stop()
            force_param_sync(model)
            timers('interval-time', log_level=0).start(barrier=True)
    """
    assert verdict(target, source) == FITS
    source = """
        def save_checkpoint_and_time(iteration, model):
            force_param_sync(model)
    """
    assert verdict(target, source) == ("not needed", "it does not switch forward pre-hooks")


def test_megatron_log_is_needed_while_a_first_iteration_ends_no_interval() -> None:
    target = "megatron.training.training.training_log"
    source = "def training_log(total_loss_dict, iteration, is_first_iteration=False):\n    should_reset = {}"
    assert verdict(target, source.format("not is_first_iteration")) == FITS
    mended = source.format("not is_first_iteration or iteration % args.log_interval == 0")
    assert verdict(target, mended)[0] == "not needed"
    assert verdict(target, "def training_log(total_loss_dict, iteration): pass")[0] == "not needed"  # to 0.15
    assert verdict(target, "def train(): pass")[0] == "not needed"
    assert verdict(target, "def train(): is_first_iteration = True")[0] == "missing"


def test_verl_is_needed_while_it_asserts_once_per_chunk() -> None:
    target = "verl.utils.megatron_utils.register_megatron_training_hooks"
    needed = """
        def register_megatron_training_hooks(model, optimizer):
            for one_model in model:
                if overlap:
                    assert config.no_sync_func is None
    """
    assert verdict(target, needed) == FITS
    mended = """
        def register_megatron_training_hooks(model, optimizer):
            assert config.no_sync_func is None
            for one_model in model:
                pass
    """
    assert verdict(target, mended)[0] == "not needed"


def test_a_verl_that_does_not_install_the_function_yet_has_nothing_to_mend() -> None:
    target = "verl.utils.megatron_utils.register_megatron_training_hooks"
    assert verdict(target, "def get_model(): pass")[0] == "not needed"
    assert verdict(target, "def register(config): config.no_sync_func = None")[0] == "missing"


def test_train_functions_of_unknown_frameworks_are_sites() -> None:
    settings = Settings(train_functions=("fork.backends.model:train", "fork.loop:Trainer.fit"))
    extra = patch.sites_for(settings.options_of(patch))[len(patch.sites) :]
    assert [(site.module, site.qualname, site.framework) for site in extra] == [
        ("fork.backends.model", "train", "fork"),
        ("fork.loop", "Trainer.fit", "fork"),
    ]
