"""What a run of the demo has to show, as JSON, table and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Rollouts that the first and the last reward of the table are means of.
_FEW = 3


@dataclass
class Figures:
    """Outcome of one run.

    Attributes:
        patches: what the patches say of themselves, or ``off``.
        reward_per_rollout: share of digits that were right.
        solved_per_rollout: share of answers with all digits right.
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
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None

    @classmethod
    def read(cls, path: Path) -> Figures:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        from rich.table import Table

        rewards, solved = self.reward_per_rollout, self.solved_per_rollout
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rows = {
            "rollouts, one train() call each": str(len(rewards)),
            "optimizer steps": str(self.steps),
            f"reward, first {_FEW} rollouts": _mean(rewards[:_FEW]),
            f"reward, last {_FEW} rollouts": _mean(rewards[-_FEW:]),
            f"solved, last {_FEW} rollouts": _mean(solved[-_FEW:]),
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
        """Draw the learning curve; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        from .digits import DIGITS, VOCABULARY

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        numbers = range(1, len(self.reward_per_rollout) + 1)
        axes.plot(numbers, self.reward_per_rollout, label="reward: share of digits right")
        axes.plot(numbers, self.solved_per_rollout, label=f"solved: share of rows with all {DIGITS} right")
        axes.axhline(1 / VOCABULARY, color="grey", linestyle=":", label="reward by chance")
        axes.set(xlabel="rollout, one train() call each", ylim=(0, 1), title="Sorting digits")
        axes.legend()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "none"
