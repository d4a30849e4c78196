"""The demo, as users run it: real megatron-core in processes of their own, patches by variable alone.

These need the package to be installed (an editable install will do): the startup file must fire.
"""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest

from megatron_rl_patches import MegatronRLPatchesError, Settings, applied
from megatron_rl_patches.demo import launch, run_demo
from megatron_rl_patches.doctor import Startup
from tests.ranks import on_ranks

UPSTREAM = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"


def run(capture: pytest.CaptureFixture[str], code: int = 0, **options: int) -> tuple[str, str]:
    """Run the demo, as the command does; return what it prints to stdout and stderr."""
    exit_code = run_demo(**{"rollouts": 2, "ranks": 1, "seed": 0, **options})
    out, err = capture.readouterr()
    assert exit_code == code, err
    return out, err


@on_ranks(1)
def test_the_program_runs() -> None:
    with applied(settings=Settings(train_functions=(launch._TRAIN_FUNCTION,))):
        from megatron_rl_patches.demo import program

        with mock.patch.multiple(program, _PROMPTS=16, _STEPS=2):
            first, second = program.Program(seed=0).learn(2)
        assert first.kl == pytest.approx(0.0, abs=1e-6)
        assert second.kl > 1e-4
        assert 0 < first.reward < 0.2


@pytest.mark.slow
def test_the_reward_rises_over_repeated_calls_of_train(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = run(capfd, rollouts=14, ranks=2)
    rewards = [float(reward) for reward in re.findall(r"^rollout +\d+  reward (\S+)", out, re.MULTILINE)]
    assert len(rewards) == 14
    # By chance 1/12.
    assert 0.05 < rewards[0] < 0.14
    assert min(rewards[-3:]) > 2 * max(rewards[:2])

    # Before it is silent, it says why.
    before, _, rest = out.partition("importing torch and megatron-core")
    assert before == "starting 2 ranks with MEGATRON_RL_PATCHES=1\n"
    assert "; gloo, seed 0\n" in rest and "first rollout …\nrollout   1" in rest
    # The reference takes its parameters and nothing else; each rank has half of Adam's two moments.
    line = r"policy: (\d+) kB .*parameters (\d+),.* moments (\d+)\)\nreference: (\d+) kB"
    total, parameters, moments, reference = map(int, re.findall(line, out)[0])
    assert parameters == reference == pytest.approx(moments, rel=0.01)
    assert total == pytest.approx(3 * reference, rel=0.01)

    assert "14 rollouts, one train() call each" in out.splitlines()[-1]
    in_place = r"^megatron_rl_patches \S+ in megatron, megatron_rl_patches: .*reentrant-train, "
    assert re.search(in_place, err, re.MULTILINE)
    assert "Warning" not in err


@pytest.mark.slow
def test_without_patches_the_second_train_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explanation stands alone and last; a run that does not fail is a failure."""
    out, err = run(capfd, without_patches=True)
    failed = rf"^rollout   1  reward .*\n.*program.py, line \d+, in train\n{UPSTREAM}"
    assert re.search(failed, out, re.MULTILINE)
    assert out.endswith(f"\n{launch._EXPLANATION}\n")
    assert err == ""
    monkeypatch.setattr(launch, "results_of", lambda *args: [None])
    out, err = run(capfd, code=1, without_patches=True)
    assert "did not appear" in err and launch._EXPLANATION not in out


@pytest.mark.slow
def test_a_failing_rank_surfaces(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_TRAIN_FUNCTION", "megatron_rl_patches.demo.program:another")
    _, err = run(capfd, code=1)
    assert UPSTREAM in err
    assert err.endswith("see the root cause above\n")


def test_a_variable_without_effect_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "examine_startup", lambda environ: Startup(None, False, "not installed"))
    with pytest.raises(MegatronRLPatchesError, match="no effect in this environment: not installed"):
        run_demo(rollouts=2, ranks=1, seed=0)


def test_the_program_knows_nothing_of_the_patches() -> None:
    text = Path(launch.__file__).with_name("program.py").read_text()
    assert "megatron_rl_patches" not in text.lower()
    imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
    assert {(node.level, node.module) for node in imported} == {(2, "inference"), (2, "losses")}
