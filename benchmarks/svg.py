"""Plots as SVG for the pages: light and dark in one file, with labels that can be read on a phone."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

#: Inches: a page on a phone is hardly wider, so nothing shrinks there.
WIDTH = 5.4
STYLE: dict[Any, Any] = {
    "axes.facecolor": "none",
    "axes.prop_cycle": "cycler('color', ['4c8fd0', 'e8833a', '3fa66b', 'd9534f', '9a7bc4', '8f7a6c'])",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "large",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "",
}
_BLACK = re.compile(r"#000000|(?<=: )black(?=[;\"])")
_THEMES = """<style>
   svg { color: #1c2733 } text { fill: currentColor }
   @media (prefers-color-scheme: dark) { svg { color: #e3e9ef } }
  </style>
"""


def new_figure(height: float) -> Any:
    """Return a figure of the width of a page, in the style of the pages."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(WIDTH, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the figure; what is black in it has the color of the text of the reader's theme."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = _BLACK.sub("currentColor", file.getvalue())
    text = re.sub(r"<style type=\"text/css\">.*?</style>\n", "", text, flags=re.DOTALL)
    text = re.sub(r" <metadata>.*?</metadata>\n", "", text, flags=re.DOTALL)
    # The style of all shapes, which matplotlib writes into an element of its own.
    shapes = "*{stroke-linejoin: round; stroke-linecap: butt}"
    text = text.replace("<defs>\n", f"<defs>\n  {_THEMES.replace('svg {', f'{shapes} svg {{', 1)}", 1)
    path.write_text("".join(line.rstrip() + "\n" for line in text.splitlines()), encoding="utf-8")
