"""What layouts refuse, and what they do without context parallelism.

test_loss_functions.py compares what is computed from random ones with whole samples, on 1 to 8 ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import SequenceLayout

from .cp_reference import Case, cases


@given(cases(cp_sizes=(1,)))
def test_without_context_parallelism_gathering_is_splitting(case: Case) -> None:
    layout, values = case.layout(0), torch.randn(sum(case.responses), 3, requires_grad=True)
    parts = layout.gather_responses(values)
    assert [len(part) for part in parts] == list(case.responses)
    assert all(map(torch.equal, parts, layout.gather_responses(layout.split_responses(values))))
    assert all(part.requires_grad for part in parts)
    assert not any(part.requires_grad for part in layout.gather_responses(values.detach()))


def test_lengths_may_be_tensors_and_layouts_go_to_the_device_of_the_logits() -> None:
    layout = SequenceLayout.build(torch.tensor([4, 6]), torch.tensor([2, 3]))
    assert layout.response_rows.tolist() == [1, 2, 6, 7, 8]
    layout = SequenceLayout.build([9], [4], cp_size=2, allgather_cp=True, device="meta")
    vectors = (layout.response_rows, layout.response_index)
    parts = layout.local_parts([torch.zeros(4, device="meta")])
    assert {vector.device.type for vector in (*vectors, *parts)} == {"meta"}


PADDED = {"qkv_format": "bshd", "max_seq_lens": [8, 8]}
#: Of samples of six and five tokens, with responses of two and three, on two ranks.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({**PADDED, "allgather_cp": True}, "all-gather CP .* qkv_format 'thd'"),
    ({"qkv_format": "bshd"}, "needs max_seq_lens"),
    ({**PADDED, "max_seq_lens": [8, 7]}, "pass the same length for every sample"),
    ({**PADDED, "max_seq_lens": [5, 5]}, "no less than the longest"),
    ({**PADDED, "max_seq_lens": [8]}, "for every sample"),
    ({**PADDED, "padded_lengths": [8, 8]}, "takes no padded_lengths"),
    ({**PADDED, "num_rows": 8}, "and no num_rows"),
    ({"max_seq_lens": [8, 8]}, "pass padded_lengths"),
    ({"padded_lengths": [8, 4]}, "no less than its tokens"),
    ({"padded_lengths": [8, 10]}, "a multiple of 4"),
    ({"padded_lengths": [8]}, "pass one per sample"),
    ({"num_rows": 7}, "num_rows is 7, but .* take 8 rows on each of 2"),
    ({"num_rows": 5, "allgather_cp": True}, "take 6 rows on each of 2"),
    ({"response_lengths": [6, 3]}, "sample 0 has 6 tokens and a response of 6"),
    ({"response_lengths": [2, 6]}, "sample 1 has 5 tokens and a response of 6"),
    ({"response_lengths": [-1, 3]}, "sample 0 .* response of -1"),
    ({"response_lengths": [2]}, "there are 2 samples and 1 response_lengths"),
    ({"total_lengths": [], "response_lengths": []}, "at least one sample"),
    ({"cp_rank": 2, "cp_size": 2}, "0 <= cp_rank < cp_size"),
    ({"cp_rank": -1, "cp_size": 2}, "0 <= cp_rank < cp_size"),
    ({"cp_rank": 0, "cp_size": 0}, "0 <= cp_rank < cp_size"),
    ({"qkv_format": "sbhd"}, "pass 'thd' .* or 'bshd'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_does_not_fit_together_is_refused_by_every_rank(wrong: dict[str, Any], message: str) -> None:
    arguments = {"total_lengths": [6, 5], "response_lengths": [2, 3], "cp_size": 2} | wrong
    for rank in range(2):
        with pytest.raises(InvalidInputError, match=message):
            SequenceLayout.build(**{"cp_rank": rank, **arguments})
