"""What the pages take for granted: names that their blocks use, and what must hold after them.

Loaded on a rank, inside ``cpu_backend()``, in a folder that has the checkpoints of two teachers.
"""

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches.inference import TeacherPool, build_inference_model
from megatron_rl_patches.losses import PolicyBatch, PolicyOptions, SequenceLayout
from megatron_rl_patches.testing import TinyModel
from tests.docs.pages import ROOT, public_names
from tests.references import tiny_gpt
from tests.worlds.model import fill_at_random, save

TEACHERS = ("math", "code")
LENGTHS, RESPONSES = [6, 9], [3, 5]
VARIABLE = {"env_vars": {"MEGATRON_RL_PATCHES": "1"}}
VOCABULARY = 128  # the pages ask for a top-k of 64
OPTIONS = TinyModel(vocab_size=VOCABULARY)

Names = dict[str, Any]


def teacher_model(seed: int) -> list[Any]:
    """As ``build_inference_model`` returns it, with weights."""
    model = tiny_gpt.inference_model(TinyModel(vocab_size=VOCABULARY, bf16=True))
    fill_at_random(model, seed)
    return model


def save_teachers(folder: Path) -> None:
    """Checkpoints of two teachers, as Megatron-LM lays them out with ``--ckpt-format torch_dist``."""
    for seed, name in enumerate(TEACHERS):
        save(teacher_model(seed), folder / "checkpoints" / name)


def logits_of(rows: int) -> torch.Tensor:
    """``[rows, vocabulary]``; not a leaf, as those of a model."""
    leaf = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    return leaf.requires_grad_() * 1.0


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


LOSS_MASKS = [torch.ones(length) for length in RESPONSES]
TRAIN_ON = partial(tiny_gpt.train, num_microbatches=[2], options=OPTIONS)


def common() -> Names:
    """For every page that has nothing of its own."""
    pool = TeacherPool(teacher_model(3))
    pool.add("math", "checkpoints/math")
    return {
        "ray": mock.Mock(),
        "Trainer": mock.Mock(),
        "model_provider": OPTIONS.provider,
        "config": OPTIONS.transformer_config(),
        "microbatches": [
            {"tokens": tokens[None], "total_lengths": [len(tokens)], "response_lengths": [response]}
            for tokens, response in zip(samples(), RESPONSES, strict=True)
        ],
        "logits": logits_of(8),
        "targets": torch.tensor([1, 4, 2]),
        "response_rows": torch.tensor([2, 5, 6]),
        "tp_group": None,
        "tokens": torch.zeros(2, 52, dtype=torch.int64),
        "student": teacher_model(2),
        "indices": [0, 1],
        "loss_masks": LOSS_MASKS,
        "layout": SequenceLayout.build(LENGTHS, RESPONSES),
        "pool": pool,
    }


def check_loss(result: tuple[torch.Tensor, Any, Any]) -> None:
    """Of a loss function, on the two samples."""
    loss, tokens, metrics = result
    loss.backward()
    assert loss.isfinite() and int(tokens) == sum(RESPONSES) and metrics


def after_distillation(names: Names) -> None:
    for teacher in ("teacher_topk", "teacher_full"):
        names["teacher_topk"] = names[teacher]  # which the loss function reads
        check_loss(names["loss_func"](logits_of(sum(LENGTHS))[None]))


def losses() -> Names:
    tokens = samples()
    batch = {
        "tokens": tokens,
        "input_ids": torch.cat(tokens)[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "total_lengths": LENGTHS,
        "response_lengths": RESPONSES,
        "advantages": torch.tensor([1.0, -1.0]),
        "loss_masks": LOSS_MASKS,
        "log_probs": [torch.full((length,), -3.0) for length in RESPONSES],
    }
    head = {"hidden": torch.randn(3, 2, 8, requires_grad=True), "output_weight": torch.randn(50, 8)}
    return {"tp_group": None, "_batch": batch, "targets": torch.arange(6), **head}


def after_losses(names: Names) -> None:
    assert names["logits"].is_deferred
    names["log_probs"].sum().backward()
    assert names["hidden"].grad.any()

    def packed_model(
        input_ids: torch.Tensor, position_ids: Any, attention_mask: Any, packed_seq_params: Any
    ) -> torch.Tensor:
        """In place of a chunk on packed samples, for whose attention Megatron needs a GPU."""
        first, second = LENGTHS
        for ends in (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv):
            assert ends.tolist() == [0, first, first + second] and ends.dtype == torch.int32
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == max(LENGTHS)
        return logits_of(input_ids.shape[1])[None]

    logits, loss_func = names["forward_step"](iter([names["_batch"]]), packed_model)
    check_loss(loss_func(logits))
    assert [round(names["averages"][f"tis_{x}"], 3) for x in ("weight_used", "clip_fraction")] == [0.865, 0.2]


def after_activation(names: Names) -> None:
    for started in (names["ray"].init, names["Trainer"].options):
        started.assert_called_once_with(runtime_env=VARIABLE)
    assert names["Trainer"].options.return_value.remote.called


def own_loop() -> Names:
    options = TinyModel(vocab_size=VOCABULARY, overlap_param_gather=False)  # until the page applies the patch
    model, optimizer = options.build()
    steps = {"data_iterator": tiny_gpt.data_iterators(options), "num_microbatches": [2], "options": options}
    names = {"my_rl": SimpleNamespace(train=tiny_gpt.train), "rollouts": range(3)}
    return {"model": model, "optimizer": optimizer, "steps": steps, **names}


def after_own_loop(names: Names) -> None:
    assert len(names["losses"]) == 3 and all(loss == loss for (loss,) in names["losses"])


def after_memory_page(names: Names) -> None:
    assert [*names["phases"].peaks] == ["other", "scoring", "forward", "loss and backward", "step", "save"]


def after_reentry_page(names: Names) -> None:
    """A rollout that breaks off, then one that does not, and a save that finds the hooks as they were."""
    model, optimizer = OPTIONS.build()
    with pytest.raises(TypeError):
        names["rollout"](model, optimizer, [None])
    assert names["rollout"](model, optimizer, tiny_gpt.data_iterators(OPTIONS))
    assert names["save"](model, lambda model: model[0].enable_forward_pre_hook()) is None
    assert not model[0].remove_forward_pre_hook_handles
    sizes = {"seq_length": 0, "micro_batch_size": 0, "forward_step_func": tiny_gpt.forward_step}
    data = tiny_gpt.SyntheticData()
    assert names["step_on"](model, optimizer, [[next(data)], [next(data), next(data)]], **sizes)[0]
    in_bf16 = TinyModel(vocab_size=VOCABULARY, bf16=True, grad_reduce_in_fp32=False)
    inside, after = names["sizes_of"](*in_bf16.build(), tiny_gpt.data_iterators(OPTIONS))
    assert inside > after == 0


def docstrings() -> Names:
    """For the examples in docstrings of public names."""
    model, optimizer = OPTIONS.build()
    example = runpy.run_path(str(ROOT / "examples" / "reward_model.py"))
    provider, config = example["provider_with_head"](OPTIONS), OPTIONS.transformer_config()
    return common() | {
        **public_names(),
        "model": model,
        "optimizer": optimizer,
        "teacher": teacher_model(4),
        "reward_model": build_inference_model(provider, config, dtype="fp32"),
        "options": PolicyOptions(),
        "batch": PolicyBatch(torch.tensor([1.0, -1.0]), LOSS_MASKS),
        "tokens": samples(),
        "output": None,
        "partial": partial,
        "loss_func": lambda batch, logits: logits.sum(),
        "k": 4,
        "teacher_logits": logits_of(8).detach(),
    }


# Page -> the names that its blocks find there, and what must hold after them.
SETUPS = {
    "docs/distillation.md": (common, after_distillation),
    "docs/how-it-works.md": (common, after_activation),
    "docs/inference.md": (common, lambda names: None),
    "docs/losses.md": (losses, after_losses),
    "docs/memory.md": (lambda: common() | own_loop() | {"torch": torch}, after_memory_page),
    "docs/quickstart/own-loop.md": (own_loop, after_own_loop),
    "docs/patches/reentrant-train.md": (partial(dict, train_on=TRAIN_ON), after_reentry_page),
}
