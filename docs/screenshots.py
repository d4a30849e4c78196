"""Draws the screenshots of the pages: ``python docs/screenshots.py``, or ``make screenshots``.

They show real output for the installed megatron-core. Versions and places that differ between machines are
replaced by fixed ones.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from megatron_rl_patches.cli.screens import Screen, show_diagnosis
from megatron_rl_patches.doctor import Diagnosis, Framework, Startup, examine

IMAGES = Path(__file__).parent / "images"
VARIABLES = {"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_STRIKT": "1"}
COMMAND = "MEGATRON_RL_PATCHES=1 MEGATRON_RL_PATCHES_STRIKT=1 megatron-rl-patches doctor"


def doctor() -> str:
    """Return the screen of ``doctor`` with megatron-core alone and a misspelt variable, as SVG."""
    console = Console(record=True, width=84, force_terminal=True, file=io.StringIO(), highlight=False)
    console.print(f"$ {COMMAND}", highlight=False, style="bold")
    show_diagnosis(_as_on_any_machine(examine(VARIABLES)), Screen(console))
    svg = console.export_svg(title="megatron-rl-patches doctor", theme=MONOKAI, unique_id="doctor")
    # The reader's own fonts: nothing is fetched.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _as_on_any_machine(diagnosis: Diagnosis) -> Diagnosis:
    core = next(framework for framework in diagnosis.frameworks if framework.name == "megatron.core")
    fixed = Framework(core.name, "site-packages/megatron/core", core.version)
    return replace(
        diagnosis,
        path="site-packages/megatron_rl_patches",
        python="3.12",
        executable="~/venv/bin/python",
        torch="2.13.0",
        wrapt="2.5.2",
        frameworks=tuple(fixed if framework is core else framework for framework in diagnosis.frameworks),
        startup=Startup("site-packages/megatron_rl_patches_startup.pth", True, ""),
        problems=tuple(p for p in diagnosis.problems if p.message.startswith("MEGATRON_RL_PATCHES_STRIKT")),
    )


if __name__ == "__main__":
    (IMAGES / "doctor.svg").write_text(doctor(), encoding="utf-8")
    print(IMAGES / "doctor.svg")
