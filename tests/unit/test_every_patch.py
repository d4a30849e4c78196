"""The contract that every patch keeps. A new file in ``patches/`` is under it without a line here."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl_patches import Settings, available
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.engine.spec import Patch, Site
from megatron_rl_patches.engine.wrapper import SwitchableWrapper

PATCHES = registry.patches()
SITES = [(patch, site) for patch in PATCHES.values() for site in patch.sites]
TESTS = Path(__file__).parents[1]

by_patch = pytest.mark.parametrize("patch", PATCHES.values(), ids=list(PATCHES))
by_site = pytest.mark.parametrize(("patch", "site"), SITES, ids=[site.target for _, site in SITES])


@by_patch
def test_has_a_file_and_a_test_file_of_its_name(patch: Patch) -> None:
    stem = patch.name.replace("-", "_")
    assert sys.modules[f"megatron_rl_patches.patches.{stem}"].patch is patch
    assert list(TESTS.rglob(f"test_{stem}.py"))


@by_patch
def test_says_what_it_is_for(patch: Patch) -> None:
    assert patch.summary == available()[patch.name] and "\n" not in patch.summary
    assert patch.upstream


@by_patch
def test_targets_are_distinct_and_none_is_in_a_root_package(patch: Patch) -> None:
    targets = [site.target for site in patch.sites]
    assert len(targets) == len(set(targets))
    assert all("." in site.module for site in patch.sites)


def test_the_startup_trigger_knows_every_root() -> None:
    import _megatron_rl_patches_startup as startup

    roots = {site.module.partition(".")[0] for _, site in SITES}
    assert set(startup._ROOTS) == roots


# --- every order of import, apply and revert, on a stand-in with the site's names

ORDERS = sorted(set(itertools.permutations(("import", "apply", "apply", "revert", "revert", "apply"))))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "stand_in.module"
    for name in ("stand_in", "stand_in.module"):
        sys.modules.pop(name, None)


def _write(folder: Path, site: Site) -> None:
    parameters = "".join(f"{name}=None, " for name in site.parameters)
    lines = [f"def {site.qualname.split('.')[-1]}({parameters}**rest): return 'original'"]
    for name in reversed(site.qualname.split(".")[:-1]):
        lines = [f"class {name}:", *textwrap.indent("\n".join(lines), "    ").splitlines()]
    (folder / "stand_in" / "module.py").write_text("\n".join(lines))


@by_site
def test_every_order_wraps_at_most_once_and_restores_identity(
    patch: Patch, site: Site, stand_in: str, tmp_path: Path
) -> None:
    _write(tmp_path, site)
    path = f"{stand_in}.{site.qualname}".split(".")[2:]
    here = Patch("here", "")
    here.sites.append(Site(stand_in, site.qualname, site.adapter, parameters=site.parameters))
    for order in ORDERS:
        sys.modules.pop(stand_in, None)
        engine = installer.Installer()
        engine.announcer.done = True
        for action in order:
            if action == "import":
                importlib.import_module(stand_in)
            elif action == "apply":
                engine.add([here], Settings(), required=True)
            else:
                engine.remove(["here"])
        owner = sys.modules[stand_in]
        for name in path[:-1]:
            owner = getattr(owner, name)
        now = vars(owner)[path[-1]]
        expected = 1 if order[-1] == "apply" or _last(order, "apply") > _last(order, "revert") else 0
        assert _layers(now) == expected, order
        engine.remove(["here"])
        assert _layers(vars(owner)[path[-1]]) == 0, order
        assert vars(owner)[path[-1]] is (now.__wrapped__ if expected else now)


def _last(order: tuple[str, ...], action: str) -> int:
    return len(order) - 1 - order[::-1].index(action)


def _layers(function: object) -> int:
    count = 0
    while type(function) is SwitchableWrapper:
        count, function = count + 1, function.__wrapped__
    return count
