"""Draws the plots of the demo and of the estimate: ``python -m docs.plots``, or ``make screenshots``.

Those of the demo are of runs that ``megatron-rl-patches demo --json`` recorded in ``docs/records``.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.page import new_figure, save
from megatron_rl_patches.demo.figures import DistillationFigures, LearningFigures
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.estimate import Memory, MemoryEstimate
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config

DOCS = Path(__file__).parent
GEMMA_3_27B = {  # google/gemma-3-27b-it, the language model, as its config.json has it
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
}


def learning() -> Any:
    figure = new_figure(9.5)
    left, right = figure.subplots(2, 1)
    LearningFigures(**_record("reward")).draw(left, right)
    figure.axes[-1].spines["right"].set_visible(True)  # of the second axis
    return _with_legend_below(figure, right)


def distillation() -> Any:
    figure = new_figure(8.5)
    both = figure.subplots(2, 1)
    DistillationFigures(**_record("distill")).draw(*both)
    both[0].get_legend().remove()
    return _with_legend_below(figure, both[1])


def estimate() -> Any:
    figure = new_figure(5)
    memory = estimate_memory(fields_from_hf_config(GEMMA_3_27B), dtype="bf16", teachers=3)
    axes = figure.subplots()
    _stack(memory, axes)
    return _with_legend_below(figure, axes)


def _stack(estimate: MemoryEstimate, axes: Any) -> None:
    """Draw a bar for each use, and one for the host memory that it takes, stacked of what they hold."""
    bars = {f"{use}\ndevice": memory for use, memory in report.uses(estimate, estimate.worst).items()}
    *_, (use, last) = report.uses(estimate, estimate.worst).items()
    bars[f"{use}\nhost"] = Memory(teachers=last.host)
    labels = [label.replace(" + ", "\n+ ") for label in bars]
    bottoms = [0.0] * len(bars)
    for field in fields(Memory):
        heights = [getattr(memory, field.name) / 1e9 for memory in bars.values()]
        if field.name != "host" and any(heights):
            axes.bar(labels, heights, bottom=bottoms, label=field.name.replace("_", " "), width=0.6)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (index, total), ha="center", va="bottom")
    axes.set(ylabel="GB per rank")
    axes.margins(y=0.1)
    axes.legend(loc="upper right")


def _with_legend_below(figure: Any, axes: Any) -> Any:
    """Bars and lines fill a narrow plot, and leave no room for a legend."""
    axes.get_legend().remove()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _record(name: str) -> Any:
    return json.loads((DOCS / "records" / f"demo_{name}.json").read_text("utf-8"))


if __name__ == "__main__":
    for name, draw in (("demo_reward", learning), ("demo_distill", distillation), ("estimate_27b", estimate)):
        save(draw(), DOCS / "images" / f"{name}.svg")
        print(DOCS / "images" / f"{name}.svg")
