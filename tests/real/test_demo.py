"""The demo, as users run it: real megatron-core in processes of their own, patches by variable alone.

These need the package to be installed (an editable install will do): the startup file must fire.
"""

from __future__ import annotations

import ast
import json
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron_rl_patches import MegatronRLPatchesError, Settings, applied
from megatron_rl_patches.demo import launch, run_demo
from megatron_rl_patches.doctor import Startup
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

ROLLOUTS = 14
UPSTREAM = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
PROGRAM = ("policy", "training", "program", "teachers")


class Run(NamedTuple):
    figures: Any
    out: str
    err: str


@pytest.fixture(autouse=True)
def _one_folder_of_teachers(monkeypatch: pytest.MonkeyPatch, teachers_folder: str) -> None:
    """Teachers are trained by the first run of these tests, and loaded by the others."""
    monkeypatch.setattr(launch.tempfile, "TemporaryDirectory", lambda **_: nullcontext(teachers_folder))


def run(capture: pytest.CaptureFixture[str], folder: Path, code: int = 0, **options: Any) -> Run:
    """Run the demo, as the command does, and read the figures that it writes."""
    file = folder / "figures.json"
    defaults = {"rollouts": ROLLOUTS, "ranks": 2, "seed": 0, "plot_file": folder / "plot.png"}
    exit_code = run_demo(json_file=file, **{**defaults, **options})
    out, err = capture.readouterr()
    assert exit_code == code, err
    figures = json.loads(file.read_text()) if file.exists() else None
    return Run(figures and SimpleNamespace(**figures), out, err)


def test_the_plot_is_of_this_task() -> None:
    from megatron_rl_patches.demo import figures, policy

    assert (figures._DIGITS, figures._VOCABULARY) == (policy.DIGITS, policy.VOCABULARY)


def _two_small_rollouts(folder: str) -> list[float]:
    with cpu_backend(), applied(settings=Settings(train_functions=(launch._TRAIN_FUNCTION,))):
        from megatron_rl_patches.demo import policy, program, teachers

        policy.initialize(0)
        with (
            mock.patch.multiple(teachers, _STEPS=2),
            mock.patch.multiple(program, _PROMPTS=16, _STEPS=2),
        ):
            rollouts = program.learn(2, 0, teachers.Teachers(Path(folder), 0))
            return [rollout.exact_match for rollout in rollouts]


def test_the_program_runs(tmp_path: Path) -> None:
    """Teachers, sampling, scores and two calls of ``train()``, on one rank and in the smallest size."""
    assert spawn_ranks(_two_small_rollouts, 1, str(tmp_path)) == [[0.0, 0.0]]


@pytest.mark.slow
def test_the_reward_rises_over_repeated_calls_of_train(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, out, err = run(capfd, tmp_path)
    rewards = figures.reward_per_rollout
    assert len(rewards) == len(figures.solved_per_rollout) == ROLLOUTS
    # Of chance, 1/12 or less, to about 0.4.
    assert 0.05 < rewards[0] < 0.14
    assert min(rewards[-3:]) > 2 * max(rewards[:2])
    # Closer to the teachers: of about 2.7 nats to 1.5.
    divergences = figures.divergence_per_rollout
    assert len(divergences) == ROLLOUTS
    assert max(divergences[-3:]) < 0.75 * min(divergences[:2])

    # A teacher that only scores takes its parameters and nothing else, however many are kept in host memory.
    memory = {use: sum(parts.values()) for use, parts in figures.memory.items()}
    assert figures.memory["inference-only, device"].keys() == {"parameters"}
    assert memory["training, device"] > 2.9 * memory["inference-only, device"]
    assert memory["training + 2 teachers, host"] == 2 * memory["inference-only, device"]

    assert figures.patched
    assert figures.error is None
    assert "reentrant-train (megatron.core: 3 applied" in figures.patches
    assert "lean-head (megatron.core:" in figures.patches
    assert not figures.makes_logits
    assert figures.logits == 4 * 32 * 12 * 12  # answers of a microbatch, tokens, ids
    assert "(never materialized: lean-head)" in out.replace("│\n│", "")
    assert (figures.ranks, figures.backend, figures.seed) == (2, "gloo", 0)
    assert figures.steps >= 2 * ROLLOUTS
    assert figures.seconds > 0
    assert {"megatron_rl_patches", "megatron-core", "torch", "python"} <= figures.versions.keys()

    assert f"rollout {ROLLOUTS:3d}  reward {rewards[-1]:.3f}" in out
    assert f"{ROLLOUTS}/{ROLLOUTS}" in err  # the progress bar
    assert "wall time" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_reward_rises_where_the_model_is_split(
    split: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, _, _ = run(capfd, tmp_path, rollouts=5, **{split: 2})
    assert figures.reward_per_rollout[-1] > 1.1 * figures.reward_per_rollout[0]
    # Half of the parameters and a few that both ranks have, and all of the optimizer's state for them.
    training = figures.memory["training, device"]
    assert training["exp avg"] == training["parameters"] < 0.52 * 410_000


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (2, (3, 1), "tensor-parallel size 3, pipeline-parallel size 1: .* 4 attention heads and 2 layers"),
        (2, (2, 2), "2 ranks are no multiple of .* pass --ranks 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(ranks: int, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(MegatronRLPatchesError, match=message):
        run_demo(
            rollouts=1, ranks=ranks, seed=0, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]
        )


@pytest.mark.slow
def test_distillation(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it learns is tested in ``test_distillation.py``."""
    figures, out, _ = run(capfd, tmp_path, rollouts=1, ranks=1, distill=True)
    for by_order in (*figures.divergence_per_rollout.values(), *figures.score_per_rollout.values()):
        assert [len(values) for values in by_order.values()] == [1, 1]
    targets = {"routed, top-k", "routed, full", "mixture, top-k", "mixture, full"}
    assert figures.divergence_per_rollout.keys() == figures.bytes_per_token.keys() == targets
    assert min(figures.teachers.values()) > 0.9
    assert "mixture, full, descending: reverse KL" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_patches_the_second_train_fails(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures, out, _ = run(capfd, tmp_path, ranks=1, without_patches=True)
    assert not figures.patched
    assert len(figures.reward_per_rollout) == 1
    assert figures.error is not None
    assert figures.error.splitlines()[-1].startswith(UPSTREAM)
    assert figures.error in out
    assert "This is what the patches are for" in out


@pytest.mark.slow
def test_without_patches_a_run_that_does_not_fail_is_a_failure(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, _, err = run(capfd, tmp_path, rollouts=1, ranks=1, code=1, without_patches=True)
    assert "did not appear" in err
    assert figures.error is None


@pytest.mark.slow
def test_without_lean_head_the_rewards_are_the_same(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, _, _ = run(capfd, tmp_path, rollouts=4, ranks=1)
    others, _, _ = run(capfd, tmp_path, rollouts=4, ranks=1, without_lean_head=True)
    assert (figures.makes_logits, others.makes_logits) == (False, True)
    assert figures.reward_per_rollout == pytest.approx(others.reward_per_rollout, abs=0.01)


@pytest.mark.slow
def test_a_failing_rank_surfaces(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_TRAIN_FUNCTION", "megatron_rl_patches.demo.training:another")
    figures, _, err = run(capfd, tmp_path, rollouts=2, ranks=1, code=1)
    assert figures is None
    assert UPSTREAM in err
    assert "see the root cause above" in err


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_the_ranks_end_with_the_command(end: signal.Signals, teachers_folder: str, tmp_path: Path) -> None:
    folder = shutil.copytree(teachers_folder, tmp_path / "demo")
    # Whoever started the tests may have had interrupts ignored, which is inherited.
    script = (
        "import contextlib, signal, tempfile; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"tempfile.TemporaryDirectory = lambda **_: contextlib.nullcontext({str(folder)!r});"
        "from megatron_rl_patches.cli import main; main(['demo', '--rollouts=1000'])"
    )
    command, errors = [sys.executable, "-c", script], tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as demo,
    ):
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("rollout   1"), errors.read_text()
        demo.send_signal(end)
        # The ranks hold the other end of the pipe: it closes when the last of them is gone.
        demo.communicate(timeout=60)
    assert demo.returncode != 0
    assert folder.exists() == (end is signal.SIGINT)  # the command removes it itself, unless it is killed


def test_a_variable_without_effect_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "examine_startup", lambda environ: Startup(None, False, "not installed"))
    with pytest.raises(MegatronRLPatchesError, match="no effect in this environment: not installed"):
        run_demo(rollouts=2, ranks=1, seed=0)


def test_the_program_knows_nothing_of_the_patches() -> None:
    for name in PROGRAM:
        text = Path(launch.__file__).with_name(f"{name}.py").read_text()
        assert "megatron_rl_patches" not in text.lower()
        imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
        packages = {(node.module or "").partition(".")[0] for node in imported if node.level > 1}
        assert packages <= {"inference", "losses"}
        siblings = {node.module for node in imported if node.level == 1} - {None}
        assert siblings | {a.name for n in imported if not n.module for a in n.names} <= set(PROGRAM)
