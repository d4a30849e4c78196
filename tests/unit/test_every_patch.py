"""The contract that every patch keeps. A new file in ``patches/`` is under it without a line here."""

import sys

import pytest

import _megatron_rl_patches_startup as startup
from megatron_rl_patches import available
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch, imported

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
def test_a_site_helps_sites_that_help_none(patch: Patch) -> None:
    """Where nothing else is needed, it is not."""
    for site in (site for site in patch.sites if site.helps):
        beside = [each for each in patch.sites if each.framework == site.framework]
        helped = [each for each in beside if each.qualname in site.helps]
        assert helped and not any(each.helps for each in helped)


@pytest.mark.filterwarnings("ignore")  # those of torch and Megatron, which may be imported here first
def test_adapters_that_are_named_as_text_are_there() -> None:
    for site in (site for site in SITES if isinstance(site.adapter, str)):
        assert callable(imported(site.adapter)), site.adapter


def test_the_startup_trigger_knows_every_root() -> None:
    roots = {site.module.partition(".")[0] for site in SITES}
    assert set(startup._ROOTS) == roots
