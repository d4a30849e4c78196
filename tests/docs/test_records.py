"""Pages show what was measured, recorded and drawn, and what the code says."""

import html
import re
import runpy
from pathlib import Path
from typing import Any, get_args

import pytest

from docs import claims, plots
from megatron_rl_patches.cli.screens import page_of
from megatron_rl_patches.common import messages
from megatron_rl_patches.engine import registry, statuses
from megatron_rl_patches.engine.settings import VARIABLE
from tests.docs import pages
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


# A number, or two, with a unit; or in words.
_NUMBER = re.compile(
    r"\d[\d.,]*(?: (?:to|and) \d[\d.,]*)? ?(?:calls|[KMG]i?B|kB|bytes|×|[µm]s|seconds|minutes?|%|tokens|ids"
    r"|replicas|billion|TFLOP/s)(?!\w)|\b(?:two|three|four|five|six|seven|eight|nine|ten) (?:times|matrix)\b"
    r"|\b(?:a|one) (?:half|third|quarter|fifth|tenth)\b"
)


def test_every_number_of_the_first_pages_is_that_of_its_record() -> None:
    """Where all claims are taken away, no number with a unit is left."""
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md")]
    prose = re.sub(
        r"^```.*?^```$|<!--.*?-->|\]\([^)]*\)", "", "\n".join(texts), flags=re.MULTILINE | re.DOTALL
    )
    prose = " ".join(re.sub(r"[][*`]", "", prose).split())
    for claim in claims.claims():
        assert claim in prose, claim
        prose = prose.replace(claim, "")
    assert [prose[max(0, m.start() - 60) : m.end() + 20] for m in _NUMBER.finditer(prose)] == []


@pytest.mark.parametrize("draw", ["teacher", "head"])
def test_plots_of_the_first_pages_are_of_the_records(draw: str, tmp_path: Path) -> None:
    name = {"teacher": "teacher_memory", "head": "head_by_vocabulary"}[draw]
    plots.save(getattr(plots, draw)(), tmp_path / "now.svg")
    now, drawn = (path.read_text("utf-8") for path in (tmp_path / "now.svg", DOCS / "images" / f"{name}.svg"))
    assert _text(drawn) == _text(now), "run: make screenshots"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_before_and_after_are_of_the_demo(page: str) -> None:
    shown = [block.code for block in pages.blocks(page=page) if "\nrollout  " in block.code]
    recorded = (DOCS / "demo.md").read_text("utf-8")
    rollouts = re.findall("^rollout.*$", "".join(shown), re.MULTILINE)
    assert len(rollouts) > 2 and all(f"\n{line}" in recorded for line in rollouts)
    error = " ".join("".join(shown).split()).partition("AssertionError: ")[2].partition(" be None")[0]
    assert error and error in " ".join(recorded.split())


NOT_PATCHED = (statuses.NOT_NEEDED, statuses.NOT_CHECKED)
WRITTEN: dict[str, Any] = runpy.run_path(str(DOCS / "written.py"))


def test_what_code_and_records_write_is_up_to_date() -> None:
    """Tables of frameworks and patches, log lines, messages, and what several pages share."""
    assert [str(page) for page, _ in WRITTEN["stale"]()] == [], "run: make pages"


def _rows(page: str, table: str) -> list[dict[str, str]]:
    text = re.split(rf"<!-- \w+: {table}\b.*-->\n", (ROOT / page).read_text("utf-8"))[1].partition("<!--")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", ["AReaL", "NeMo-RL", "verl", "vime"])
def test_a_framework_reads_alike_on_all_pages(name: str) -> None:
    (row,) = (row for row in _rows("docs/compatibility.md", "matrix") if row.pop("framework") == name)
    present = {p: cell if cell in NOT_PATCHED else "patched" for p, cell in row.items() if cell != "absent"}
    (row,) = (r for r in _rows("README.md", "frameworks") if re.match(rf"\[?{name}\b", r["framework"]))
    named = {patch: word for word in ("patched", *NOT_PATCHED) for patch in re.findall("`(.+?)`", row[word])}
    assert named == present and {*NOT_PATCHED} & {*present.values()}
    for page in re.findall(r"docs/quickstart/[\w-]+\.md", row["framework"]):
        state = rf"(?:^|\b{name}\b[\w, -]*: )(patched|{'|'.join(NOT_PATCHED)}) \(\w"  # and releases, or why
        rows = _rows(page, "patches")
        assert {row["patch"].split("`")[1]: re.findall(state, row["state"])[0] for row in rows} == present


def test_commands_have_the_words_of_the_pages() -> None:
    section = (DOCS / "how-it-works.md").read_text("utf-8").partition("## States\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"^\| `([\w ]+)` \|", section, re.MULTILINE)) - {statuses.NOT_CHECKED}
    every = [statuses.SiteStatus(state, "verl", "f", state, "why") for state in get_args(statuses.State)]
    assert {counts.removeprefix("1 ") for _, _, counts in statuses.overview(every)[1:]} == words
    of_check = re.findall(r"\| `f` \| \W*([\w ]*\w)", page_of({"a source": every}))
    assert {*of_check, "absent"} == words


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
