"""Draws the plot of the estimate: ``python -m docs.plots``, or ``make screenshots``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import new_figure, save
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config
from tests.references.hugging_face import GEMMA_3_27B

DOCS = Path(__file__).parent


def estimate() -> Any:
    figure = new_figure(5)
    memory = estimate_memory(fields_from_hf_config(GEMMA_3_27B), dtype="bf16", teachers=3)
    axes = figure.subplots()
    report.draw(memory, axes)
    # Bars fill a narrow plot, and leave no room for a legend.
    axes.get_legend().remove()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    file = DOCS / "images" / "estimate_27b.svg"
    save(estimate(), file)
    print(file)
