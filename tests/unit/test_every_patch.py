"""The contract that every patch keeps. A new file in ``patches/`` is under it without a line here."""

from __future__ import annotations

import sys

import pytest

import _megatron_rl_patches_startup as startup
from megatron_rl_patches import available
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.judge import all_or_nothing
from megatron_rl_patches.engine.patch import Patch, imported
from megatron_rl_patches.engine.statuses import State, status_of

PATCHES = registry.patches()
SITES = [site for patch in PATCHES.values() for site in patch.sites]
by_patch = pytest.mark.parametrize("patch", PATCHES.values(), ids=list(PATCHES))


@by_patch
def test_says_what_it_is_for_in_a_file(patch: Patch) -> None:
    stem = patch.name.replace("-", "_")
    assert sys.modules[f"megatron_rl_patches.patches.{stem}"].patch is patch
    assert patch.summary == available()[patch.name] and "\n" not in patch.summary
    assert patch.upstream
    targets = [site.target for site in patch.sites]
    assert len(targets) == len(set(targets))
    assert all("." in site.module for site in patch.sites), "a site in a root package"


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
