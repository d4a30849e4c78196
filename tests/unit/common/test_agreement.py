"""How the problems of several ranks are told; that they reach all ranks is tested where it happens."""

from __future__ import annotations

import pytest

from megatron_rl_patches.common.agreement import agreed, all_or_none, raise_on_all, summary
from megatron_rl_patches.errors import CheckpointError, InvalidInputError


def test_ranks_that_failed_alike_are_named_together() -> None:
    assert summary(["gone"]) == "every rank: gone"
    assert summary(["gone", None, "gone", "cut"]) == "ranks 0, 2: gone; rank 3: cut"


def test_a_process_without_a_group_is_alone() -> None:
    raise_on_all(None)
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        raise_on_all("no data")
    assert agreed(1, None, None) == [1]
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        agreed(1, "no data", None)
    with (
        pytest.raises(
            CheckpointError, match=r"^reading: every rank: KeyError: 'a'\. All is old\.$"
        ) as raised,
        all_or_none("reading", error=CheckpointError, outcome="All is old."),
    ):
        raise KeyError("a")
    assert isinstance(raised.value.__cause__, KeyError)
