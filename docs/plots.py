"""Draws the plots of the pages, from records of benchmarks and from estimates: ``python -m docs.plots``."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
from matplotlib.figure import Figure

from megatron_rl_patches.inference import OptimizerSettings, estimate_memory
from megatron_rl_patches.inference.memory import estimate as estimates
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config
from megatron_rl_patches.inference.memory.parameters import count_parameters
from tests.references.heads import ALL_KEPT, DEFERRED, NOT_IN_PLACE, QUARTER, STOCK
from tests.references.hugging_face import GEMMA_3_27B

DOCS = Path(__file__).parent
#: Inches: a page on a phone is hardly wider, so nothing shrinks there.
WIDTH = 5.4
#: Of the first two plots, in which letters are larger for a phone.
OPENING_WIDTH = 4.4
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


def new_figure(height: float, width: float = WIDTH) -> Any:
    """Return a figure of the width of a page, in the style of the pages."""
    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


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


@cache
def teacher_memory() -> list[tuple[str, dict[str, float]]]:
    """Return how a teacher of 27B can be built, and its memory by what it holds, in GB of 10^9 bytes."""
    fields, sharded = fields_from_hf_config(GEMMA_3_27B), OptimizerSettings(use_distributed_optimizer=True)
    # Megatron builds the model once.
    with mock.patch.object(estimates, "count_parameters", return_value=count_parameters(fields, "bf16")):
        [alone] = estimate_memory(fields, dtype="bf16").stages
        [of_eight] = estimate_memory(fields, dtype="bf16", data_parallel_size=8, optimizer=sharded).stages
    with_buffers = estimates.Memory(alone.training.parameters, alone.training.gradients)
    built = {
        "built for training (OpenClaw-RL)": alone.training,
        "built for training, distributed optimizer, 8 replicas": of_eight.training,
        "built with DDP, without optimizer (AReaL)": with_buffers,
        "inference-only": alone.inference_only,
    }
    parts = {"weights": "parameters", "gradient buffers": "gradients", "main parameters": "main_parameters"}
    return [
        (
            name,
            {part: getattr(memory, key) / 1e9 for part, key in parts.items()}
            | {"Adam's moments": (memory.exp_avg + memory.exp_avg_sq) / 1e9},
        )
        for name, memory in built.items()
    ]


def teacher() -> Any:
    """Draw a bar for each way to build a teacher."""
    memory, figure = teacher_memory(), new_figure(3.7, OPENING_WIDTH)
    axes = figure.subplots()
    for place, (name, parts) in enumerate(memory):
        axes.text(0, place - 0.3, name, va="bottom", weight="bold" if name == "inference-only" else "normal")
        left, total = 0.0, sum(parts.values())
        for index, (part, size) in enumerate(parts.items()):
            label = part if place == 0 else None
            axes.barh(place, size, 0.42, left, color=f"C{(2, 0, 4, 1)[index]}", label=label)
            left += size
        axes.text(total + 6, place, f"{total:.1f} GB", va="center")
    most = sum(memory[0][1].values())
    axes.set(xlim=(0, 1.24 * most), ylim=(len(memory) - 0.65, -0.75), xticks=[], yticks=[])
    axes.spines[["bottom", "left"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    figure.suptitle("Memory of a teacher with 27B parameters", x=0.01, ha="left")
    return figure


def head_peaks() -> dict[str, dict[int, float]]:
    """Return the peak in GiB of output layer and loss of 8,192 tokens by head and vocabulary."""
    counted, peaks = record("head_counted"), dict[str, dict[int, float]]()
    for row in counted["heads"] + counted["stock"]:
        rows, _, vocabulary = map(int, re.findall(r"\d+(?=[],])", row["set-up"]))
        if rows == 8192:
            size = float(row["beyond gradients"].split()[0])
            peaks.setdefault(row["head"], {})[vocabulary] = size
    return {head: dict(sorted(sizes.items())) for head, sizes in peaks.items()}


def head() -> Any:
    """Draw the peaks of stock code and of both patches; tiles that forward keeps are a band."""
    peaks, figure, shown = head_peaks(), new_figure(3.7, OPENING_WIDTH), 151_936
    axes = figure.subplots()
    for name, label, style in (
        (STOCK, "stock code of slime", "C3o-"),
        (NOT_IN_PLACE, "lean-loss", "C1o-"),
        (DEFERRED, "lean-head", "C0o-"),
        (DEFERRED + QUARTER, "lean-head, ¼ of the rows", "C2o--"),
    ):
        axes.plot([*peaks[name]], [*peaks[name].values()], style, label=label, markersize=4)
    most, least = peaks[ALL_KEPT], peaks[DEFERRED]
    axes.fill_between(
        [*most],
        [*most.values()],
        [*least.values()],
        color="C0",
        alpha=0.3,
        linewidth=0,
        label="lean-head, tiles kept",
    )
    texts = {f"{shown:,} ids": max(peaks[STOCK].values())}
    texts |= {f"{peaks[name][shown]:.1f}": peaks[name][shown] for name in (STOCK, NOT_IN_PLACE)}
    texts[f"{least[shown]:.1f} to {most[shown]:.1f}"] = most[shown]
    axes.axvline(shown, color="black", linestyle=":", linewidth=0.8)
    for text, height in texts.items():
        axes.annotate(text, (shown, height), (-4, 4), ha="right", textcoords="offset points")
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="vocabulary", xticks=[0, 65536, 131072, 196608, 262144])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2)
    figure.suptitle("Peak of output layer and loss, GiB", x=0.01, ha="left")
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
    plots = {
        "teacher_memory": teacher,
        "head_by_vocabulary": head,
        "estimate_27b": estimate,
        "loss_memory_and_time": losses,
        "distillation_bias": bias,
    }
    for name, draw in plots.items():
        file = DOCS / "images" / f"{name}.svg"
        save(draw(), file)
        print(file)
