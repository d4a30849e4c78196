"""An issue about what fails with the newest torch.

    python -m tests.newest FOLDER

The folder has what ``make test-newest`` has left: the versions, and pytest's results. It has neither if
nothing could be installed. As in :mod:`tests.frameworks.report`, only the standard library is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.frameworks.report import open_issue

# GitHub takes a body of 65,536 characters.
_TESTS, _CHARACTERS = 100, 500


def main(folder: Path) -> None:
    file = folder / "newest.txt"
    versions = file.read_text("utf-8").splitlines() if file.exists() else []
    torch = next((line for line in versions if line.startswith("torch==")), "the newest torch")
    failures = list(_failures(folder / "newest.xml"))
    parts = [
        *(failures[:_TESTS] or ["No test failed: see the workflow's log for what did."]),
        *([f"- and {len(failures) - _TESTS} more"] if failures[_TESTS:] else []),
        "",
        *(f"    {line}" for line in versions),
    ]
    open_issue(f"Tests fail with {torch}", "\n".join(parts))


def _failures(file: Path) -> Iterator[str]:
    """Yield a line for each test that failed, with what it raised."""
    if not file.exists():
        return
    for test in ElementTree.parse(file).iter("testcase"):
        for result in (*test.iter("failure"), *test.iter("error")):
            raised = " ".join(result.get("message", "").split())
            yield f"- `{test.get('classname')}::{test.get('name')}`: {raised}"[:_CHARACTERS]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
