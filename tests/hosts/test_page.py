"""``docs/compatibility.md``: what is told of a source, and where it was run."""

from __future__ import annotations

from typing import Any

from tests.hosts.page import page
from tests.hosts.verdicts import Known
from tests.recording import Run

COMMIT, MEGATRON = "a" * 40, "b" * 40
FITS = {"slime": {"lean-loss": {"slime.loss": "fits"}, "reentrant-train": {"slime.train": "fits"}}}
FAULT = {"slime": {**FITS["slime"], "lean-loss": {"slime.loss": "missing: no loss"}}}


def run(suites: dict[str, list[int]], **given: Any) -> Run:
    there: Any = {"source": COMMIT, "megatron": MEGATRON, "python": "3", "torch": "2", "date": "2026-02-01"}
    return there | {"suites": suites} | given


def row_of(source: str, runs: list[Run]) -> list[str]:
    table = [
        Known("slime v1", COMMIT, "2026-01-02", FITS),
        Known("slime v2", "c" * 40, "2026-01-03", FAULT),
        Known("Megatron-LM v3", MEGATRON, "2026-01-04", {}),
    ]
    lines = page(table, runs).splitlines()
    [row] = [line for line in lines if line.startswith(f"| {source} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_judged_only() -> None:
    link = f"[`{'a' * 9}`](https://github.com/THUDM/slime/commit/{COMMIT})"
    assert row_of("slime v1", []) == [
        "slime v1",
        link,
        "2026-01-02",
        "lean-loss, reentrant-train",
        "judged only",
    ]


def test_a_patch_with_a_fault_does_not_fit() -> None:
    assert row_of("slime v2", [])[3] == "reentrant-train, **not** lean-loss"


def test_runs_are_told_by_their_ranks_and_their_megatron() -> None:
    runs = [run({"rollouts": [1, 2], "losses": [1, 2], "distillation": [1]})]
    told = f"rollouts, losses (1, 2 ranks); distillation (1 rank) on Megatron-LM v3 `{'b' * 9}`, 2026-02-01"
    assert row_of("slime v1", runs)[4] == told
    assert row_of("slime v2", runs)[4] == "judged only"


def test_a_run_on_itself() -> None:
    runs = [run({"rollouts": [2]}, source=MEGATRON)]
    assert row_of("Megatron-LM v3", runs)[4] == "rollouts (2 ranks), 2026-02-01"


def test_verdicts_are_grouped_by_site() -> None:
    table = [Known("slime v1", COMMIT, "", FITS), Known("slime v2", "c" * 40, "", FAULT)]
    told = page(table, [])
    assert "| reentrant-train | `slime.train` | fits | all |" in told
    assert "| lean-loss | `slime.loss` | fits | slime v1 |" in told
    assert "| lean-loss | `slime.loss` | **missing**: no loss | slime v2 |" in told
