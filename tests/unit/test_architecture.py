"""Who may import whom, and how long things are, by files that are read, not run; the API as users type it."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_rl_patches"

# Part -> parts that it may import; parts are folders of the package, or modules of it.
HELPERS = {"common", "errors"}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "common": {"errors"},
    "reentry": HELPERS,
    "inference": {*HELPERS, "losses", "reentry"},
    "losses": HELPERS,
    "frameworks": {*HELPERS, "engine", "inference", "losses", "reentry"},
    # Mocks behave as the patched classes do while a patch is applied, with its options.
    "testing": {*HELPERS, "__init__", "engine", "reentry"},
    "demo": {*HELPERS, "__init__", "doctor", "engine", "inference", "losses", "testing"},
    "engine": {"common", "errors"},
    "patches": {*HELPERS, "engine", "frameworks", "inference", "losses", "reentry"},
    "hooks": {"engine"},
    "__init__": {"common", "engine", "errors"},
    "doctor": {"common", "engine", "errors", "__init__"},
    "cli": {"common", "engine", "errors", "doctor", "demo", "inference", "__init__"},
    "__main__": {"cli"},
}
# The same within the engine; what only type checkers import counts too.
ENGINE: dict[str, set[str]] = {
    "__init__": set(),
    "call": set(),
    "patch": {"call", "target_source"},
    "sources": set(),
    "statuses": {"patch"},
    "target_source": set(),
    "registry": {"patch"},
    "settings": {"patch", "registry"},
    "judge": {"patch", "settings", "sources", "statuses", "target_source"},
    "wrapper": {"call", "patch"},
    "records": {"call", "judge", "patch", "sources", "statuses", "target_source", "wrapper"},
    "installer": {"call", "judge", "patch", "records", "registry", "settings", "statuses"},
    "api": {"installer", "judge", "records", "registry", "settings", "sources", "statuses"},
}

# The file that Python runs at the start of an interpreter. It imports one module of the package, by name, and
# these parts of the package import it: the one circle, which is closed at the first import of a framework.
STARTUP = ROOT / "_megatron_rl_patches_startup.py"
STARTS = "megatron_rl_patches.engine.api"
IMPORTERS_OF_STARTUP = {"doctor", "engine", "hooks"}

# The most lines that parts of the package may have together, that all of it may have, and folders beside it.
# What is new takes the place of something old: a commit lowers a number or leaves it.
LINES = {
    ("__init__", "__main__", "errors"): 90,
    ("common",): 472,
    ("hooks",): 100,
    ("engine",): 2_080,
    ("patches",): 1_300,
    ("frameworks",): 2_400,
    ("reentry",): 1_950,
    ("inference",): 3_550,
    ("losses",): 6_410,
    ("testing",): 3_550,
    ("cli", "doctor"): 880,
    ("demo",): 360,
}
LINES_IN_ALL, MODULES_IN_ALL = 23_000, 145
BESIDE = {"tests": 33_247, "benchmarks": 3_300}


MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, and of what it imports from a module, ``module.name``."""
    folder = path.relative_to(ROOT).parent.parts
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _imports_within(path: Path) -> set[str]:
    """Dotted names, relative to the package, of the modules that a module imports, or imports names from."""
    found = set()
    for name in _imports(path):
        root, *parts = name.split(".")
        if root == PACKAGE.name:
            file = PACKAGE.joinpath(*parts)
            is_module = file.is_dir() or file.with_suffix(".py").exists()
            found.add(".".join(parts if is_module else parts[:-1]) or "__init__")
    return found


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def _part(dotted: str) -> str:
    return dotted.partition(".")[0]


def test_arrows_point_one_way() -> None:
    wrong = {}
    for path in MODULES:
        part = _part(_dotted(path))
        if extra := set(map(_part, _imports_within(path))) - {part} - ARROWS[part]:
            wrong[str(path.relative_to(PACKAGE))] = extra
    for path in (PACKAGE / "engine").glob("*.py"):
        imported = {name.split(".")[1] for name in _imports_within(path) if name.startswith("engine.")}
        if extra := imported - {path.stem} - ENGINE[path.stem]:
            wrong[path.stem] = extra
    assert wrong == {}, "these imports point the wrong way; see ARROWS and ENGINE"


def test_the_startup_file_imports_one_module_of_the_package() -> None:
    strings = {str(node.value) for node in _nodes(STARTUP) if isinstance(node, ast.Constant)}
    assert {text for text in strings if re.fullmatch(rf"{PACKAGE.name}(\.\w+)+", text)} == {STARTS}
    assert not [name for name in _imports(STARTUP) if _part(name) == PACKAGE.name]
    at_module_level = ast.parse(STARTUP.read_text()).body
    assert not [node for node in at_module_level if isinstance(node, (ast.Import, ast.ImportFrom))]
    importers = {_part(_dotted(path)) for path in MODULES if STARTUP.stem in map(_part, _imports(path))}
    assert importers == IMPORTERS_OF_STARTUP


def test_lines_stay_within_their_budgets() -> None:
    counted = dict.fromkeys(ARROWS, 0)
    for path in MODULES:
        counted[_part(_dotted(path))] += len(path.read_text().splitlines())
    assert sorted(counted) == sorted(part for parts in LINES for part in parts)
    now: dict[Any, int] = {parts: sum(counted[part] for part in parts) for parts in LINES}
    assert {parts: (now[parts], most) for parts, most in LINES.items() if now[parts] > most} == {}
    assert sum(now.values()) <= LINES_IN_ALL and len(MODULES) <= MODULES_IN_ALL
    for folder, most in BESIDE.items():
        lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
        assert lines <= most, folder


# Functions may have so many lines without their docstring, and so many parameters; modules so many lines.
MOST_LINES, MOST_PARAMETERS, MOST_IN_MODULE = 60, 8, 350
MOST_IN_A_LOSS = 430  # formula, statistic and gradient stand on one page
# Public functions whose parameters are the options of one dataclass, or of the command line.
OF_ONE_DATACLASS = {
    *("vocab_parallel_log_probs", "vocab_parallel_log_probs_and_entropy", "forward_topk"),
    "vocab_parallel_log_probs_at",
    *("full_vocabulary_divergence", "make_loss_func", "make_distillation_loss_func"),
    *("SequenceLayout.build", "estimate", "estimate_memory"),
    *("DotProductAttention.__init__", "LinearBase.__init__"),  # TransformerEngine's, which Megatron passes
}


def test_functions_and_modules_stay_short() -> None:
    wrong: dict[str, object] = {}
    for path in MODULES:
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        most = MOST_IN_A_LOSS if name.startswith("losses/vocab/") else MOST_IN_MODULE
        if (count := len(text.splitlines())) > most:
            wrong[name] = count
        for qualname, node in _functions(ast.parse(text)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = [name for name in parameters if name not in ("self", "cls")]
            if lines > MOST_LINES or (len(parameters) > MOST_PARAMETERS and qualname not in OF_ONE_DATACLASS):
                wrong[f"{name}:{qualname}"] = lines, parameters
    assert wrong == {}


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def test_no_circle_of_imports() -> None:
    """What only type checkers import counts, too."""
    graph = {_dotted(path): _imports_within(path) for path in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_engine_and_the_frameworks_keep_apart() -> None:
    """One module of the engine changes foreign objects, and none has ever heard of Megatron."""
    known = {name for path in (PACKAGE / "frameworks").glob("*.py") for name in _imports_within(path)}
    of_engine = {name for name in known if name.startswith("engine")}
    assert of_engine == {"engine.call", "engine.settings", "engine.wrapper"}
    engine = [*(PACKAGE / "engine").glob("*.py")]
    assert not [path for path in engine if "megatron" in map(_part, _imports(path))]
    assert [path.stem for path in engine if "setattr(" in path.read_text()] == ["records"]


def test_cores_name_no_framework() -> None:
    """Comments and docstrings may name a source; code and its messages may not."""
    names = re.compile(r"\b(slime|vime|miles|verl|nemo_rl|areal)\b")
    for path in [
        path for core in ("losses", "inference", "reentry") for path in (PACKAGE / core).rglob("*.py")
    ]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        assert not names.search(ast.unparse(tree)), path


# --- benchmarks and tests


#: Folder -> what it may not import, with the exception of ``tests.references``.
APART = {"tests": "benchmarks", "benchmarks": "tests", "tests/references": "tests"}


def test_benchmarks_and_tests_share_references_alone() -> None:
    wrong = set()
    for folder, other in APART.items():
        for path in (ROOT / folder).rglob("*.py"):
            imports = _imports(path) if other in path.read_text() else ()  # most need not be parsed
            others = (name for name in imports if not name.startswith("tests.references."))
            wrong |= {(path, name) for name in others if _part(name) == other}
    assert wrong == set(), "what both need belongs into tests/references"


PARTS = ("engine.settings", "inference", "reentry", "testing")
IMPORTS = "".join(f"import megatron_rl_patches.{part}; " for part in PARTS)
SETTINGS = "megatron_rl_patches.engine.settings.Settings.from_environment()"
NEVER = {"torch", "megatron", "typer", "rich"}
UNLOADED = {
    f"{IMPORTS}{SETTINGS}": {*NEVER, "wrapt", "psutil", "tqdm"},
    "import megatron_rl_patches as m; m.apply(); m.status(); m.revert()": NEVER,
    "from megatron_rl_patches.testing import *": {"megatron"},
}


def test_what_importing_does_not_load() -> None:
    for statement, absent in UNLOADED.items():
        script = f"import sys\n{statement}\nprint(*{{module.partition('.')[0] for module in sys.modules}})"
        loaded = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=ROOT, timeout=60)
        assert not absent & {*loaded.split()}, statement


API = Path(__file__).parents[1] / "typing" / "api.py"


@pytest.mark.parametrize("package", ["", ".losses", ".inference", ".reentry", ".testing", ".hooks"])
def test_every_public_name_is_used(package: str) -> None:
    text = API.read_text().partition("\nModel = ")[2]  # after the imports
    names = set(import_module(f"megatron_rl_patches{package}").__all__)
    assert names - {"__version__"} <= set(re.findall(r"\w+", text))
