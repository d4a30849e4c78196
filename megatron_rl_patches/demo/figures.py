"""What a run of the demo has to show, as JSON, table and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ..inference.estimate import MemoryEstimate

#: Name of the file that rank 0 writes them to.
FIGURES = "figures.json"

# Rollouts that the first and the last reward of the table are means of.
_FEW = 3


@dataclass
class Figures:
    """Outcome of one run.

    Attributes:
        patches: what the patches say of themselves, or ``off``.
        reward_per_rollout: share of digits that were right.
        solved_per_rollout: share of answers with all digits right.
        divergence_per_rollout: reverse KL divergence from the teachers per token, in nats.
        memory: bytes per rank, by use and place, and by what they hold; counted, not measured.
        steps: optimizer steps in all.
        seconds: wall time, process start included.
        error: the traceback that ended the run.
    """

    patched: bool
    patches: str
    ranks: int
    seed: int
    backend: str
    versions: dict[str, str]
    reward_per_rollout: list[float] = field(default_factory=list)
    solved_per_rollout: list[float] = field(default_factory=list)
    divergence_per_rollout: list[float] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None

    @classmethod
    def read(cls, path: Path) -> Figures:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def keep_memory(self, estimate: MemoryEstimate) -> None:
        for use, footprint in estimate.worst.uses.items():
            for place, memory in (("device", footprint.device), ("host", footprint.host)):
                if memory.total:
                    parts = {name.replace("_", " "): size for name, size in asdict(memory).items() if size}
                    self.memory[f"{use}, {place}"] = parts

    def table(self) -> Table:
        from rich.table import Table

        rewards, solved = self.reward_per_rollout, self.solved_per_rollout
        divergences = self.divergence_per_rollout
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rows = {
            "rollouts, one train() call each": str(len(rewards)),
            "optimizer steps": str(self.steps),
            f"reward, first {_FEW} rollouts": _mean(rewards[:_FEW]),
            f"reward, last {_FEW} rollouts": _mean(rewards[-_FEW:]),
            f"solved, last {_FEW} rollouts": _mean(solved[-_FEW:]),
            f"nats from teacher, first {_FEW} rollouts": _mean(divergences[:_FEW]),
            f"nats from teacher, last {_FEW} rollouts": _mean(divergences[-_FEW:]),
            **{f"kB per rank, {use}": _kilobytes(parts) for use, parts in self.memory.items()},
            "ranks": f"{self.ranks} ({self.backend})",
            "seed": str(self.seed),
            "wall time": f"{self.seconds:.1f} s",
            "patches": self.patches,
            "versions": versions,
        }
        table = Table(show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def plot(self, path: Path) -> None:
        """Draw learning curves and memory; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (learning, memory) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
        self._plot_learning(learning)
        self._plot_memory(memory)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def _plot_learning(self, axes: Any) -> None:
        from .digits import DIGITS, VOCABULARY

        numbers = range(1, len(self.reward_per_rollout) + 1)
        axes.plot(numbers, self.reward_per_rollout, label="reward: share of digits right")
        axes.plot(numbers, self.solved_per_rollout, label=f"solved: share of rows with all {DIGITS} right")
        axes.axhline(1 / VOCABULARY, color="grey", linestyle=":", label="reward by chance")
        axes.set(xlabel="rollout, one train() call each", ylim=(0, 1), title="Sorting digits")
        nats = axes.twinx()
        nats.plot(numbers, self.divergence_per_rollout, color="tab:red", label="nats from the teachers")
        nats.set(ylabel="reverse KL divergence per token, nats")
        nats.set_ylim(bottom=0)
        lines = [*axes.get_legend_handles_labels()[0], *nats.get_legend_handles_labels()[0]]
        axes.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)

    def _plot_memory(self, axes: Any) -> None:
        uses = [use.replace(", ", "\n").replace(" + ", "\n+ ") for use in self.memory]
        bottoms = [0.0] * len(uses)
        for part in dict.fromkeys(part for parts in self.memory.values() for part in parts):
            heights = [parts.get(part, 0) / 1000 for parts in self.memory.values()]
            axes.bar(uses, heights, bottom=bottoms, label=part, width=0.6)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set(ylabel="kB per rank", title="A teacher that trains, and one that only scores")
        axes.legend()


def _kilobytes(parts: dict[str, int]) -> str:
    shares = ", ".join(f"{name} {size / 1000:.0f}" for name, size in parts.items())
    return f"{sum(parts.values()) / 1000:.0f} ({shares})"


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "none"
