"""Code of the documentation: the blocks of its pages, and examples in the docstrings of public names."""

import importlib
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^( *)```(\w*)[^`\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block; ``line`` is that of its first line of code, counted from 1."""

    page: str
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def head(self) -> str:
        """Return the first line that is not empty; tables of exceptions name a block by its beginning."""
        lines = [line.strip() for line in self.code.splitlines()]
        return next((line for line in lines if line), "")


def paths() -> list[Path]:
    outside = [ROOT / name for name in ("README.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*outside, *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _blocks() -> list[Block]:
    found = []
    for path in paths():
        text = path.read_text("utf-8")
        fences = list(_FENCED.finditer(text))
        assert 2 * len(fences) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{path} has an open block"
        for fence in fences:
            line = text.count("\n", 0, fence.start(3)) + 1
            found.append(Block(name_of(path), line, fence[2], textwrap.dedent(fence[3])))
    return found


def blocks(language: str = "", page: str = "") -> list[Block]:
    chosen = [block for block in _blocks() if language in ("", block.language)]
    return [block for block in chosen if page in ("", block.page)]


def inline_code() -> Iterator[tuple[str, str]]:
    """Yield pairs of a page and the code between backticks in its prose."""
    for path in paths():
        for _, code in re.findall(r"(`+)([^\n]+?)\1", path.read_text("utf-8")):
            yield name_of(path), code.strip()


def dotted_names() -> list[str]:
    """Return every ``megatron_rl_patches.…`` on the pages that is no file, and no loss mode of verl."""
    text = "\n".join(path.read_text("utf-8") for path in paths())
    names = set(re.findall(r"\bmegatron_rl_patches(?:\.[A-Za-z_]+)+(?![\w/])", text))
    files = (".py", ".pth", ".git", ".start", ".md", ".patches", "_topk")
    return sorted(name for name in names if not name.endswith(files))


PUBLIC = ("", ".reentry", ".inference", ".losses", ".testing")
_LITERAL = re.compile(r"::\n\n((?:[ ]+.*\n|\n)+)")


def packages() -> list[Any]:
    return [importlib.import_module(f"megatron_rl_patches{name}") for name in PUBLIC]


def public_names() -> dict[str, Any]:
    """Return what the public packages offer."""
    with warnings.catch_warnings():  # names are imported when they are asked for, with torch and Megatron
        warnings.simplefilter("ignore")
        return {name: getattr(package, name) for package in packages() for name in package.__all__}


def examples() -> dict[str, str]:
    """Return the code of each example by the name of the function, class or method that it belongs to."""
    documented = public_names()
    for name, value in public_names().items():
        members = vars(value).items() if isinstance(value, type) else ()
        documented |= {f"{name}.{member}": one for member, one in members if isinstance(one, FunctionType)}
    found = {}
    for name, thing in documented.items():
        for block in _LITERAL.finditer(inspect.cleandoc(thing.__doc__ or "") + "\n"):
            code = textwrap.dedent(block[1])
            if re.search(r"^return ", code, re.MULTILINE):  # the reader's own function ends here
                code = f"def example():\n{textwrap.indent(code, '    ')}\nexample()\n"
            found[name] = code
    return found
