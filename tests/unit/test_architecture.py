"""Who may import whom. Data flows one way; the files are read, not run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_rl_patches"

# Part -> parts that it may import; parts are folders of the package, or modules of it.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "reentry": {"errors"},
    "inference": {"errors", "losses"},
    "losses": {"errors"},
    "testing": {"errors"},
    "demo": {"__init__", "doctor", "engine", "errors", "inference", "losses", "settings", "testing"},
    "engine": {"errors", "settings", "__init__"},
    "patches": {"engine", "errors", "inference", "losses", "reentry", "settings"},
    "activation": {"engine", "settings", "errors"},
    "__init__": {"engine", "settings", "errors"},
    "doctor": {"engine", "settings", "errors", "__init__"},
    "cli": {"engine", "settings", "errors", "doctor", "demo", "inference", "__init__"},
    "__main__": {"cli"},
}
# The engine's own chain: spec <- facts <- judge <- installer; what is named may be imported.
ENGINE: dict[str, set[str]] = {
    "spec": {"facts"},  # for type checking only
    "arguments": set(),
    "sources": set(),
    "facts": set(),
    "judge": {"facts", "sources", "spec"},
    "report": {"judge"},
    "announce": {"report"},
    "layer": {"spec"},
    "placement": {"facts", "layer", "spec"},
    "imports": set(),
    "registry": {"spec"},
    "installer": {"announce", "imports", "judge", "placement", "report", "sources", "spec"},
    "survey": {"judge", "report", "sources", "spec"},
    "api": {"installer", "registry", "report", "sources", "spec", "survey"},
    "ranks": {"api"},
    "__init__": set(),
}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Dotted names, relative to the package, of what a module imports from it."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (".".join((*base, *name.split("."))) for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            yield (node.module or "").removeprefix(PACKAGE.name).lstrip(".") or "__init__"


def _part(dotted: str) -> str:
    part = dotted.split(".")[0]
    known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
    return part if known else "__init__"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path: Path) -> None:
    part = _part(path.relative_to(PACKAGE).with_suffix("").parts[0])
    imported = {_part(name) for name in _imports(path)} - {part}
    assert imported <= ARROWS[part], f"{part} may import {ARROWS[part] or 'nothing'}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").glob("*.py")), ids=lambda path: path.stem)
def test_arrows_within_the_engine(path: Path) -> None:
    imported = {name.split(".")[1] for name in _imports(path) if name.startswith("engine.")} - {path.stem}
    assert imported <= ENGINE[path.stem]


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").glob("*.py")), ids=lambda path: path.stem)
def test_the_engine_has_never_heard_of_megatron(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    assert not [name for name in names if name.split(".")[0] == "megatron"]


def test_one_module_changes_foreign_objects() -> None:
    setters = [p.stem for p in (PACKAGE / "engine").glob("*.py") if "setattr(" in p.read_text()]
    assert setters == ["placement"]


def _loaded_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import megatron_rl_patches", {"torch", "megatron", "wrapt", "typer", "rich"}),
        ("import megatron_rl_patches.testing", {"torch", "megatron", "wrapt"}),
        ("import megatron_rl_patches.testing.pytest_plugin", {"torch", "megatron"}),
        ("import megatron_rl_patches.reentry", {"torch", "megatron", "wrapt"}),
        ("import megatron_rl_patches.inference", {"torch", "megatron", "wrapt", "psutil", "tqdm"}),
        (
            "import megatron_rl_patches as m; m.apply(); m.status(); m.revert()",
            {"torch", "megatron", "typer", "rich"},
        ),
    ],
)
def test_what_importing_does_not_load(statement: str, absent: set[str]) -> None:
    assert not _loaded_after(statement) & absent
