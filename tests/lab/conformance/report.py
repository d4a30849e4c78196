"""The tables that show the records: in README.md of this folder, and a short one in docs/testing.md.

python -m tests.lab.conformance.report    # writes them anew
"""

import json
from pathlib import Path
from typing import Any

from tests.lab.conformance.runs import REASONS
from tests.references.pages import fill, table

HERE = Path(__file__).parent
REPORT = HERE / "README.md"
GUIDE = Path(__file__).parents[3] / "docs" / "testing.md"


def pages() -> dict[Path, str]:
    """Return the text that each page has with the tables of the records in it."""
    records, with_stand_in = _records("records"), _records("records/transformer_engine")
    parts = {
        REPORT: {
            "outcomes": table(_outcomes(name, record) for name, record in records.items()),
            "stand-in": table(_outcomes(name, record) for name, record in with_stand_in.items()),
        },
        GUIDE: {
            "Megatron's tests": table(
                _summary(name, record, with_stand_in.get(name)) for name, record in records.items()
            )
        },
    }
    return {page: fill(page.read_text("utf-8"), named) for page, named in parts.items()}


def _records(folder: str) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted((HERE / folder).glob("*.json"))}


def _summary(name: str, record: dict[str, Any], with_stand_in: dict[str, Any] | None) -> dict[str, str]:
    changed = {change["without"]["nodeid"] for change in record["changed_by_patches"]}
    return {
        "Megatron-LM": name,
        "tests": f"{record['tests']:,}",
        "ran to an end": f"{record['passed'] + len(record['failed']):,}",
        "passed": f"{record['passed']:,}",
        "passed with the stand-in": f"{with_stand_in['passed']:,} more" if with_stand_in else "not run",
        "outcomes that patches changed": str(len(changed)),
    }


def _outcomes(name: str, record: dict[str, Any]) -> dict[str, str]:
    once = {change["without"]["nodeid"].rpartition("::")[2] for change in record["differed_once"]}
    changed = str(len(record["changed_by_patches"]))
    return {
        "source": f"{name} `{record['commit'][:9]}`",
        "ranks": ", ".join(map(str, record["ranks"])),
        **({"lacked TransformerEngine": str(record["lacked"])} if "lacked" in record else {}),
        "tests": str(record["tests"]),
        "passed": str(record["passed"]),
        "failed": str(len(record["failed"])),
        "skipped": str(record["skipped"]),
        **{reason: str(record["not_runnable"].get(reason, 0)) for reason in REASONS},
        "patches": "; ".join(record["patches"]),
        **({"ran with patches": str(record["with_patches"])} if "with_patches" in record else {}),
        "changed by patches": f"{changed}; once, and not again: {', '.join(sorted(once))}"
        if once
        else changed,
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
