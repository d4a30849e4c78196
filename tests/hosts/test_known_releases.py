"""Verdicts on the releases of megatron-core that the registry has, as recorded: a changed judgement is seen.

Hosts that are not on the registry are judged from checkouts; their verdicts are in ``docs/compatibility.md``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches.engine.survey import survey

# Release -> the Python and the platform that its wheel is for; wheels are read, not installed.
RELEASES = {
    "0.12.3": ("3.11", "manylinux_2_28_aarch64"),
    "0.13.1": ("3.11", "manylinux_2_28_aarch64"),
    "0.14.0": ("3.12", "manylinux_2_28_x86_64"),
    "0.15.3": ("3.12", "manylinux_2_28_x86_64"),
    "0.16.1": ("3.12", "manylinux_2_28_x86_64"),
    "0.17.1": ("3.12", "manylinux_2_28_x86_64"),
    "0.18.2": ("3.12", "manylinux_2_28_x86_64"),
    "0.19.2": ("3.12", "manylinux_2_28_x86_64"),
}
CORE = {
    "DistributedDataParallel.disable_forward_pre_hook": "fits",
    "DistributedDataParallel.enable_forward_pre_hook": "fits",
    "optimizer.get_megatron_optimizer": "fits",
}
TRAINING = {
    "training.train": "fits",
    "training.save_checkpoint_and_time": "fits",
    "training.get_model": "fits",
    "checkpointing.load_checkpoint": "fits",
}
# From 0.17 on the wheel has megatron.training too.
RECORDED = {release: CORE | (TRAINING if release >= "0.17" else {}) for release in RELEASES}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_verdicts_are_as_recorded(release: str, tmp_path: Path) -> None:
    python, platform = RELEASES[release]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    wanted = ["--python-version", python, "--platform", platform, f"megatron-core=={release}"]
    subprocess.run([*pip, "--dest", str(tmp_path), *wanted], check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    findings = survey(open_source(str(wheel)), registry.patches().values(), Settings())
    told = {_short(f.target): f.state for f in findings if f.state != "absent"}
    assert told == RECORDED[release]


def _short(target: str) -> str:
    return ".".join(target.split(".")[-2:])
