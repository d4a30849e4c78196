"""Parts of pages that records and the code write: ``python docs/written.py``, or ``make pages``.

A part stands between ``<!-- written: NAME -->`` and ``<!-- end -->``. A test compares all of them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] * (__name__ == "__main__")

import _megatron_rl_patches_startup as startup  # noqa: E402
import megatron_rl_patches  # noqa: E402
from megatron_rl_patches.common.messages import messages  # noqa: E402
from megatron_rl_patches.engine import registry  # noqa: E402
from megatron_rl_patches.engine.patch import Patch  # noqa: E402
from megatron_rl_patches.engine.settings import parse_selection  # noqa: E402
from megatron_rl_patches.engine.statuses import (  # noqa: E402
    ABSENT,
    NOT_CHECKED,
    NOT_NEEDED,
    PATCHED,
    SiteStatus,
    grouped,
    summary,
)
from tests.frameworks.page import FRAMEWORKS, result, runs_on_record  # noqa: E402
from tests.frameworks.verdicts import load  # noqa: E402
from tests.references.pages import fill, places, table  # noqa: E402

PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))

CORE = "megatron-core 0.16.1"
#: What a framework of a quickstart is called in the records, and the sources that its log line is of.
SOURCES = {
    "slime": ("slime", "slime v0.3.1", "Megatron-LM for slime v0.3"),
    "vime": ("vime", "vime main", "Megatron-LM for slime v0.3"),
    "openclaw-rl": ("OpenClaw-RL", "OpenClaw-RL main"),
    "miles": ("miles", "miles main", "Megatron-LM for slime v0.3"),
    "verl": ("verl", "verl main", CORE),
    "nemo-rl": ("NeMo-RL", "NeMo-RL main", CORE),
    "megatron-bridge": ("Megatron-Bridge", "Megatron-Bridge main", CORE),
    "megatron-lm": ("Megatron-LM", "Megatron-LM main"),
    "own-loop": ("", CORE),
}
_QUICKSTARTS = {"vime": "slime", "openclaw-rl": "slime", "miles": "slime"}


def page_with_parts(page: Path) -> str:
    """Return the page with what stands in the records and in the code now."""
    text = page.read_text("utf-8")
    return fill(text, {name: _part(name, page) for name in places(text, "written")}, "written")


def _part(name: str, page: Path) -> str:
    kind, *words = name.split()
    above = "docs/" if page.parent == ROOT else "../" * (len(page.relative_to(ROOT / "docs").parts) - 1)
    return re.sub(r"\]\((?!https?:)", f"]({above}", PARTS[kind](*words))


# --- patches by framework


_records = cache(load)


@cache
def _result(framework: str, patch: str) -> tuple[str, str]:
    return result(_records(), framework, patch)


def patches(*names: str) -> str:
    """Return a table of the patches for the frameworks of a quickstart, each with the word for it and why."""
    rows = []
    for patch in sorted(registry.patches().values(), key=lambda p: (_order(p), p.name)):
        results: dict[str, list[str]] = {}
        for framework in (SOURCES[name][0] for name in names):
            word, text = _result(framework, patch.name)
            results.setdefault(f"{word} ({text})" if text else word, []).append(framework)
        if results.keys() != {ABSENT}:
            texts = [f"{', '.join(of)}: {text}" if len(names) > 1 else text for text, of in results.items()]
            rows.append({**_described(patch), "state": "; ".join(texts)})
    return table(rows)


def _order(patch: Patch) -> int:
    return [*registry.SELECTS].index(patch.selected_by)


def _described(patch: Patch) -> dict[str, str]:
    switch = patch.name if patch.selected_by == "by name" else registry.SELECTS[patch.selected_by]
    return {
        "patch": f"[`{patch.name}`](patches/{patch.name}.md)",
        "what it does": patch.summary,
        "switched on by": f"`{switch}`",
    }


def frameworks() -> str:
    """Return README's table: the patches of each word in a framework, and whether it was run for real."""
    runs, known, rows = runs_on_record(), _records(), []
    for framework in (name for name in FRAMEWORKS if name != "megatron-core"):
        name = framework.lower()
        sources = {one.identity for one in known if one.source.lower().startswith(f"{name} ")}
        suites = {suite for run in runs if run["source"] in sources for suite in run["suites"]}
        ran = "yes" if suites & {"rollouts", "losses"} else "in part" if suites else "no"
        link = (
            f"[{framework}](quickstart/{_QUICKSTARTS.get(name, name)}.md)" if name in SOURCES else framework
        )
        named = {word: _named(framework, word) for word in (PATCHED, NOT_NEEDED, NOT_CHECKED)}
        rows.append({"framework": link, **named, "run for real": ran})
    return table(rows)


def _named(framework: str, word: str) -> str:
    """Return the names of the patches that have the word in the framework."""
    names = [f"`{patch}`" for patch in registry.patches() if _result(framework, patch)[0] == word]
    return "all" if len(names) == len(registry.patches()) else ", ".join(names)


# --- the log line


def log_line(name: str, value: str) -> str:
    """Return the line that rank 0 logs, broken to fit on a page."""
    known = {one.source: one for one in _records()}
    recorded = [grouped(known[source].judged()) for source in SOURCES[name][1:]]
    statuses: list[SiteStatus] = []
    for patch in parse_selection(value)[0]:
        groups = [of.get(patch.name, {}) for of in recorded]
        own = [s for place in _places(patch) for s in next((of[place] for of in groups if place in of), ())]
        if name == "own-loop" and patch.name == "reentrant-train":
            own.append(SiteStatus(patch.name, "my_rl", "my_rl.model.train", "fits", ""))
        statuses += own or [SiteStatus(patch.name, "", "", "absent", "")]
    in_place = [replace(s, state="applied") if s.state == "fits" else s for s in statuses]
    line = summary(in_place, megatron_rl_patches.__version__)
    return f"```text\n{textwrap.fill(line, 74, break_on_hyphens=False)}\n```"


def _places(patch: Patch) -> list[str]:
    return list(dict.fromkeys(site.framework for site in patch.sites))


# --- what several pages share, and the messages


def install() -> str:
    """Return the commands of the page on installing."""
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    return page.partition("<!-- commands -->\n")[2].partition("<!-- end -->\n")[0].strip()


def decisions() -> str:
    """Return README's table of symptoms, for other pages."""
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.search(r"<!-- decisions -->\n\n(.*?)\n\n<!-- end -->", readme, re.DOTALL)
    assert table
    return table[1].replace("](docs/", "](")


def log_messages() -> str:
    """Return a table of everything that this package logs."""
    package = ROOT / megatron_rl_patches.__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in package.rglob("*.py"):
            if "= Message(" in path.read_text("utf-8"):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    shown = [(m.happened, m.harm, m.remedy) for m in messages] + [startup.NOT_ACTIVATED]
    rows = ({"message": f"`{_cell(a)}`", "harmful?": _cell(b), "what to do": _cell(c)} for a, b, c in shown)
    return table(sorted(rows, key=lambda row: row["message"].lstrip("`{").casefold()))


def stand_in() -> str:
    """Return a table of how layers of the stand-in of TransformerEngine differ from local ones."""
    record = json.loads((ROOT / "tests" / "real" / "stand_in.json").read_text("utf-8"))
    layouts: dict[str, dict[str, None]] = {}  # a model's, each once
    differences: dict[str, list[list[str]]] = {}
    for of_release in record.values():
        for name, loss_and_gradients in of_release.items():
            model, layout = re.split(r", (?=(?:1 rank|TP|EP|CP)\b)", name, maxsplit=1)
            layouts.setdefault(model, {})[layout] = None
            differences.setdefault(model, []).append(loss_and_gradients)
    rows = []
    for model, pairs in differences.items():
        loss, gradients = (max(column, key=float) for column in zip(*pairs, strict=True))
        names = "; ".join(layouts[model])
        rows.append({"layers": model, "layouts": names, "loss": loss, "gradients": gradients})
    return f"Releases of megatron-core: {', '.join(record)}.\n\n{table(rows)}"


def _cell(text: str) -> str:
    """Return a text of a message with the names of its values in capital letters."""
    return re.sub(r"\{(\w+)[^}]*\}", lambda value: value[1].upper(), text).replace("|", "\\|")


PARTS = {
    "decisions": decisions,
    "frameworks": frameworks,
    "install": install,
    "log": log_line,
    "messages": log_messages,
    "patches": patches,
    "stand-in": stand_in,
}


def stale() -> Iterator[tuple[Path, str]]:
    """Yield each page whose parts are not those of today, and its text as it should be."""
    for page in PAGES:
        text = page_with_parts(page)
        if text != page.read_text("utf-8"):
            yield page, text


def main(arguments: Sequence[str] = ()) -> None:
    for page, text in stale():
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
