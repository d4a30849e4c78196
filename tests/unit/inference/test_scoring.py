"""Scores of single rows against float64, and what is refused before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import scoring
from megatron_rl_patches.inference._microbatches import checked
from megatron_rl_patches.inference.scoring import _score_rows, _without_float32_copy

VOCABULARY = 50


def reference(
    logits_tv: torch.Tensor, rows_n: torch.Tensor, targets_n: torch.Tensor, temperature: float
) -> Any:
    log_p_nv = (logits_tv.double() / temperature).log_softmax(1)[rows_n]
    return log_p_nv.gather(1, targets_n[:, None])[:, 0], -torch.special.xlogy(
        log_p_nv.exp(), log_p_nv.exp()
    ).sum(1)


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 20),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_equal_a_float64_reference(
    seed: int, rows: int, scale: float, temperature: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_tv = (torch.randn(30, VOCABULARY, generator=generator) * scale).to(dtype)
    before = logits_tv.clone()
    rows_n = torch.randperm(30, generator=generator)[:rows]
    targets_n = torch.randint(VOCABULARY, (rows,), generator=generator)
    log_probs_n, entropy_n = _score_rows(logits_tv, rows_n, targets_n, None, temperature, with_entropy=True)
    expected_n, expected_entropy_n = reference(logits_tv, rows_n, targets_n, temperature)
    assert log_probs_n.dtype == torch.float32 and entropy_n is not None
    torch.testing.assert_close(log_probs_n.double(), expected_n, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy_n.double(), expected_entropy_n, rtol=1e-6, atol=2e-6)
    assert torch.equal(logits_tv, before)


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_tv, rows_n = torch.randn(30, VOCABULARY), torch.arange(30)
    targets_n = torch.randint(VOCABULARY, (30,))
    whole = _score_rows(logits_tv, rows_n, targets_n, None, 1.0, with_entropy=True)
    monkeypatch.setattr(scoring, "_BLOCK", 7 * VOCABULARY)
    blocks = _score_rows(logits_tv, rows_n, targets_n, None, 1.0, with_entropy=True)
    assert all(torch.equal(*pair) for pair in zip(whole, blocks, strict=True))


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_masked_ids_count_for_nothing(temperature: float) -> None:
    logits_tv = torch.randn(4, VOCABULARY)
    logits_tv[:, 10:] = float("-inf")
    targets_n = torch.tensor([0, 3, 9, 20])
    log_probs_n, entropy_n = _score_rows(
        logits_tv, torch.arange(4), targets_n, None, temperature, with_entropy=True
    )
    expected_n, expected_entropy_n = reference(logits_tv[:, :10], torch.arange(3), targets_n[:3], temperature)
    torch.testing.assert_close(log_probs_n[:3].double(), expected_n, rtol=1e-6, atol=1e-6)
    assert log_probs_n[3] == float("-inf")
    assert entropy_n is not None
    torch.testing.assert_close(entropy_n[:3].double(), expected_entropy_n, rtol=1e-6, atol=1e-6)


def test_nan_logits_are_not_hidden() -> None:
    logits_tv = torch.randn(2, VOCABULARY)
    logits_tv[0, 5] = float("nan")
    log_probs_n, entropy_n = _score_rows(
        logits_tv, torch.arange(2), torch.tensor([1, 1]), None, 1.0, with_entropy=True
    )
    assert entropy_n is not None
    assert log_probs_n.isnan().tolist() == entropy_n.isnan().tolist() == [True, False]


def test_outputs_stay_in_their_dtype_where_megatron_allows_it() -> None:
    from megatron.core.transformer.module import Float16Module

    wrapper, inner = torch.nn.Module(), Float16Module.__new__(Float16Module)
    torch.nn.Module.__init__(inner)
    inner.module = torch.nn.Linear(1, 1)
    wrapper.module = inner
    takes_it = "fp32_output" in inspect.signature(Float16Module.forward).parameters
    assert _without_float32_copy(wrapper) == ({"fp32_output": False} if takes_it else {})
    assert _without_float32_copy(torch.nn.Linear(1, 1)) == {}


def microbatch(**changes: Any) -> dict[str, Any]:
    return {"tokens": torch.arange(12).reshape(2, 6), "lengths": [6, 4], **changes}


def check(*microbatches: dict[str, Any], packing: bool = False, multiple: int = 1) -> Any:
    return checked(microbatches, packing=packing, vocabulary=VOCABULARY, multiple=multiple)


def test_default_is_every_token_but_the_first() -> None:
    (batch,) = check(microbatch())
    assert batch.rows_n.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert batch.targets_n.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert batch.response_lengths == [5, 3] and batch.indices == [0, 1]


def test_responses_end_where_samples_end() -> None:
    (batch,) = check(microbatch(response_lengths=torch.tensor([2, 0])))
    assert batch.rows_n.tolist() == [3, 4]


def test_packed_samples_follow_each_other() -> None:
    packed = {"tokens": torch.arange(8)[None], "lengths": [3, 4], "response_lengths": [1, 2]}
    (batch,) = check(packed, packing=True)
    assert batch.targets_n.tolist() == [2, 5, 6]


def test_indices_go_on_in_the_next_microbatch() -> None:
    assert [batch.indices for batch in check(microbatch(), microbatch())] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "there is no 'tokens' in it"),
        ({"tokens": torch.zeros(2, 6)}, r"tokens are torch.float32 \[2, 6\]. Expected: an int64 tensor"),
        ({"tokens": [[1, 2]]}, r"tokens are list \[\]. Expected: an int64 tensor"),
        ({"lengths": [7, 4]}, r"lengths \[7, 4\] do not fit tokens of shape \[2, 6\]"),
        ({"lengths": [6, 0]}, r"lengths \[6, 0\] do not fit"),
        ({"lengths": [6]}, r"lengths \[6\] do not fit"),
        ({"tokens": torch.zeros(1, 12, dtype=torch.int64)}, r"lengths \[6, 4\] do not fit"),
        ({"response_lengths": [6, 3]}, r"response_lengths \[6, 3\] do not fit lengths \[6, 4\]"),
        ({"response_lengths": [1]}, r"response_lengths \[1\] do not fit"),
        ({"indices": [0, 2]}, r"indices \[0, 2\] are no permutation of 0 to 1"),
        ({"indices": [0]}, "there are 1 indices for 2 samples"),
        ({"tokens": torch.full((2, 6), VOCABULARY)}, "token ids are 50 to 50. Expected: 0 to 49"),
        ({"tokens": torch.full((2, 6), -100)}, "token ids are -100 to -100"),
    ],
)
def test_bad_microbatches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check(microbatch(**changes))


def test_refusals_say_which_microbatch() -> None:
    with pytest.raises(InvalidInputError, match="microbatch 1: lengths"):
        check(microbatch(), microbatch(lengths=[7, 4]))
    with pytest.raises(InvalidInputError, match="no microbatches"):
        check()
    with pytest.raises(InvalidInputError, match="sequence parallelism: a multiple of"):
        check(microbatch(), multiple=4)
