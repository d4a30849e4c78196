"""Every Python file of ``examples/``, run as its first lines say, and what ``docs/adding-a-patch.md`` adds.

``test_shell_blocks.py`` runs the shell scripts.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT
from tests.worlds.files import write
from tests.worlds.program import without_ours

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


def run(*command: str | Path, cwd: Path = EXAMPLES, path: str = "", code: int = 0, **variables: str) -> str:
    """Run a Python command; return what it prints."""
    folders = [*([] if cwd == EXAMPLES else [str(cwd)]), str(ROOT), path]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**without_ours(), "PYTHONPATH": os.pathsep.join(folders), **variables},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.slow
def test_own_loop() -> None:
    lines = re.findall(r"^rank \d: .*$", run("own_loop.py"), re.MULTILINE)
    assert sorted(line[:7] for line in lines) == ["rank 0:", "rank 1:"]
    for line in lines:
        first, second, third = numbers(line)
        assert first > second > third


@pytest.mark.nightly
def test_own_loop_without_the_package() -> None:
    assert "a custom no_sync_func is not supported" in run("own_loop.py", "--plain", code=1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [(), pytest.param(("24",), marks=pytest.mark.nightly)], ids=["full", "top-k"])
def test_teacher_and_distillation(k: tuple[str, ...]) -> None:
    output = run("teacher_and_distillation.py", *k)
    divergences = numbers(" ".join(re.findall(r"^rollout .*$", output, re.MULTILINE)))
    assert divergences[-1] < (0.6 if k else 0.5) * divergences[0]
    assert "materialized" not in output


@pytest.mark.slow
def test_reward_model() -> None:
    lengths = re.findall(r"^sample \d: (\d) values, reward -?\d", run("reward_model.py"), re.MULTILINE)
    assert lengths == ["4", "6", "3"]


@pytest.mark.slow
def test_training_service() -> None:
    """Both ranks have the same norms, and losses of their own, which fall."""
    lines = re.findall(r"^rank \d:(.*)$", run("training_service.py"), re.MULTILINE)
    first, second = map(numbers, lines)
    assert len(first) == 8 and first[1::2] == second[1::2] and first[0] > first[-2]


@pytest.mark.slow
def test_my_loop() -> None:
    """In a folder of the user's own, and from the root of a clone, whose configuration is not for it."""
    for folder, file in (EXAMPLES, "test_my_loop.py"), (ROOT, "examples/test_my_loop.py"):
        assert "6 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, cwd=folder)


@pytest.mark.slow
def test_third_party_patch(tmp_path: Path) -> None:
    run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--target", tmp_path, THIRD_PARTY),
    )
    (tmp_path / "train.py").write_text(PROGRAM)
    output = run(tmp_path / "train.py", path=str(tmp_path), MEGATRON_RL_PATCHES_REDUCTION_SECONDS="0")
    assert "finalize_model_grads applied" in output
    assert re.search(r"^rank 0: gradients of 1 chunks took \d", output, re.MULTILINE)


# --- a patch of one's own


PAGE = "docs/adding-a-patch.md"
FILES = {one.head[2:]: one.code for one in pages.blocks("python", PAGE) if one.head.endswith(".py")}
PATCH = "megatron_rl_patches/patches/quiet_eval.py"
TEST = "tests/unit/patches/test_quiet_eval.py"
OURS = "my_package/quiet_eval.py"


@pytest.mark.slow
def test_the_example_is_a_patch_of_this_repository(tmp_path: Path) -> None:
    """In a copy with the files of the page."""
    assert set(FILES) == {TEST, OURS}
    for name in ("megatron_rl_patches", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    startup = Path(shutil.copy(ROOT / "_megatron_rl_patches_startup.py", tmp_path))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ours = FILES[OURS].replace("from megatron_rl_patches import Patch", "from ..engine.patch import Patch")
    write(tmp_path, {TEST: FILES[TEST], PATCH: ours})
    files = (TEST, "tests/unit/test_every_patch.py", "tests/unit/test_architecture.py")
    startup.write_text(startup.read_text().replace('("megatron", ', '("megatron", "framework", '))
    cases = ("-k", "quiet or evaluate or root or arrows")
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *cases, cwd=tmp_path)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output
    assert "quiet-eval" in run("-m", "megatron_rl_patches", "check", cwd=tmp_path)
