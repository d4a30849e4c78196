"""The contract that every patch keeps. A new file in ``patches/`` is under it without a line here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import _megatron_rl_patches_startup as startup
from megatron_rl_patches import available
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.judge import all_or_nothing
from megatron_rl_patches.engine.patch import Patch, imported
from megatron_rl_patches.engine.statuses import State, status_of

PATCHES = registry.patches()
SITES = [site for patch in PATCHES.values() for site in patch.sites]
#: Sites without a reason against them, which are wanted wherever they are: patch -> target -> frameworks.
WANTED_EVERYWHERE = {
    # It does nothing unless a framework above Megatron is patched, and that is judged by itself.
    "inference-only": {
        "get_model": {"megatron.bridge", "megatron.training"},
        "GPTModelBuilder.build_distributed_models": {"megatron.training"},
        "HybridModelBuilder.build_distributed_models": {"megatron.training"},
        "load_checkpoint": {"megatron.training"},
        "get_megatron_optimizer": {"megatron.core"},
    },
    # Where nothing overflows, it changes nothing, not even a bit.
    "finite-loss": {
        name: {"slime", "vime", "miles"}
        for name in (
            "policy_loss_function",
            "value_loss_function",
            "compute_approx_kl",
            "compute_policy_loss",
        )
    },
    # What they replace holds more memory than it needs in every release.
    "lean-head": {f"{model}Model.forward": {"megatron.core"} for model in ("GPT", "Mamba", "Hybrid")},
    "lean-loss": {
        "calculate_log_probs_and_entropy": {"slime", "vime", "miles"},
        "compute_log_probs": {"slime", "vime"},
        "vocab_parallel_log_probs_from_logits": {"verl"},
        "vocab_parallel_entropy": {"verl"},
        "vocab_parallel_entropy_with_chunking": {"verl"},
    },
    # It changes nothing: it warns of what the configuration of this run says.
    "reentrant-train": {"ActorRolloutRefWorker.update_actor": {"verl"}},
}
TESTS = Path(__file__).parents[1]

by_patch = pytest.mark.parametrize("patch", PATCHES.values(), ids=list(PATCHES))


@by_patch
def test_says_what_it_is_for_in_a_file_with_a_test_file(patch: Patch) -> None:
    stem = patch.name.replace("-", "_")
    assert sys.modules[f"megatron_rl_patches.patches.{stem}"].patch is patch
    assert list(TESTS.rglob(f"test_{stem}.py"))
    assert patch.summary == available()[patch.name] and "\n" not in patch.summary
    assert patch.upstream
    targets = [site.target for site in patch.sites]
    assert len(targets) == len(set(targets))
    assert all("." in site.module for site in patch.sites), "a site in a root package"


def test_a_site_has_a_reason_against_it_or_names_the_sites_that_it_helps() -> None:
    """Without either, it fits any code that has a function of its name; WANTED_EVERYWHERE says why it may."""
    undecided: dict[str, dict[str, set[str]]] = {}
    for site in SITES:
        if not (site.skip_if or site.helps or PATCHES[site.patch].selected_by == "by name"):
            undecided.setdefault(site.patch, {}).setdefault(site.qualname, set()).add(site.framework)
    assert undecided == WANTED_EVERYWHERE


@by_patch
def test_where_nothing_else_is_needed_no_helping_site_is(patch: Patch) -> None:
    for framework in {site.framework for site in patch.sites}:
        sites = [site for site in patch.sites if site.framework == framework]
        mains = {site.qualname for site in sites if not site.helps}
        assert all(set(site.helps) & mains for site in sites if site.helps)
        states: dict[bool, State] = {False: "not needed", True: "drifted"}
        judged = {site: status_of(site, states[bool(site.helps)], "") for site in sites}
        assert {status.state for status in all_or_nothing(judged).values()} == {"not needed"}


@pytest.mark.filterwarnings("ignore")  # those of torch and Megatron, which may be imported here first
def test_adapters_that_are_named_as_text_are_there() -> None:
    for site in (site for site in SITES if isinstance(site.adapter, str)):
        assert callable(imported(site.adapter)), site.adapter


def test_the_startup_trigger_knows_every_root() -> None:
    roots = {site.module.partition(".")[0] for site in SITES}
    assert set(startup._ROOTS) == roots
