"""Parts of Markdown pages that a program writes."""

import re
from collections.abc import Iterable, Mapping


def places(page: str, kind: str = "measured") -> list[str]:
    """Return the names of the places of a kind that the page has, in their order."""
    return re.findall(f"^<!-- {kind}: (.+) -->$", page, re.MULTILINE)


def fill(page: str, parts: Mapping[str, str], kind: str = "measured") -> str:
    """Return the page with each part in its place, between ``<!-- KIND: NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: the page has no such place.
    """
    for name, part in parts.items():
        before, begin, after = page.partition(f"<!-- {kind}: {name} -->\n")
        _, end, after = after.partition("<!-- end -->\n")
        if not end:
            raise ValueError(f"the page has no place for what was {kind}: {name}")
        page = f"{before}{begin}\n{part}\n\n{end}{after}"
    return page


def join(*blocks: str) -> str:
    """Return the blocks that are not empty, with an empty line between them."""
    return "\n\n".join(block for block in blocks if block)


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return a table whose columns are the keys of the rows; nothing if there are no rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
