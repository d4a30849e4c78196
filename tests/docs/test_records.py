"""Pages show what was measured, recorded and drawn, and what the code says."""

import html
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches.common import messages
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.settings import VARIABLE
from tests.docs import pages
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


# A number with a unit, or in words.
_NUMBER = re.compile(
    r"(\d[\d.,]*)\W{0,3} ?(?:calls|GB|MiB|×|µs|ms|%)|\b(two|three|four|eight|nine|ten) times\b"
)
_LINK = re.compile(r"\]\((?:docs/)?([\w/-]+\.md)[^)]*\)")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_number_is_next_to_a_link_to_the_page_that_has_it(page: str) -> None:
    text, counted = (ROOT / page).read_text("utf-8"), 0
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n(?=- |\| )|\n\n(?! )", prose):
        linked = (DOCS / target for target in _LINK.findall(part))
        texts = [target.read_text("utf-8") for target in linked if target.exists()]
        for number, word in _NUMBER.findall(part):
            counted += 1
            exact = f"{word} times" if word else f"{number} calls" if f"{number} calls" in part else ""
            assert any(exact in text if exact else _has(text, number) for text in texts), (part, number)
    assert counted >= 2


def _has(text: str, number: str) -> bool:
    """Return whether a page has a number that rounds to this one."""
    digits = len(number.partition(".")[2])
    numbers = (float(found) for found in re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")))
    return any(abs(found - float(number.replace(",", ""))) <= 0.5 * 10**-digits + 1e-9 for found in numbers)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_before_and_after_are_of_the_demo(page: str) -> None:
    shown = [block.code for block in pages.blocks(page=page) if "\nrollout  " in block.code]
    recorded = (DOCS / "demo.md").read_text("utf-8")
    rollouts = re.findall("^rollout.*$", "".join(shown), re.MULTILINE)
    assert len(rollouts) > 2 and all(f"\n{line}" in recorded for line in rollouts)
    error = " ".join("".join(shown).split()).partition("AssertionError: ")[2].partition(" be None")[0]
    assert error and error in " ".join(recorded.split())


WRITTEN: dict[str, Any] = runpy.run_path(str(DOCS / "written.py"))


def test_what_code_and_records_write_is_up_to_date() -> None:
    """Tables of frameworks and patches, log lines, messages, and what several pages share."""
    assert [str(page) for page, _ in WRITTEN["stale"]()] == [], "run: make pages"


def test_every_message_has_three_sentences_and_no_other_code_logs() -> None:
    WRITTEN["log_messages"]()  # imports all modules
    for message in messages.messages:
        ends = [text.endswith(".") for text in (message.happened, message.harm, message.remedy)]
        assert ends == [False, True, True], message
    package, logs = Path(messages.__file__).parents[1], r"getLogger|\blog\.(debug|info|warning|error|log)\("
    files = [path for path in package.rglob("*.py") if re.search(logs, path.read_text("utf-8"))]
    logging = {str(path.relative_to(package)) for path in files}
    # The announcer falls back to stderr, and the CPU backend filters a message of Megatron's.
    assert logging == {"common/messages.py", "engine/statuses.py", "testing/cpu_backend.py"}


def _text(svg: str) -> str:
    """Return what can be read in the picture; how it is drawn depends on the version of rich."""
    shown = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return " ".join(html.unescape(" ".join(shown)).split())


def test_the_picture_of_doctor_is_what_it_prints_now() -> None:
    screenshots = runpy.run_path(str(DOCS / "screenshots.py"))
    drawn = (screenshots["IMAGES"] / "doctor.svg").read_text("utf-8")
    assert _text(drawn) == _text(screenshots["doctor"]()), "run: make screenshots"
    assert "unset MEGATRON_RL_PATCHES_STRIKT; export MEGATRON_RL_PATCHES_STRICT=1" in _text(drawn)
    assert str(ROOT) not in drawn and "url(http" not in drawn


@pytest.mark.parametrize("page", sorted(pages.ROOT.glob("docs/quickstart/*.md")), ids=lambda page: page.stem)
def test_a_quickstart_goes_from_the_safest_patch_to_the_default_set_to_all(page: Path) -> None:
    _, _, to_type, *_ = [block.code for block in pages.blocks("bash", page=pages.name_of(page))]
    assert f"{VARIABLE}=reentrant-train" in to_type or f'"{VARIABLE}": "reentrant-train"' in to_type
    shown = re.findall(r"^<!-- written: log \S+ (\S+) -->$", page.read_text("utf-8"), re.MULTILINE)
    assert shown == ["reentrant-train", "1", "all"]


def test_the_table_of_decisions_says_what_is_on_by_default() -> None:
    row = r"^\| .* \| \[([\w-]+)\]\(.*?\).*? \| (yes|no, write `[\w-]+`) \|"
    answers = {"default": "yes", "all": "no, write `all`", "by name": "no, write `{}`"}
    expected = {(n, answers[p.selected_by].format(n)) for n, p in registry.patches().items()}
    assert set(re.findall(row, WRITTEN["decisions"](), re.MULTILINE)) == expected
