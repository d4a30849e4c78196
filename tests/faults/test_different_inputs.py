"""Ranks with different inputs: the one whose input is refused says why, the others give up in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_rl_patches import PatchError, applied, revert, verify_ranks
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.faults.groups import error_of, timed_out
from tests.real.test_interruption import SETTINGS

ROWS, VOCABULARY = 6, 32


class Outcome(NamedTuple):
    """What one rank reports."""

    error: str
    as_before: bool  # weights and training mode


# -- each is called with: the model that trains, and whether this rank's input is wrong


def log_probs(trainee: Any, wrong: bool) -> None:
    from megatron.core import parallel_state

    from megatron_rl_patches.losses import vocab_parallel_log_probs

    vocab_parallel_log_probs(
        torch.randn(ROWS, VOCABULARY // 2),
        torch.zeros(ROWS - wrong, dtype=torch.int64),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


def scoring(trainee: Any, wrong: bool) -> None:
    from megatron_rl_patches.inference import forward_log_probs

    forward_log_probs(trainee.model, [_microbatch(16 + wrong)], progress=False)


def scoring_wrong_logits(trainee: Any, wrong: bool) -> None:
    from megatron_rl_patches.inference import forward_log_probs

    def forward(chunk: Any, batch: dict[str, Any]) -> torch.Tensor:
        positions = torch.arange(16).expand(2, -1)
        logits: torch.Tensor = chunk(batch["tokens"], positions, None)
        return logits[:, : 16 - wrong]

    forward_log_probs(trainee.model, [_microbatch(16)], forward=forward, progress=False)


def topk(trainee: Any, wrong: bool) -> None:
    from megatron_rl_patches.inference import forward_topk

    forward_topk(trainee.model, [_microbatch(16)], k=0 if wrong else 4, progress=False)


def training(trainee: Any, wrong: bool) -> None:
    from megatron.core import parallel_state

    from megatron_rl_patches.losses import vocab_parallel_log_probs
    from tests.real import tiny_gpt

    def loss(labels_n: torch.Tensor, logits_bsv: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs_n = vocab_parallel_log_probs(
            logits_bsv.flatten(0, 1), labels_n, tp_group=parallel_state.get_tensor_model_parallel_group()
        )
        return -log_probs_n.mean(), {"loss": -log_probs_n.detach().mean()}

    def forward_step(data: Any, chunk: Any) -> Any:
        batch = next(data)
        output = chunk(batch["tokens"], batch["position_ids"], None)
        return output, partial(loss, batch["labels"].flatten()[int(wrong) :])

    with mock.patch.object(tiny_gpt, "forward_step", forward_step):
        trainee.train(1)


def _microbatch(length: int) -> dict[str, Any]:
    return {"tokens": torch.ones(2, 16, dtype=torch.int64), "lengths": [16, length]}


CASES: list[tuple[dict[str, int], Callable[[Any, bool], None]]] = [
    ({"tp": 2}, log_probs),
    ({"tp": 2}, scoring),
    ({"tp": 2}, scoring_wrong_logits),
    ({"tp": 2}, topk),
    ({"tp": 2}, training),
    ({}, training),
    ({"pp": 2}, training),
]


def _campaign(folder: str) -> list[Outcome]:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        return [
            _outcome(sizes, case, Path(folder), str(number)) for number, (sizes, case) in enumerate(CASES)
        ]


def _outcome(sizes: dict[str, int], case: Callable[[Any, bool], None], folder: Path, name: str) -> Outcome:
    import torch.distributed as dist

    from tests.faults.groups import meet, short_lived_groups
    from tests.real.faults import Trainee
    from tests.real.tiny_gpt import Options, Parallelism

    with short_lived_groups(folder, name) as store:
        trainee = Trainee(Options(parallelism=Parallelism(**sizes)))
        trainee.train(1)
        before = trainee.checksums()
        error = error_of(partial(case, trainee, dist.get_rank() == 1))
        as_before = trainee.checksums() == before and all(chunk.training for chunk in trainee.model)
        meet(store, "after the error", dist.get_rank())
        return Outcome(error, as_before)


@pytest.mark.slow
def test_one_rank_is_refused(tmp_path: Path) -> None:
    first, second = spawn_ranks(_campaign, 2, str(tmp_path), timeout=240)
    for case, waiting, refused in zip(CASES, first, second, strict=True):
        assert refused.error.startswith("InvalidInputError: "), (case, refused)
        assert timed_out(waiting.error), (case, waiting)
        assert refused.as_before and waiting.as_before, case


def _train_without_the_patch(folder: str) -> str:
    import torch.distributed as dist

    from tests.faults.groups import meet, short_lived_groups

    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        from tests.real.faults import Trainee
        from tests.real.tiny_gpt import Options

        with short_lived_groups(Path(folder), "unpatched") as store:
            trainee = Trainee(Options(overlap_param_gather=False))
            trainee.train(1)
            if dist.get_rank() == 1:
                revert("reentrant-train")
            error = error_of(partial(trainee.train, 1))
            meet(store, "after the error", dist.get_rank())
            return error


@pytest.mark.slow
def test_a_rank_without_the_patch_is_no_hang(tmp_path: Path) -> None:
    patched, unpatched = spawn_ranks(_train_without_the_patch, 2, str(tmp_path), timeout=90)
    assert unpatched.startswith("AssertionError: When overlap_grad_reduce is True"), unpatched
    assert timed_out(patched), patched


def _one_without_the_patch() -> list[str]:
    import torch.distributed as dist

    with cpu_backend():
        import megatron.core.distributed  # noqa: F401

        messages = []
        for rank in (0, 1):
            with applied("reentrant-train", settings=SETTINGS):
                verify_ranks()
                if dist.get_rank() == rank:
                    revert("reentrant-train")
                with pytest.raises(PatchError) as error:
                    verify_ranks()
                messages.append(str(error.value))
        return messages


def test_a_rank_without_the_patch_is_named() -> None:
    """With two ranks, neither of them is in the majority."""
    messages, messages_of_other = spawn_ranks(_one_without_the_patch, 2, timeout=60)
    assert messages == messages_of_other
    for states, text in zip([("reverted", "applied"), ("applied", "reverted")], messages, strict=True):
        assert re.search(
            r"reentrant-train: megatron\.core\S+\.disable_forward_pre_hook: "
            rf"rank 0: {states[0]} \(code \w+\); rank 1: {states[1]} \(code \w+\)\n",
            text,
        ), text
