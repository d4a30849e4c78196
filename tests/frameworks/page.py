"""``docs/compatibility.md``, from what is on record: verdicts, runs, and models."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.statuses import ABSENT, NOT_CHECKED, NOT_NEEDED, PATCHED
from tests.frameworks import verdicts
from tests.frameworks.checkouts import REPOSITORIES
from tests.frameworks.verdicts import Known
from tests.real import matrix as models
from tests.recording import Run
from tests.references.pages import fill
from tests.references.pages import table as markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RUNS = Path(__file__).with_name("runs.json")
#: What ``pytest --record-models`` wrote: layers -> release -> promise -> "MODEL, LAYOUT" that passed.
MODELS = Path(__file__).parents[1] / "real" / "models.json"

#: Frameworks in the order of the page.
FRAMEWORKS = (
    *("slime", "vime", "OpenClaw-RL", "miles", "verl", "Megatron-LM", "megatron-core", "Megatron-Bridge"),
    *("NeMo-RL", "AReaL"),
)
_LAYERS = {"local": "local", "transformer_engine": "TransformerEngine's"}
CORE = "megatron-core"
#: Patches from which a framework gains nothing, also if they are in place in megatron-core, and why.
WITHOUT_USE = {
    ("verl", "inference-only"): "it builds references without DDP itself",
    ("NeMo-RL", "lean-head"): "it takes hidden states from the model, and computes in chunks itself",
    ("NeMo-RL", "lean-loss"): "it computes log-probs in chunks itself",
    ("AReaL", "lean-head"): "its own functions read the values of the logits, which are materialized then",
    ("AReaL", "lean-loss"): "it computes log-probs in chunks itself",
    ("AReaL", "reentrant-train"): "it sets up the model's functions once, and never switches the hooks off",
}


def page_of_records() -> str:
    """Return the page as it is, with what is on record now in each of its places."""
    table, of_models = verdicts.load(), json.loads(MODELS.read_text())
    releases = ", ".join(release for release in of_models["local"] if not release.startswith(_MAIN))
    main = next(f"Megatron-LM's {release}" for release in of_models["local"] if release.startswith(_MAIN))
    parts = {
        "matrix": markdown_table(_matrix_rows(table)),
        "sources": markdown_table(_source_rows(table, runs_on_record())),
        "left alone": markdown_table(_left_alone(table)),
        "releases": f"The releases are megatron-core {releases}; hybrid models ran on {main}, too.",
        "models": markdown_table(_model_rows(of_models)),
    }
    return fill(PAGE.read_text(), parts, "recorded")


def runs_on_record() -> list[Run]:
    recorded: list[Run] = json.loads(RUNS.read_text())
    return recorded


# --- which patch fits which framework


def result(table: Sequence[Known], framework: str, patch: str) -> tuple[str, str]:
    """Return the word of all tables for a patch in a framework, and the releases or the reason.

    Releases are ``v0.2.2 to main``, ``up to v0.2.3`` or one, or those of megatron-core under the framework.
    """
    if why := WITHOUT_USE.get((framework, patch)):
        return NOT_NEEDED, why
    word, text = _of_its_own(table, framework, patch)
    of_core, releases = _of_its_own(table, CORE, patch)
    if word in (ABSENT, NOT_NEEDED) and framework != CORE and of_core == PATCHED:
        return PATCHED, f"{CORE} {releases}"
    return word, text


def _of_its_own(table: Sequence[Known], framework: str, patch: str) -> tuple[str, str]:
    releases = _releases(table, framework)
    words = {release: _word(one, patch) for release, one in releases.items()}
    if patched := [release for release, word in words.items() if word == PATCHED]:
        return PATCHED, _range(patched, list(releases))
    word, last = next(
        ((words[r], releases[r]) for r in reversed(words) if words[r] != ABSENT), (ABSENT, None)
    )
    newer = "the patch is newer than the record"
    return word, newer if word == NOT_CHECKED else _reason(last, patch) if last else ""


def _releases(table: Sequence[Known], framework: str) -> dict[str, Known]:
    """Return the releases of a framework from the oldest to ``main``; pins of other frameworks are none."""
    of_framework = [one for one in table if _split(one)[0] == framework and " for " not in one.source]

    def version(one: Known) -> tuple[bool, list[int]]:
        return one.source.endswith(" main"), [int(number) for number in re.findall(r"\d+", one.source)]

    return {_split(one)[1]: one for one in sorted(of_framework, key=version)}


def _split(one: Known) -> tuple[str, str]:
    """Return framework, as the page writes it, and release."""
    name, _, release = one.source.partition(" ")
    return next(framework for framework in FRAMEWORKS if framework.lower() == name.lower()), release


def _word(one: Known, patch: str) -> str:
    """Return the word for a patch in a source: a fault of one function is one of all."""
    if patch in one.not_judged():
        return NOT_CHECKED
    statuses = [status for status in one.judged() if status.patch == patch]
    words = [status.word for status in statuses if status.is_fault] or [s.word for s in statuses]
    return PATCHED if PATCHED in words else next(iter(words), ABSENT)


def _range(fitting: Sequence[str], releases: Sequence[str]) -> str:
    first, last = fitting[0], fitting[-1]
    between = releases[releases.index(first) : releases.index(last) + 1]
    if len(fitting) == 1 or list(fitting) != list(between):
        return ", ".join(fitting)
    return f"up to {last}" if first == releases[0] and last != releases[-1] else f"{first} to {last}"


def _matrix_rows(table: Sequence[Known]) -> Iterator[dict[str, str]]:
    for framework in FRAMEWORKS:
        row = {"framework": framework}
        for patch in registry.patches():
            word, text = result(table, framework, patch)
            row[patch] = word if word != PATCHED else "core" if text.startswith(CORE) else text
        yield row


# --- the tables


def _source_rows(table: Sequence[Known], runs: Sequence[Run]) -> Iterator[dict[str, str]]:
    """Yield a row for the consecutive releases of a framework on which the same suites ran."""

    def suites(one: Known) -> str:
        ran = dict.fromkeys(suite for run in runs if run["source"] == one.identity for suite in run["suites"])
        return ", ".join(ran) or "none"

    def key(one: Known) -> tuple[str, str]:
        return _split(one)[0], suites(one)

    for framework in FRAMEWORKS:
        of_framework = [one for one in table if _split(one)[0] == framework]
        for (_, ran), group in groupby(of_framework, key):
            listed = ", ".join(map(_link, group))
            yield {"framework": framework, "releases": listed, "run for real": ran}


def _link(one: Known) -> str:
    """Return the release, with its date where its name does not tell which commit it is."""
    release = _split(one)[1]
    if one.commit is None:
        return release
    repository = REPOSITORIES[one.source.split()[0]]
    date = f" ({one.date})" if release == "main" else ""
    return f"[{release}](https://github.com/{repository}/commit/{one.commit}){date}"


def _left_alone(table: Sequence[Known]) -> Iterator[dict[str, str]]:
    """Yield a row for each reason why a patch has no effect in sources that have code for it."""
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for framework in FRAMEWORKS:
        for release, one in _releases(table, framework).items():
            for patch in registry.patches():
                word, why = _word(one, patch), _reason(one, patch)
                if why and word not in (ABSENT, PATCHED, NOT_CHECKED):
                    why = why if word == NOT_NEEDED else f"**{word}**: {why}"
                    places.setdefault((patch, why), {}).setdefault(framework, []).append(release)
    for (framework, patch), why in WITHOUT_USE.items():
        places.setdefault((patch, why), {})[framework] = list(_releases(table, framework))
    for (patch, why), of_frameworks in sorted(places.items()):
        where = [f"{name} {_range(of, list(_releases(table, name)))}" for name, of in of_frameworks.items()]
        yield {"patch": patch, "in": "; ".join(where), "why": why}


def _reason(one: Known, patch: str) -> str:
    """Return what the code says that keeps the patch from it; nothing where there is no such code."""
    statuses = [status for status in one.judged() if status.patch == patch and status.state != "fits"]
    if faults := [status for status in statuses if status.is_fault]:
        return faults[0].reason
    no_reasons = ("it only helps", "no source of module", "this release has it in", "its workers have no")
    reasons = (s.reason for s in statuses if " does not contain " not in s.reason)
    return next((reason for reason in reasons if not reason.startswith(no_reasons)), "")


_MAIN = "main "  # and a commit


def _model_rows(records: Mapping[str, Mapping[str, Mapping[str, list[str]]]]) -> Iterator[dict[str, str]]:
    """Yield a row for all models with the same results: what passed for each promise."""

    def cell(record: Mapping[str, Mapping[str, list[str]]], promise: str, model: str) -> str:
        by_releases: dict[str, list[str]] = {}
        on_main = model.startswith("hybrid")
        releases = [release for release in record if on_main or not release.startswith(_MAIN)]
        for layout in (layout for layout in models.LAYOUTS if not models.reason(model, layout)):
            passed = [
                release for release in releases if f"{model}, {layout}" in record[release].get(promise, ())
            ]
            by_releases.setdefault(", ".join(passed), []).append(layout.replace(", ", " with "))
        untested = by_releases.pop("", [])
        if not by_releases:
            return "not run"
        texts = ["all" if names == ", ".join(releases) else f"{names} only" for names in by_releases]
        return "; ".join(texts) + (f" but {' and '.join(untested)}" if untested else "")

    for layers, record in records.items():
        promises = dict.fromkeys(promise for cells in record.values() for promise in cells)
        rows: dict[tuple[str, ...], list[str]] = {}
        for model in models.MODELS:
            rows.setdefault(tuple(cell(record, promise, model) for promise in promises), []).append(model)
        for cells, of_row in rows.items():
            names = {"layers": _LAYERS[layers], "models": "; ".join(of_row)}
            yield names | dict(zip(promises, cells, strict=True))
