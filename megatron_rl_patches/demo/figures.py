"""Results of a run of the demo, as JSON, table and plot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inference.memory.report import uses

if TYPE_CHECKING:
    from rich.table import Table

    from ..inference.memory.estimate import MemoryEstimate
    from . import program

# Rollouts over which the table averages first and last values.
_WINDOW = 3
# Those of ``policy``, which loads Megatron.
_DIGITS, _VOCABULARY = 5, 12
_ROLLOUTS = "rollout, one train() call each"


@dataclass
class Figures(ABC):
    """Results of one run, with its optimizer steps, wall time and the traceback that ended it."""

    patched: bool
    patches: str
    ranks: int
    seed: int
    backend: str
    versions: dict[str, str]
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None

    @abstractmethod
    def rows(self) -> dict[str, str]: ...

    @abstractmethod
    def draw(self, left: Any, right: Any) -> None: ...

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
        for row in rows.items():
            table.add_row(*row)
        return table

    def plot(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 4.5), layout="constrained")
        self.draw(*figure.subplots(1, 2))
        figure.savefig(path, dpi=120)


@dataclass
class LearningFigures(Figures):
    """Results of reinforcement learning with two teachers.

    Attributes:
        reward_per_rollout: fraction of digits that are right.
        solved_per_rollout: fraction of answers with all digits right (exact match).
        divergence_per_rollout: reverse KL divergence from the teachers per token, in nats.
        memory: estimated bytes per rank, by use and place, and by what they hold.
        logits: bytes of a microbatch's logits in float32, on a rank of the last pipeline stage.
        makes_logits: whether they exist; with the patch ``lean-head`` they do not.
    """

    reward_per_rollout: list[float] = field(default_factory=list)
    solved_per_rollout: list[float] = field(default_factory=list)
    divergence_per_rollout: list[float] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    logits: int = 0
    makes_logits: bool = True

    def set_memory(self, estimate: MemoryEstimate) -> None:
        for use, memory in uses(estimate, estimate.worst).items():
            self.memory[use] = {name.replace("_", " "): size for name, size in asdict(memory).items() if size}

    def add(self, rollout: program.Rollout) -> None:
        self.reward_per_rollout.append(round(rollout.reward, 4))
        self.solved_per_rollout.append(round(rollout.exact_match, 4))
        self.divergence_per_rollout.append(round(rollout.reverse_kl, 4))
        self.steps += rollout.steps

    def rows(self) -> dict[str, str]:
        rewards, divergences = self.reward_per_rollout, self.divergence_per_rollout
        rows = {
            "rollouts, one train() call each": str(len(rewards)),
            "optimizer steps": str(self.steps),
            f"reward, first {_WINDOW} rollouts": _mean(rewards[:_WINDOW]),
            f"reward, last {_WINDOW} rollouts": _mean(rewards[-_WINDOW:]),
            f"exact match, last {_WINDOW} rollouts": _mean(self.solved_per_rollout[-_WINDOW:]),
            f"reverse KL (nats), first {_WINDOW} rollouts": _mean(divergences[:_WINDOW]),
            f"reverse KL (nats), last {_WINDOW} rollouts": _mean(divergences[-_WINDOW:]),
        }
        for use, parts in self.memory.items():
            listed = ", ".join(f"{name} {size / 1000:.0f}" for name, size in parts.items())
            rows[f"kB per rank, {use}"] = f"{sum(parts.values()) / 1000:.0f} ({listed})"
        made = "" if self.makes_logits else " (never materialized: lean-head)"
        rows["kB per rank, logits of a microbatch"] = f"{self.logits / 1000:.0f}{made}"
        return rows

    def draw(self, left: Any, right: Any) -> None:
        numbers, nats = range(1, len(self.reward_per_rollout) + 1), left.twinx()
        left.plot(numbers, self.reward_per_rollout, label="reward: fraction of digits right")
        left.plot(numbers, self.solved_per_rollout, label=f"exact match: all {_DIGITS} digits right")
        left.axhline(1 / _VOCABULARY, color="grey", linestyle=":", label="reward by chance")
        left.set(xlabel=_ROLLOUTS, ylim=(0, 1), title="Sorting digits")
        nats.plot(numbers, self.divergence_per_rollout, color="tab:red", label="reverse KL from the teachers")
        nats.set(ylabel="nats per token")
        nats.set_ylim(bottom=0)
        lines = [*left.get_legend_handles_labels()[0], *nats.get_legend_handles_labels()[0]]
        left.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)

        uses = [use.replace(", ", "\n").replace(" + ", "\n+ ") for use in self.memory]
        bottoms = [0.0] * len(uses)
        for part in dict.fromkeys(part for parts in self.memory.values() for part in parts):
            heights = [parts.get(part, 0) / 1000 for parts in self.memory.values()]
            right.bar(uses, heights, bottom=bottoms, label=part, width=0.6)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        right.set(ylabel="kB per rank", title="A teacher that trains, and one that only scores")
        right.legend()


@dataclass
class DistillationFigures(Figures):
    """Results of distilling two teachers into a student, once for each kind of target.

    A target is a teacher for each sample or a mixture, known by a top-k or in full: ``"routed, top-k"``.

    Attributes:
        teachers: fraction of digits that each teacher gets right, by order.
        divergence_per_rollout: reverse KL divergence from the target per token, in nats, by target and order.
        score_per_rollout: fraction of digits that the student gets right, by target and order.
        bytes_per_token: what is kept of a target for a token until the loss reads it, by target.
    """

    teachers: dict[str, float] = field(default_factory=dict)
    divergence_per_rollout: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    score_per_rollout: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    bytes_per_token: dict[str, float] = field(default_factory=dict)

    def add(self, target: str, rollout: program.DistillationRollout) -> None:
        self.steps += rollout.steps
        self.bytes_per_token[target] = rollout.bytes_per_token
        for results, values in (
            (self.divergence_per_rollout, rollout.reverse_kl),
            (self.score_per_rollout, rollout.score),
        ):
            for order, value in values.items():
                results.setdefault(target, {}).setdefault(order, []).append(round(value, 4))

    def rows(self) -> dict[str, str]:
        rows = {"optimizer steps": str(self.steps)}
        rows |= {f"teacher, {order}: score": f"{score:.3f}" for order, score in self.teachers.items()}
        for target, by_order in self.divergence_per_rollout.items():
            for order, divergences in by_order.items():
                rows[f"{target}, {order}: reverse KL (nats)"] = _change(divergences)
                rows[f"{target}, {order}: score"] = _change(self.score_per_rollout[target][order])
        rows |= {f"{target}: bytes per token": f"{size:.0f}" for target, size in self.bytes_per_token.items()}
        return rows

    def draw(self, left: Any, right: Any) -> None:
        colors = dict(zip(self.teachers, ("tab:blue", "tab:orange"), strict=True))
        for axes, results in ((left, self.divergence_per_rollout), (right, self.score_per_rollout)):
            for (target, by_order), style in zip(results.items(), (":", "-", "-.", "--"), strict=False):
                for order, values in by_order.items():
                    numbers, label = range(1, len(values) + 1), f"{order}, {target}"
                    axes.plot(numbers, values, style, color=colors[order], label=label)
        for order, score in self.teachers.items():
            right.axhline(score, color=colors[order], alpha=0.4, label=f"{order}, teacher")
        left.set(xlabel=_ROLLOUTS, ylabel="nats", title="Reverse KL, by teacher")
        left.set_ylim(bottom=0)
        right.set(xlabel=_ROLLOUTS, ylim=(0, 1), title="Fraction of digits right")
        left.legend()
        right.legend()


def _change(values: list[float]) -> str:
    return f"{_mean(values[:_WINDOW])} to {_mean(values[-_WINDOW:])}"


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "none"
