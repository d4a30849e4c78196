"""Words that readers had to decode do not come back: in pages, in messages, in docstrings of the API."""

import ast
import inspect
import re
from collections.abc import Iterator

from tests.docs import pages
from tests.docs.pages import ROOT

# Say fix, compared with or next to, result, checked, selected by name, patched function.
WORDS = re.compile(
    r"\b(mend\w*|cure[sd]?|beside|verdicts?|judg(?:e[sd]?|ing|e?ments?)|by (?:its|their|his) names?)\b", re.I
)
SITE = re.compile(r"\bsites?\b(?!-)", re.I)
# A sentence that begins with "Of", and a question as the subject of a sentence.
_BEGINNING = r"(?:^|[.:!?|] |^[-*] )"
_QUESTION = r"(?:What|Whether|Who|How) (?![^.?!|\n]*\?)[^.?!|\n]*? (?:is|are|was|tells|says|shows|depends) "
SENTENCES = re.compile(f"{_BEGINNING}(?:Of [a-z`]|{_QUESTION})", re.MULTILINE)
#: Pages on which a site is a place of a patch, or the site of the pages.
OF_SITES = ("docs/adding-a-patch.md", "docs/api/writing-patches.md", "docs/development/", "CONTRIBUTING.md")
_CODE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|`[^`\n]*`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL)


def _prose(text: str) -> str:
    """Return a page without code, comments and addresses; lines of a paragraph are joined."""
    return re.sub(r"(?<=\S)\n(?=[a-z`(*\d])", " ", _CODE.sub("`", text))


def _strings() -> Iterator[tuple[str, str]]:
    """Yield every string of the package that a message may be made of, with its place."""
    for path in [*(ROOT / "megatron_rl_patches").rglob("*.py"), ROOT / "_megatron_rl_patches_startup.py"]:
        tree = ast.parse(path.read_text("utf-8"))
        expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
        for node in constants:
            text = node.value
            if isinstance(text, str) and id(node) not in expressions and " " in text.strip():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_pages() -> None:
    bad = []
    changes = [ROOT / "CHANGELOG.md", *sorted((ROOT / "changelog.d").glob("*.md"))]
    for path in (*pages.paths(), *changes):
        name, prose = pages.name_of(path), _prose(path.read_text("utf-8"))
        found = [*WORDS.finditer(prose), *SENTENCES.finditer(prose)]
        found += [] if name.startswith(OF_SITES) else SITE.finditer(prose)
        bad += [f"{name}: {prose[max(0, m.start() - 30) : m.end() + 30]!r}" for m in found]
    assert not bad, "\n".join(bad)


def test_messages_and_tables() -> None:
    bad = [f"{place}: {text!r}" for place, text in _strings() if WORDS.search(text) or SITE.search(text)]
    assert not bad, "\n".join(bad)


def test_docstrings_of_the_api() -> None:
    bad = []
    for name, value in pages.public_names().items():
        text = inspect.getdoc(value) or ""
        sites = [] if name in ("Patch", "Site", "TargetSource") else SITE.finditer(text)
        bad += [f"{name}: {match[0]!r}" for match in (*WORDS.finditer(text), *sites)]
    assert not bad, "\n".join(bad)
