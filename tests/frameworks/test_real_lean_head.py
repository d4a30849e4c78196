"""``lean-head`` in the training loop of unmodified checkouts, as in ``test_real_reentry.py``.

The framework's own ``train()`` and ``forward_only``, with a vocabulary so large that the logits take most of
the memory.
"""

import logging
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_rl_patches import applied
from tests.frameworks.import_stubs import job_of, prepare
from tests.frameworks.rollouts import LOCAL, results_of, with_layers
from tests.ranks import on_ranks
from tests.references.live_bytes import live_bytes, reachable_bytes

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

TOKENS, VOCABULARY = 1600, 32768
WAYS = {"unpatched": (), "lean-loss": ("lean-loss",), "lean-head": ("lean-loss", "lean-head")}


@with_layers("lean-head")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
@on_ranks(lambda ranks: ranks, timeout=500)
def test_training_never_makes_the_logits(framework: str, layers: str, ranks: int, paths: list[str]) -> None:
    prepare(paths)
    from tests.references import tiny_gpt

    # Two samples are packed where the layers can do that.
    length = TOKENS if layers == LOCAL else TOKENS // 2
    tiny_gpt.VOCABULARY, tiny_gpt.SEQUENCE = VOCABULARY, length
    tiny_gpt.LAYERS = tiny_gpt.HEADS = 1  # without a kernel, attention takes tokens × tokens for each
    job_type = job_of(framework, [])
    from tests.frameworks.real_jobs import POLICY

    one = {"num_layers": 1, "num_attention_heads": 1}
    # In bfloat16, rounding decides whether a token on the edge of the range is clipped.
    flags = POLICY | {"eps_clip": 10.0}

    def run(patches: tuple[str, ...]) -> tuple[float, list[torch.Tensor]]:
        """Return the peak in logits, and losses, gradient norms and log-probabilities."""
        before = reachable_bytes()
        log = logging.getLogger("megatron_rl_patches")
        with applied("reentrant-train", *patches), mock.patch.object(log, "log") as logged:
            job = job_type(flags, layers=layers, vocab_size=VOCABULARY, seq_length=length, config=one)
            parameters = sum(p.numel() * p.element_size() for p in job.model[0].parameters())
            built = reachable_bytes() - before - parameters
            with results_of(job.module, "train_one_step") as steps:  # losses, gradient norm, and more
                peak = live_bytes(lambda: job.train(1)).peak
                job.train(2)
            assert not [call for call in logged.call_args_list if "logits" in str(call)]
            losses = torch.tensor([float(next(iter(step[0].values()))) for step in steps])
            norms = torch.tensor([float(step[1]) for step in steps])
            return (built + peak) / (4 * TOKENS * VOCABULARY), [losses, norms, torch.cat(job.log_probs())]

    runs = {name: run(patches) for name, patches in WAYS.items()}
    reference = runs["lean-loss"][1]
    for _, values in runs.values():
        # Parameters are bfloat16, and have copies in float32.
        torch.testing.assert_close(values, reference, rtol=4e-3, atol=4e-3)
    peaks = {name: round(peak, 2) for name, (peak, _) in runs.items()}
    print(f"{framework}, peak beyond the parameters, in float32 logits: {peaks}")
    assert peaks["lean-head"] < 0.75 < 2 < peaks["lean-loss"] < peaks["unpatched"]


@pytest.mark.runs("multi-token prediction", ranks=1)
@pytest.mark.parametrize("framework", ["slime"])
@on_ranks(1, timeout=300)
def test_multi_token_prediction(framework: str, tmp_path: Path, paths: list[str]) -> None:
    """Megatron-LM is that of slime's image, which has labels for it: the pin and slime's diff against it."""
    slime, megatron = map(Path, paths)
    shutil.copytree(megatron / "megatron", tmp_path / "megatron")
    patch = slime / "docker" / "patch" / "latest" / "megatron.patch"
    subprocess.run(["git", "apply", "--include=megatron/*", str(patch)], cwd=tmp_path, check=True)
    job_type = job_of(framework, [str(slime), str(tmp_path)])

    def run(patches: tuple[str, ...]) -> list[dict[str, float]]:
        """Return what slime logs in each step of two rollouts."""
        with applied("reentrant-train", *patches):
            job = job_type({"enable_mtp_training": True}, kind="mtp")
            with mock.patch.object(job.module.logging_utils, "log") as log:
                job.train(2)
                job.log_probs()
                job.train(1)
        return [call.args[1] for call in log.call_args_list]

    runs = {name: run(patches) for name, patches in WAYS.items()}
    assert all(step["train/mtp_loss"] > 1 for step in runs["lean-head"])
    for name, steps in runs.items():
        # Unpatched, gradients may be rounded to bfloat16: slime v0.2.4's are.
        tolerance = 4e-3 if name == "unpatched" else 1e-4
        for step, expected in zip(steps, runs["lean-loss"], strict=True):
            assert step == pytest.approx(expected, rel=tolerance)
    assert len(runs["lean-head"]) == 3
