"""The demo, as users run it: real megatron-core in processes of their own, without and with patches."""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.demo import launch, run_demo
from megatron_rl_patches.inference import estimate_memory
from tests.docs.pages import ROOT
from tests.ranks import on_ranks


def run(capture: pytest.CaptureFixture[str], code: int = 0, **options: int) -> tuple[str, str]:
    """Run the demo, as the command does; return what it prints to stdout and stderr."""
    exit_code = run_demo(**{"rollouts": 2, "ranks": 1, "seed": 0, **options})
    out, err = capture.readouterr()
    assert exit_code == code, err
    return out, err


@on_ranks(1)
def test_the_program_fails_in_the_second_train_and_has_the_same_numbers_with_patches() -> None:
    from megatron_rl_patches.demo import program

    before: list[program.Rollout] = []
    with mock.patch.multiple(program, _PROMPTS=8, _STEPS=1):
        with pytest.raises(AssertionError, match=launch._UPSTREAM_ERROR):
            before.extend(program.Program(seed=0).learn(2))
        with applied(settings=Settings(train_functions=(launch._TRAIN_FUNCTION,))):
            first, second = program.Program(seed=0).learn(2)
    assert before == [first, second]
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert second.kl > 1e-4
    assert 0 < first.reward < 0.2


@pytest.mark.slow
def test_the_demo_says_what_fails_and_learns(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = run(capfd, rollouts=14, ranks=2)
    assert err == ""
    assert all(len(line) <= 80 for line in out.splitlines())
    without, patched = out.split("\n\n")[1:3]
    *_, second, failure = without.splitlines()
    assert second.startswith("rollout   2  reward")
    assert failure == f"rollout   2  train() raises AssertionError: … {launch._UPSTREAM_ERROR}"
    assert f"\n{second}\n" in patched
    assert re.search(
        r"^megatron_rl_patches \S+ in megatron, megatron_rl_patches: .*reentrant-train, ",
        patched,
        re.M | re.S,
    )
    rewards = [float(reward) for reward in re.findall(r"^rollout +\d+  reward (\S+)", patched, re.M)]
    # By chance 1/12.
    assert 0.05 < rewards[0] < 0.14
    assert min(rewards[-2:]) > 2 * max(rewards[:2])

    assert "\nFixed by       reentrant-train\nSame numbers   yes, " in out
    # The reference takes its parameters and nothing else; each rank has half of Adam's two moments.
    [(reference, policy)] = re.findall(r"Reference +(\d+) kB .*\n.* take (\d+) kB", out)
    assert int(policy) == pytest.approx(3 * int(reference), rel=0.01)
    fields = {**launch._SIZES, "num_layers": 1, "num_attention_heads": 32}
    gigabytes = [f"{size / 1e9:.1f}" for size in (estimate_memory(fields, tokens=8192).loss or {}).values()]
    assert re.findall(r"Logits, loss +(\S+) GB .*, (\S+) with lean-loss, (\S+) with lean-head", out) == [
        tuple(gigabytes)
    ]


def test_the_commands_that_come_next_stand_on_the_quickstarts() -> None:
    quickstarts = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "quickstart").glob("*.md"))
    commands = [line.strip() for line in launch._NEXT.splitlines() if line.startswith(" ")]
    assert len(commands) == 7
    assert [command for command in commands if command not in quickstarts] == []


def test_the_plot_has_one_column_or_several_for_each_reward() -> None:
    rows = launch._plot([0.0, 0.1, 0.5, 1.0]).splitlines()[2:]
    assert [row[5::18] for row in rows] == ["   █", "   █", "  ▄█", "  ██", " ▄██"]
    assert max(map(len, launch._plot([0.5] * 1000).splitlines())) <= 77


@pytest.mark.slow
def test_a_failing_rank_surfaces(capfd: pytest.CaptureFixture[str]) -> None:
    _, err = run(capfd, code=1, seed=2**80)
    assert "Program(seed)" in err
    assert err.endswith("see the root cause above\n")


def test_the_program_knows_nothing_of_the_patches() -> None:
    text = Path(launch.__file__).with_name("program.py").read_text()
    assert "megatron_rl_patches" not in text.lower()
    imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
    assert {(node.level, node.module) for node in imported} == {(2, "inference"), (2, "losses")}
