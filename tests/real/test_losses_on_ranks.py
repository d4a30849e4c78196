"""Losses on real ranks, without a model: logits split over tensor-parallel ranks, samples over others."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks.log_probs import log_probs_and_entropy
from megatron_rl_patches.losses.vocab import compiling
from tests.ranks import everywhere, on_ranks
from tests.references.dense import IGNORE, random_indices
from tests.references.losses import FULL_DIVERGENCES, FUNCTIONS, Inputs, largest, measure
from tests.references.sent_bytes import sent_bytes
from tests.unit.losses import test_table as table
from tests.unit.losses.sequences.cp_reference import CORNERS, Case
from tests.unit.losses.vocab.pairwise import pairwise

V, K = 1004, 8
#: All but products, whose gradients random programs sum over ranks.
OF_RANKS = {
    **table.TABLE,
    "source": [name for name in table.TABLE["source"] if "product" not in name],
    # Padding may fill a part of a rank's columns, all of them, or those of several ranks.
    "vocab_size": [None, 985, V // 2, 77],
}


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
@on_ranks(lambda tp_size: tp_size, cpu_backend=False)
def test_ranks(tp_size: int) -> None:
    group = dist.new_group(list(range(tp_size)))
    for check_these in CHECKS:
        check_these(group)
    with sent_bytes() as calls:
        alone, _ = dist.new_subgroups(1)
        for name in FUNCTIONS:
            case = {**{option: values[0] for option, values in table.TABLE.items()}, "function": name}
            table.check(case, V, columns=slice(None), group=alone)
    assert calls == [], "of a group of one rank"


def mine(group: dist.ProcessGroup, columns: int = V) -> slice:
    width, rank = columns // group.size(), group.rank()
    return slice(rank * width, (rank + 1) * width)


def check_table(group: dist.ProcessGroup, width: int = V, **some: Sequence[Any]) -> None:
    """One all-gather forward, or two for a divergence; in backward the sum for hidden states alone."""
    for case in pairwise({**OF_RANKS, **some}):
        with sent_bytes() as calls:
            measured = table.check(case, width, columns=mine(group, width), group=group)
        gathers, reduces = [name for name, _ in calls], []
        if "frozen" in case["source"] and case["function"] != "top-k":
            reduces = [gathers.pop()]
        assert reduces in ([], ["all_reduce"]), (case, calls)
        assert set(gathers) == {"all_gather_into_tensor"}, (case, calls)
        assert len(gathers) <= (2 if case["function"] in FULL_DIVERGENCES else 1), (case, calls)
        first, *others = everywhere([x.detach().numpy().tobytes() for x in measured.results], group)
        assert all(other == first for other in others), (case, "ranks have other bits")


def check_extremes(group: dist.ProcessGroup) -> None:
    """On some ranks no column may count at all, or only ones with probability zero."""
    for logits in table.EXTREMES.values():
        table.check_extreme(logits[:, :1000], False, columns=mine(group, 1000), group=group)
    everything = torch.arange(12 // group.size() * group.size())
    leaf = torch.zeros(1, len(everything) // group.size(), requires_grad=True)
    _, tail = losses.vocab_parallel_log_probs_at(leaf, everything[None], tp_group=group, with_tail=True)
    assert tail.item() == -math.inf
    tail.sum().backward()
    assert (leaf.grad == 0).all()
    # The largest logit is on every rank, which may have a single column.
    for columns in (group.size(), 2 * group.size()):
        targets = torch.tensor([0, 1, columns - 1, IGNORE]).clamp(max=columns - 1)
        inputs, of_rank = Inputs(targets, targets[:, None]), {"columns": mine(group, columns), "group": group}
        measured = measure("entropy", torch.zeros(4, columns), inputs, **of_rank)
        assert max(measured.value, measured.gradient) <= table.FLOAT32


def check_strange_logits(group: dist.ProcessGroup) -> None:
    """What is NaN or infinite on one rank spoils its row on all of them, and no other row."""
    of_ranks = {**table.STRANGE, "source": ["existing", "deferred, frozen"]}
    of_ranks |= {"width": [2 * group.size(), 32, 256]}  # a transpose of one column materializes
    for case, (name, (k, kept)) in product(pairwise(of_ranks), table.STRANGE_USES):
        table.check_strange(name, case, k, kept, columns=mine(group, case["width"]), group=group)


def check_refusals(group: dist.ProcessGroup) -> None:
    """Bad arguments are rejected on each rank, before any of them waits for the others."""
    logits, targets = table.random_logits(columns=V)[:, mine(group)], table.random_targets(columns=V)
    keep_mask = torch.ones(table.T, len(logits[0]) - 4, dtype=torch.bool)
    others = dist.new_group([group.size() - 1])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"targets": targets + V}, f"ids below {V}"),
        ({"keep_mask": keep_mask}, "expected torch.bool"),
        *[({"tp_group": others}, "not in tp_group")] * (group.rank() == 0),
    ]
    hidden, weight = torch.zeros(4, 8), torch.zeros(9, 7)
    with sent_bytes() as calls:
        for changes, message in wrong:
            arguments = {"logits": logits, "targets": targets, "tp_group": group, **changes}
            with pytest.raises(InvalidInputError, match=message):
                losses.vocab_parallel_log_probs(**arguments)
        with pytest.raises(InvalidInputError, match=r"weight \[9, 7\]"):  # before the sequence is gathered
            losses.deferred_logits(hidden, weight, tp_group=group, sequence_parallel=True)
    assert calls == []


def check_refused_on_one_rank(group: dist.ProcessGroup) -> None:
    """Each rank judges its own logits by ``inplace_backward``: where one cannot overwrite them, all raise."""
    whole = table.random_logits(2 * table.T, V)[:, mine(group)].contiguous().requires_grad_()
    indices = table.random_targets(columns=V)[:, None]
    for refusing, message in (({0}, "a part of something larger"), ({group.size() - 1}, "leaf")):
        for rows in (None, slice(0, 0)):
            logits = whole[: table.T] * 1
            if group.rank() in refusing:
                logits = (whole * 1)[: table.T] if "part" in message else logits.detach().requires_grad_()
            targets = table.random_targets(columns=V)[slice(None) if rows is None else rows]
            expected = rf"{message}.*of ranks {min(refusing)} of tp_group"
            overwriting: dict[str, Any] = {"tp_group": group, "inplace_backward": True}
            with sent_bytes() as calls:
                with pytest.raises(InvalidInputError, match=expected):
                    losses.vocab_parallel_log_probs(logits, targets, rows=rows, **overwriting)
                with pytest.raises(InvalidInputError, match=expected):
                    losses.vocab_parallel_log_probs_at(logits, indices, **overwriting)
            assert [name for name, _ in calls] == ["all_gather_into_tensor"] * 2


def check_selection(group: dist.ProcessGroup) -> None:
    """Of equal logits the lowest ids, also of more than one rank has, and of everything."""
    generator = torch.Generator().manual_seed(0)
    for columns, padding in product((2, 6, 40), (0, 1, 3)):
        logits = torch.randint(3, (20, columns * group.size()), generator=generator).float()
        logits[::4, : columns + 1] = -math.inf
        size = max(logits.shape[1] - padding, 1)
        logits[:, size:] = math.nan
        for k in (1, 3, columns, columns + 1, columns * group.size()):
            k, part = min(k, size), logits[:, mine(group, logits.shape[1])]
            measured = losses.vocab_parallel_topk(part, k, tp_group=group, vocab_size=size)
            assert measured.indices.equal(largest(logits[:, :size], k)) and measured.vocab_size == size


def check_bytes(group: dist.ProcessGroup) -> None:
    """One collective in forward and none in backward, of what belongs to the ids alone."""
    logits = torch.randn(64, V, generator=torch.Generator().manual_seed(0))[:, mine(group)]
    indices = random_indices(64, V, 16)
    leaf = logits.clone().requires_grad_()
    with sent_bytes() as sent:
        measured = losses.vocab_parallel_topk(logits, 16, tp_group=group)
        log_probs, tail = losses.vocab_parallel_log_probs_at(leaf, indices, tp_group=group, with_tail=True)
        (log_probs.sum(-1) + tail)[measured.tail_log_prob < 0].nan_to_num(neginf=0.0).sum().backward()
    assert sent == [("all_gather_into_tensor", 64 * (size * 16 + 16)) for size in (16, 8)]


def check_padding(group: dist.ProcessGroup) -> None:
    """A teacher of another padding takes the shards of the student, which has 16 rows, of which 15 count."""
    rank, size = group.rank(), group.size()
    hidden = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)
    weight = torch.linspace(0, 2, 48, dtype=torch.float64).view(16, 3).sin()
    student = losses.deferred_logits(hidden, weight.chunk(size)[rank], tp_group=group)
    for rows in (4, 12, 20):
        num_ids = min(15, rows)
        weight_of_teacher = torch.linspace(1, 2, 3 * rows, dtype=torch.float64).view(rows, 3).sin()
        bias = weight_of_teacher[:, 0]
        head = losses.OutputHead(weight_of_teacher.chunk(size)[rank], bias.chunk(size)[rank])
        head = head.resharded(16 // size, group)
        (teacher,) = losses.FullDistribution.from_hidden(hidden, head).logits()
        value = losses.full_vocabulary_divergence(student, teacher, vocab_size=num_ids, tp_group=group)
        whole = hidden @ weight.T, hidden @ weight_of_teacher.T + bias
        log_p, log_q = (logits[:, :num_ids].log_softmax(1) for logits in whole)
        assert (value - (log_p.exp() * (log_p - log_q)).sum(1)).abs().max() < 1e-12


CHECKS = [check_table, check_extremes, check_strange_logits, check_refusals, check_refused_on_one_rank]
CHECKS += [check_selection, check_bytes, check_padding]


# --- One rank differs from the others. Which collectives run follows from what every rank knows, not from
# whether this rank holds a storage that can be overwritten.


@on_ranks(2, cpu_backend=False, timeout=60)
def test_one_rank_cannot_overwrite_its_logits() -> None:
    rank = dist.get_rank()
    whole, tokens = table.random_logits(columns=40).requires_grad_(), table.random_targets(columns=40)
    expected, entropies = losses.vocab_parallel_log_probs_and_entropy(whole, tokens)
    (expected + entropies).sum().backward()
    leaf = whole.detach().chunk(2, dim=1)[rank].contiguous().requires_grad_()
    log_probs, entropies = log_probs_and_entropy(
        leaf if rank == 1 else leaf * 1, tokens, dist.group.WORLD, entropy_grad=True, inplace_backward=True
    )
    (log_probs + entropies).sum().backward()
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(leaf.grad, whole.grad.chunk(2, dim=1)[rank])


@on_ranks(2, cpu_backend=False)
def test_one_rank_compiles() -> None:
    """It cuts blocks and sums in another way. Ids that one side rules out need a second pass on all ranks."""
    with (
        mock.patch.object(compiling, "WORTHWHILE_ELEMENTS", 0 if dist.get_rank() == 0 else math.inf),
        mock.patch.object(compiling, "_has_compiler", lambda device: True),
        mock.patch.object(compiling, "_call_compiled", lambda function, _, *arguments: function(*arguments)),
    ):
        check_table(dist.group.WORLD, width=2048, source=["existing"], dtype=[torch.float64, torch.float32])


# --- Layouts on context-parallel ranks: gathering, its gradient, and who takes part in backward.

RAGGED: dict[str, Any] = {"prompts": (1, 12, 3, 5), "responses": (9, 2, 0, 17)}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"sample_padding": 1, "tail": 3},
    {"scheme": "padded", "sample_padding": 2},
    {"scheme": "all-gather", "tail": 2},
)


def _cases(cp_size: int) -> list[Case]:
    corners = [case for case in CORNERS.values() if case.cp_size == cp_size]
    return corners + [Case(**RAGGED, cp_size=cp_size, **scheme) for scheme in SCHEMES]


def _check_gathering(case: Case, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    layout, generator = case.layout(rank), torch.Generator().manual_seed(1)
    full = [torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in case.responses]
    local = torch.cat(layout.local_parts(full)).requires_grad_()

    with sent_bytes() as calls:
        gathered = layout.gather_responses(local, group)
        assert len(calls) == (sum(case.responses) > 0)
        # The loss of rank r is (r + 1) times the sum of squares: together 1 + 2 + ... times.
        sum((rank + 1) * (part**2).sum() for part in gathered).backward()
        assert len(calls) == 2 * (sum(case.responses) > 0)
    assert all(map(torch.equal, gathered, full))
    ranks = case.cp_size * (case.cp_size + 1) // 2
    torch.testing.assert_close(local.grad, 2 * ranks * local.detach())

    with sent_bytes() as calls, torch.no_grad():
        quiet = layout.gather_responses(layout.split_responses(local), group)
        assert len(calls) == (sum(case.responses) > 0)
    assert all(map(torch.equal, quiet, full))
    assert not any(part.requires_grad for part in quiet)
    ids = [torch.arange(n) for n in case.responses]
    assert all(map(torch.equal, layout.gather_responses(layout.local_parts(ids), group), ids))


def _check_wrong_groups(cp2: dist.ProcessGroup, cp4: dist.ProcessGroup) -> None:
    """What is wrong on one rank alone is in ``tests/unit/losses/test_bad_arguments.py``."""
    layout = Case((3, 2), (4, 9), cp_size=2).layout(dist.get_rank(cp2))
    values = torch.zeros(len(layout.response_index))
    with sent_bytes() as calls:
        with pytest.raises(InvalidInputError, match=r"rank \d of 4, but .* rank \d of 2"):
            layout.gather_responses(values, cp4)
        with pytest.raises(InvalidInputError, match="values have the shapes"):
            layout.gather_responses([values], cp2)
    assert calls == []


@on_ranks(4, cpu_backend=False)
def test_gathering_on_real_ranks() -> None:
    assert any(0 in layout.local_lengths for case in _cases(4) for layout in case.layouts())
    assert any(not sum(layout.local_lengths) for case in _cases(4) for layout in case.layouts())
    cp4 = dist.group.WORLD
    cp2, _ = dist.new_subgroups(2)  # 0 1, 2 3
    for cp_size, group in ((2, cp2), (4, cp4)):
        for case in _cases(cp_size):
            _check_gathering(case, group)
    _check_wrong_groups(cp2, cp4)


@on_ranks(2, cpu_backend=False)
def test_backward_does_not_wait_for_ranks_without_gradient() -> None:
    # Rank 0 holds nothing but prompt, rank 1 the response.
    layout = Case((12,), (4,), cp_size=2, scheme="all-gather").layout(dist.get_rank())
    count = len(layout.response_index)
    assert everywhere(count) == [0, 4]
    log_probs = torch.zeros(count, requires_grad=True)
    entropy = torch.ones(count)  # without gradient, its coefficient is zero
    # What says nothing on the rank without tokens, and what says the wrong thing.
    for values, requires_grad in (
        (entropy, False),
        (log_probs * 2 if count else torch.zeros(0), True),
        (entropy if count else torch.zeros(0, requires_grad=True), False),
    ):
        (gathered,) = layout.gather_responses(values, dist.group.WORLD)
        assert gathered.requires_grad == requires_grad
        (log_probs.sum() + gathered.sum()).backward()
    # 1 from each of three losses' own sums, and 2 from the gathered values of the losses of both ranks.
    assert log_probs.grad.tolist() == [3 + 2 * 2] * count
