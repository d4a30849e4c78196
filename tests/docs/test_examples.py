"""Every Python file of ``examples/``, run as its first lines say; shell scripts: ``test_shell_blocks.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.worlds.environment import without_ours

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
THIRD_PARTY = EXAMPLES / "third_party_patch"
PROGRAM = """
import megatron_rl_patches
from megatron_rl_patches.testing import cpu_backend, spawn_ranks, tiny_model

def run():
    with cpu_backend():
        from megatron.core import distributed
        for site in megatron_rl_patches.apply("slow-reduction"):
            print(site.target, site.state, flush=True)
        model, _ = tiny_model("dense").build()
        distributed.finalize_model_grads(model)

if __name__ == "__main__":
    spawn_ranks(run, 1, timeout=120)
"""


def run(*command: str | Path, path: str = "", check: bool = True, **variables: str) -> str:
    """Run a Python command in the folder of the examples; return what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES,
        env={**without_ours(), "PYTHONPATH": os.pathsep.join([str(ROOT), path]), **variables},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert check is (done.returncode == 0), done.stderr[-3000:]
    return done.stdout + done.stderr


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_own_loop() -> None:
    lines = re.findall(r"^rank \d: .*$", run("own_loop.py"), re.MULTILINE)
    assert sorted(line[:7] for line in lines) == ["rank 0:", "rank 1:"]
    for line in lines:
        first, second, third = numbers(line)
        assert first > second > third
    assert "a custom no_sync_func is not supported" in run("own_loop.py", "--plain", check=False)


@pytest.mark.parametrize("k", [(), ("24",)], ids=["full", "top-k"])
def test_teacher_and_distillation(k: tuple[str, ...]) -> None:
    output = run("teacher_and_distillation.py", *k)
    divergences = numbers(" ".join(re.findall(r"^rollout .*$", output, re.MULTILINE)))
    assert divergences[-1] < (0.6 if k else 0.5) * divergences[0]
    assert "materialized" not in output


def test_reward_model() -> None:
    lengths = re.findall(r"^sample \d: (\d) values, reward -?\d", run("reward_model.py"), re.MULTILINE)
    assert lengths == ["4", "6", "3"]


def test_my_loop() -> None:
    output = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull, "test_my_loop.py"
    )
    assert "5 passed" in output


def test_third_party_patch(tmp_path: Path) -> None:
    run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--target", tmp_path, THIRD_PARTY),
    )
    (tmp_path / "train.py").write_text(PROGRAM)
    output = run(tmp_path / "train.py", path=str(tmp_path), MEGATRON_RL_PATCHES_REDUCTION_SECONDS="0")
    assert "finalize_model_grads applied" in output
    assert re.search(r"^rank 0: gradients of 1 chunks took \d", output, re.MULTILINE)
