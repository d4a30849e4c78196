"""``lean-loss``: its judgements, and its adapters on functions with the signatures of each era."""

from __future__ import annotations

import functools
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.engine.installer import Installer
from megatron_rl_patches.patches.lean_loss import patch

from .judging import judged

verdict = functools.partial(judged, patch)

torch = pytest.importorskip("torch")

LOSS = "slime.backends.megatron_utils.loss"
PPO_UTILS = "slime.utils.ppo_utils"
MILES = "miles.backends.training_utils"


# --- judgements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [f"{LOSS}.loss_function", f"{MILES}.loss.loss_function"])
@pytest.mark.parametrize(
    ("call", "state"),
    [
        ("checkpoint(func, args, batch, logits)", "fits"),
        ("torch.utils.checkpoint.checkpoint(func, args, batch, logits)", "fits"),
        ("checkpoint(func, args, batch, logits, use_reentrant=False)", "not needed"),
        ("func(args, batch, logits)", "not needed"),
    ],
)
def test_checkpointing(target: str, call: str, state: str) -> None:
    body = f"if args.recompute_loss_function:\n        return {call}"
    assert verdict(target, f"def loss_function(args, batch, logits):\n    {body}")[0] == state


def test_checkpointing_by_another_option_has_drifted() -> None:
    source = "def loss_function(args, batch, logits): return checkpoint(func, args) if args.recompute else 0"
    assert verdict(f"{LOSS}.loss_function", source) == (
        "drifted",
        "its body no longer uses recompute_loss_function",
    )


@pytest.mark.parametrize(
    ("placeholder", "state"),
    [
        ("torch.zeros(length, requires_grad=True)", "fits"),
        ("torch.zeros(length, requires_grad=value.requires_grad)", "not needed"),
    ],
)
@pytest.mark.parametrize(
    "target", [f"{LOSS}._allgather_cp_redistribute", f"{MILES}.cp_utils.allgather_cp_redistribute"]
)
def test_redistribution(target: str, placeholder: str, state: str) -> None:
    name = target.rpartition(".")[2]
    source = f"def {name}(res, *, args):\n    dist.nn.all_reduce({placeholder})"
    assert verdict(target, source)[0] == state


def test_frameworks_without_all_gather_cp() -> None:
    state, reason = verdict(f"{LOSS}._allgather_cp_redistribute", "def loss_function(args): ...")
    assert (state, "does not contain allgather_cp" in reason) == ("not needed", True)


def test_the_first_slime_scores_in_the_module_itself() -> None:
    source = """
        def calculate_log_probs_and_entropy(logits, tokens, with_entropy=False): ...
        def get_log_probs_and_entropy(logits, *, args):
            return calculate_log_probs_and_entropy(logits, args.tokens)
    """
    assert verdict(f"{LOSS}.get_log_probs_and_entropy", source)[0] == "not needed"
    state, _ = verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", "def compute_log_probs(logits): ...")
    assert state == "not needed"


ERAS = {
    "one, three": "with_entropy=False, chunk_size=-1",
    "two": "with_entropy=False, chunk_size=-1, need_entropy_grad=False",
    "four": "with_entropy=False, chunk_size=-1, log_prob_keep_mask=None, with_entropy_grad=True",
}


@pytest.mark.parametrize("options", ERAS.values(), ids=list(ERAS))
def test_every_era_fits(options: str) -> None:
    source = f"def calculate_log_probs_and_entropy(logits, tokens, tp_group, {options}): ..."
    assert verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", source)[0] == "fits"


def test_a_function_without_its_arguments_has_drifted() -> None:
    source = "def calculate_log_probs_and_entropy(hidden, weight, tokens): ..."
    assert verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", source)[0] == "drifted"


@pytest.mark.parametrize(
    ("body", "state"),
    [("return -fused_vocab_parallel_cross_entropy(logits, tokens)", "fits"), ("return 0", "drifted")],
)
def test_candidates(body: str, state: str) -> None:
    source = f"""
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        def compute_log_probs(logits, tokens, process_group):
            {body}
        other = fused_vocab_parallel_cross_entropy
    """
    assert verdict(f"{PPO_UTILS}.compute_log_probs", source)[0] == state


ENGINE = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead._lm_head_logits_processor"


@pytest.mark.parametrize(("kept", "state"), [("logits.clone()", "fits"), ("logits", "not needed")])
def test_verl_clones(kept: str, state: str) -> None:
    source = f"""
        def _lm_head_logits_processor(self, logits, label, *, calculate_entropy, distillation_only):
            return vocab_parallel_log_probs_from_logits({kept}, label)
    """
    assert verdict(ENGINE, source)[0] == state


# --- adapters: a slime of each era --------------------------------------------------------------------------

CALCULATE = """
import torch

def calculate_log_probs_and_entropy(logits, tokens, tp_group, {options}):
    calls.append(dict(locals()))
    x = logits
    if locals().get("log_prob_keep_mask") is not None:
        x = x.masked_fill(~log_prob_keep_mask.scatter(1, tokens[:, None], True), float("-inf"))
    log_probs = x.log_softmax(-1).gather(1, tokens[:, None])
    log_softmax = logits.log_softmax(-1)
    grad = next((locals()[n] for n in ("need_entropy_grad", "with_entropy_grad") if n in locals()), True)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None
    return log_probs, entropy if grad or entropy is None else entropy.detach()

calls = []

def compute_log_probs(logits, tokens, process_group):
    return fused_vocab_parallel_cross_entropy
"""
SCORE = """
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

def loss_function(args, batch, num_microbatches, logits):
    return None

def get_responses(logits, *, args, tokens, lengths):
    logits = logits.squeeze(0)
    {transform}
    if args.rollout_temperature != 1.0:
        logits = logits.div(args.rollout_temperature)
    start = 0
    for length in lengths:
        chunk = logits[start : start + length]
        {chunk}
        yield chunk, tokens[start : start + length]
        start += length
"""
WHOLE = """
def get_log_probs_and_entropy(logits, *, args, tokens, lengths, with_entropy=False, **options):
    logits = logits.squeeze(0)
    {temperature}
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, tokens, None, with_entropy=with_entropy, {passed} **options
    )
    return "shape kept", {{"log_probs": log_probs.squeeze(-1), "entropy": entropy}}
"""
SAMPLES = """
def get_log_probs_and_entropy(logits, *, args, tokens, lengths, with_entropy=False, **options):
    parts = [
        calculate_log_probs_and_entropy(chunk, tokens_chunk, None, with_entropy=with_entropy, **options)
        for chunk, tokens_chunk in get_responses(logits, args=args, tokens=tokens, lengths=lengths)
    ]
    log_probs = torch.cat([log_prob.squeeze(-1) for log_prob, _ in parts])
    entropy = torch.cat([entropy for _, entropy in parts]) if with_entropy else None
    return "shape kept", {"log_probs": log_probs, "entropy": entropy}

import torch
"""
DIVIDES = "if args.rollout_temperature != 1.0: logits = logits / args.rollout_temperature"


class Slime:
    """A slime on disk, with ``lean-loss`` on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine = folder, Installer()

    def write(self, options: str, score: str, transform: str = "", chunk: str = "") -> None:
        texts = {
            PPO_UTILS: CALCULATE.format(options=options),
            LOSS: SCORE.format(transform=transform, chunk=chunk) + score,
        }
        for module, text in texts.items():
            path = self.folder / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.loss, self.ppo_utils = importlib.import_module(LOSS), importlib.import_module(PPO_UTILS)

    def apply(self) -> None:
        self.engine.add([patch], Settings(), required=True)

    def revert(self) -> None:
        self.engine.remove([patch.name])

    def run(self, **options: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        leaf = (3 * torch.randn(1, 9, 13, generator=generator)).requires_grad_()
        tokens = torch.randint(13, (9,), generator=generator)
        self.ppo_utils.calls.clear()
        defaults = {"rollout_temperature": 0.7, "loss_type": "policy_loss", "entropy_coef": 0.1}
        self.args = Namespace(**defaults | options.pop("args", {}))
        kept, result = self.loss.get_log_probs_and_entropy(
            leaf * 1, args=self.args, tokens=tokens, lengths=[4, 0, 5], with_entropy=True, **options
        )
        weights = torch.linspace(0.5, 1.5, 9)
        loss = (weights * result["log_probs"]).sum() - self.args.entropy_coef * (
            weights * result["entropy"]
        ).sum()
        loss.backward()
        assert kept == "shape kept"
        return {
            **result,
            "gradient": leaf.grad,
            "entropy requires grad": result["entropy"].requires_grad,
            "temperature": self.args.rollout_temperature,
            "framework's calls": len(self.ppo_utils.calls),
        }


@pytest.fixture
def slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slime]:
    monkeypatch.syspath_prepend(str(tmp_path))
    framework = Slime(tmp_path)
    framework.engine.announcer.done = True
    yield framework
    framework.revert()
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-5) -> bool:
    keys = ("log_probs", "entropy", "gradient")
    options = {"rtol": tolerance, "atol": tolerance}
    return all(torch.allclose(one[key].float(), other[key].float(), **options) for key in keys)


SHAPES = {
    "one": (ERAS["one, three"], SAMPLES),
    "two": (
        ERAS["two"],
        WHOLE.format(temperature=DIVIDES, passed="need_entropy_grad=args.entropy_coef != 0,"),
    ),
    "three": (ERAS["one, three"], WHOLE.format(temperature=DIVIDES, passed="")),
    "four": (
        ERAS["four"],
        WHOLE.format(temperature=DIVIDES, passed="with_entropy_grad=args.entropy_coef != 0,"),
    ),
}


@pytest.mark.parametrize("era", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_eras_of_slime(era: str, temperature: float, slime: Slime) -> None:
    slime.write(*SHAPES[era])
    originals = slime.ppo_utils.calculate_log_probs_and_entropy, slime.loss.get_log_probs_and_entropy
    before = slime.run(args={"rollout_temperature": temperature})
    slime.apply()
    after = slime.run(args={"rollout_temperature": temperature})
    assert same(before, after)
    assert (before["framework's calls"] > 0, after["framework's calls"]) == (True, 0)
    assert after["temperature"] == temperature
    metric = slime.run(args={"entropy_coef": 0})
    assert (after["entropy requires grad"], metric["entropy requires grad"]) == (True, False)
    slime.revert()
    assert slime.ppo_utils.calculate_log_probs_and_entropy is originals[0]
    assert slime.loss.calculate_log_probs_and_entropy is originals[0]
    assert slime.loss.get_log_probs_and_entropy is originals[1]


def test_a_custom_loss_keeps_the_gradient_of_the_entropy(slime: Slime) -> None:
    slime.write(*SHAPES["three"])
    slime.apply()
    assert slime.run(args={"loss_type": "custom_loss", "entropy_coef": 0})["entropy requires grad"]


def test_a_keep_mask(slime: Slime) -> None:
    slime.write(*SHAPES["four"])
    mask = torch.rand(9, 13, generator=torch.Generator().manual_seed(1)) > 0.4
    before = slime.run(log_prob_keep_mask=mask)
    assert not same(before, slime.run())
    slime.apply()
    after = slime.run(log_prob_keep_mask=mask)
    assert same(before, after)
    assert after["framework's calls"] == 0


def test_an_argument_that_is_not_known_is_left_to_the_framework(slime: Slime) -> None:
    slime.write(f"{ERAS['one, three']}, soft_cap=None", SAMPLES)
    before = slime.run(soft_cap=30.0)
    slime.apply()
    after = slime.run(soft_cap=30.0)
    assert same(before, after)
    assert after["framework's calls"] == before["framework's calls"] == 3
    assert same(before, slime.run())


#: What a fork may do to the logits, or to a sample's slice of them, that changes values.
CHANGES = [
    {"chunk": "chunk = logits[start : start + length] * 1.25"},
    {"chunk": "chunk = torch.tanh(chunk / 30) * 30"},
    {"chunk": "chunk = chunk.to(torch.bfloat16)"},
    {"chunk": "chunk = chunk.to(torch.bfloat16).float()"},
    {"chunk": "chunk.div_(2)"},
    {"chunk": "chunk = chunk.clamp(-2, 2)"},
    {"chunk": "chunk = chunk - torch.arange(13)"},
    {"chunk": "chunk = chunk.flip(-1)"},
    {"chunk": "chunk = chunk[..., 1:].roll(1, -1)"},
    {"chunk": "chunk = torch.cat([chunk, chunk[:, :1]], dim=1)"},
    {"chunk": "chunk = chunk / torch.linspace(1, 2, 13)"},
    {"chunk": "chunk = chunk.detach() + 0 * chunk"},
    {"transform": "logits = logits.mul(2)"},
    {"transform": "logits = logits.squeeze(0).to(torch.bfloat16)"},
    {"transform": "logits[0:4].div_(7)"},
    {"transform": "logits[:, 3:] = -50.0"},
    {"transform": "logits = torch.tanh(logits / 5) * 5"},
    {"transform": "logits *= 2"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change.values())))
def test_a_framework_that_changes_logits_gets_what_it_computes(change: dict[str, str], slime: Slime) -> None:
    slime.write(ERAS["one, three"], SAMPLES, **change)
    before = slime.run()
    slime.apply()
    assert same(before, slime.run(), 0.05 if "bfloat16" in str(change) else 1e-5)


def test_somebody_elses_function_sees_the_logits(slime: Slime) -> None:
    slime.write(*SHAPES["one"])
    before = slime.run()
    slime.apply()
    ours, widths = slime.loss.calculate_log_probs_and_entropy, []

    @functools.wraps(ours)
    def foreign(logits: Any, *args: Any, **options: Any) -> Any:
        widths.append(logits.shape[1])
        return ours(logits, *args, **options)

    slime.loss.calculate_log_probs_and_entropy = foreign
    after = slime.run()
    slime.loss.calculate_log_probs_and_entropy = ours
    assert widths == [13] * 3
    assert same(before, after)
    assert after["temperature"] == 0.7


def test_a_loss_that_raises_leaves_the_temperature(slime: Slime) -> None:
    slime.write(*SHAPES["three"])
    slime.apply()
    with pytest.raises(TypeError):
        slime.run(no_such_option=True)
    assert slime.args.rollout_temperature == 0.7


def test_an_entropy_has_the_dtype_that_the_era_computes_it_in(slime: Slime) -> None:
    slime.write(*SHAPES["one"])
    slime.apply()
    logits, tokens = torch.randn(3, 5).bfloat16(), torch.arange(3)
    log_probs, entropy = slime.ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, True)
    assert (log_probs.shape, log_probs.dtype) == ((3, 1), torch.float32)
    assert (entropy.shape, entropy.dtype) == ((3,), torch.bfloat16)
