"""What a run of the demo has to show, as JSON, table and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from typing_extensions import Self

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
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def rows(self) -> dict[str, str]:
        """What was found, by name."""
        raise NotImplementedError

    def table(self) -> Table:
        from rich.table import Table

        rows = self.rows() | {
            "ranks": f"{self.ranks} ({self.backend})",
            "seed": str(self.seed),
            "wall time": f"{self.seconds:.1f} s",
            "patches": self.patches,
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        table = Table(show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def plot(self, path: Path) -> None:
        """Draw two panels; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
        self.draw(*panels)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def draw(self, left: Any, right: Any) -> None:
        raise NotImplementedError


@dataclass
class LearningFigures(Figures):
    """Of reinforcement learning beside two teachers.

    Attributes:
        reward_per_rollout: share of digits that were right.
        solved_per_rollout: share of answers with all digits right.
        divergence_per_rollout: reverse KL divergence from the teachers per token, in nats.
        memory: bytes per rank, by use and place, and by what they hold; counted, not measured.
    """

    reward_per_rollout: list[float] = field(default_factory=list)
    solved_per_rollout: list[float] = field(default_factory=list)
    divergence_per_rollout: list[float] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def keep_memory(self, estimate: MemoryEstimate) -> None:
        for use, footprint in estimate.worst.uses.items():
            for place, memory in (("device", footprint.device), ("host", footprint.host)):
                if memory.total:
                    parts = {name.replace("_", " "): size for name, size in asdict(memory).items() if size}
                    self.memory[f"{use}, {place}"] = parts

    def rows(self) -> dict[str, str]:
        rewards, solved = self.reward_per_rollout, self.solved_per_rollout
        divergences = self.divergence_per_rollout
        return {
            "rollouts, one train() call each": str(len(rewards)),
            "optimizer steps": str(self.steps),
            f"reward, first {_FEW} rollouts": _mean(rewards[:_FEW]),
            f"reward, last {_FEW} rollouts": _mean(rewards[-_FEW:]),
            f"solved, last {_FEW} rollouts": _mean(solved[-_FEW:]),
            f"nats from teacher, first {_FEW} rollouts": _mean(divergences[:_FEW]),
            f"nats from teacher, last {_FEW} rollouts": _mean(divergences[-_FEW:]),
            **{f"kB per rank, {use}": _kilobytes(parts) for use, parts in self.memory.items()},
        }

    def draw(self, left: Any, right: Any) -> None:
        self._plot_learning(left)
        self._plot_memory(right)

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


@dataclass
class DistillationFigures(Figures):
    """Of distilling two teachers into a student, once for each way to bring them together.

    Attributes:
        teachers: by order, the share of digits that its teacher gets right.
        divergence_per_rollout: by target and order, reverse KL divergence from the target per token, in nats.
        score_per_rollout: by target and order, the share of digits that the student gets right.
    """

    teachers: dict[str, float] = field(default_factory=dict)
    divergence_per_rollout: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    score_per_rollout: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def rows(self) -> dict[str, str]:
        rows = {"optimizer steps": str(self.steps)}
        rows |= {f"teacher, {order}: score": f"{score:.3f}" for order, score in self.teachers.items()}
        for target, by_order in self.divergence_per_rollout.items():
            for order, nats in by_order.items():
                scores = self.score_per_rollout[target][order]
                rows[f"{target}, {order}: nats from target"] = (
                    f"{_mean(nats[:_FEW])} to {_mean(nats[-_FEW:])}"
                )
                rows[f"{target}, {order}: score"] = f"{_mean(scores[:_FEW])} to {_mean(scores[-_FEW:])}"
        return rows

    def draw(self, left: Any, right: Any) -> None:
        styles = dict(zip(self.divergence_per_rollout, ("-", "--"), strict=False))
        colours = dict(zip(self.teachers, ("tab:blue", "tab:orange"), strict=True))
        for target, style in styles.items():
            for order, colour in colours.items():
                nats = self.divergence_per_rollout[target][order]
                scores = self.score_per_rollout[target][order]
                numbers = range(1, len(nats) + 1)
                left.plot(numbers, nats, style, color=colour, label=f"{order}, {target}")
                right.plot(numbers, scores, style, color=colour, label=f"{order}, {target}")
        for order, score in self.teachers.items():
            right.axhline(score, color=colours[order], linestyle=":", label=f"{order}, teacher")
        left.set(
            xlabel="rollout, one train() call each",
            ylabel="nats",
            title="Reverse KL, by teacher",
        )
        left.set_ylim(bottom=0)
        right.set(xlabel="rollout, one train() call each", ylim=(0, 1), title="Share of digits right")
        left.legend()
        right.legend()


def _kilobytes(parts: dict[str, int]) -> str:
    shares = ", ".join(f"{name} {size / 1000:.0f}" for name, size in parts.items())
    return f"{sum(parts.values()) / 1000:.0f} ({shares})"


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "none"
