"""Draws the plots of the pages, two of them from records of benchmarks: ``python -m docs.plots``."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
from matplotlib.figure import Figure

from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config
from tests.references.hugging_face import GEMMA_3_27B

DOCS = Path(__file__).parent
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
THEMES = """
   svg { color: #1c2733 } text { fill: currentColor }
   @media (prefers-color-scheme: dark) { svg { color: #e3e9ef } }
  </style>"""
MODES = ("log-probs", "+ entropy", "+ entropy with gradient")
MINIMAL = "minimal, compiled"


def new_figure(height: float) -> Any:
    """Return a figure of the width of a page, in the style of the pages."""
    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(WIDTH, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the figure as SVG; what is black in it has the color of the text of the reader's theme."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"#000000|(?<=: )black(?=[;\"])", "currentColor", file.getvalue())
    text = text.replace("</style>", THEMES, 1)
    path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


def record(name: str) -> Any:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text("utf-8"))


def estimate() -> Any:
    matplotlib.rcParams.update(STYLE)
    memory = estimate_memory(fields_from_hf_config(GEMMA_3_27B), dtype="bf16", teachers=3)
    # The plot of the command `estimate`, which would write it, is made as narrow as a page.
    with mock.patch.object(Figure, "savefig", autospec=True) as drawn:
        report.plot(memory, Path())
    figure = drawn.call_args.args[0]
    figure.set_size_inches(WIDTH, 5)
    [axes] = figure.axes
    # Bars fill a narrow plot, and leave no room for a legend.
    axes.get_legend().remove()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def losses() -> Any:
    """Draw the costs of the last set-up of float32 logits on one rank, which has the largest vocabulary."""
    rows = record("loss")["losses"]
    setup = [row["set-up"] for row in rows if row["set-up"].startswith("TP 1, float32")][-1]
    costs = {(row["mode"], row["loss"]): row for row in rows if row["set-up"] == setup}
    names = [*dict.fromkeys(name for _, name in costs if name not in ("copy", MINIMAL))]
    figure, height = new_figure(9), 0.8 / len(MODES)
    memory, duration = figure.subplots(2, 1)
    labels = {"memory": "extra memory, × logits", "time": "forward + backward, × one copy of the logits"}
    for axes, (column, label) in zip((memory, duration), labels.items(), strict=True):
        for place, mode in enumerate(MODES):
            measured = [(i, costs[mode, name]) for i, name in enumerate(names) if (mode, name) in costs]
            places = [index + (place + 0.5) * height - 0.4 for index, _ in measured]
            axes.barh(places, [float(row[column]) for _, row in measured], height, label=mode)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=label, ylim=(len(names) - 0.4, -0.6))  # the first name on top
        axes.grid(axis="x", alpha=0.3)
    least = float(costs[MODES[-1], MINIMAL]["time"])
    duration.axvline(least, color="black", linestyle=":", label=MINIMAL)
    figure.legend(*duration.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Log-probabilities and entropy\n{setup}")
    return figure


def bias() -> Any:
    rows = record("distillation")["bias"]
    figure = new_figure(6)
    missing, error = figure.subplots(2, 1)
    for exponent in dict.fromkeys(row["exponent"] for row in rows):
        of_exponent = [row for row in rows if row["exponent"] == exponent]
        for axes, column in ((missing, "KL left out"), (error, "gradient error")):
            shares = [float(row[column].rstrip("%")) / 100 for row in of_exponent]
            axes.plot([int(row["K"]) for row in of_exponent], shares, "o-", label=f"rank ** -{exponent}")
    missing.set(ylabel="reverse KL left out")
    error.set(ylabel="relative error of the gradient")
    for axes in (missing, error):
        axes.set(xlabel="K", xscale="log", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("What a top-k with its tail leaves out")
    return figure


if __name__ == "__main__":
    plots = {"estimate_27b": estimate, "loss_memory_and_time": losses, "distillation_bias": bias}
    for name, draw in plots.items():
        file = DOCS / "images" / f"{name}.svg"
        save(draw(), file)
        print(file)
