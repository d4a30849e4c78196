"""Draws the plots of the demo and of the estimate: ``python -m docs.plots``, or ``make screenshots``.

Those of the demo are of runs that ``megatron-rl-patches demo --json`` recorded in ``docs/records``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.page import new_figure, save
from megatron_rl_patches.demo.figures import DistillationFigures, LearningFigures
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.huggingface import description_from_hf_config

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
    memory = estimate_memory(description_from_hf_config(GEMMA_3_27B), dtype="bf16", teachers=3)
    axes = figure.subplots()
    report.draw(memory, axes)
    return _with_legend_below(figure, axes)


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
