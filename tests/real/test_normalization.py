"""``check_normalization`` on losses with known faults, and on this package's own losses.

Losses import Megatron when they are called, as that of a framework may have to be found first.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import SPLITS, Microbatch, NormalizationReport, Split, check_normalization
from megatron_rl_patches.testing import normalization as module

pytestmark = pytest.mark.runs("losses", ranks=[1, 2])

VOCABULARY = 32
#: Prompt and response of each sample: their numbers of tokens differ in every split.
LENGTHS = ((2, 8), (1, 7), (5, 1), (1, 9), (1, 4), (2, 2), (3, 1), (1, 3))
#: Samples in which every token is masked.
MASKED = (3, 7)
TOPK = 4


def global_batch() -> list[dict[str, torch.Tensor]]:
    """Return samples, with a teacher whose tails are next to nothing.

    Frameworks that leave the tail out have the same gradient then.
    """
    generator = torch.Generator().manual_seed(0)
    batch = []
    for number, (prompt, response) in enumerate(LENGTHS):
        mask = torch.ones(response, dtype=torch.int)
        if response > 3:
            mask[1] = 0  # the output of a tool
        if number in MASKED:
            mask.zero_()
        tail = torch.full((response,), 1e-6).log()
        ids = torch.rand(response, VOCABULARY, generator=generator).topk(TOPK, dim=1).indices
        teacher_logits = torch.randn(response, TOPK, generator=generator)
        batch.append(
            {
                "tokens": torch.randint(VOCABULARY, (prompt + response,), generator=generator),
                "loss_mask": mask,
                "advantages": torch.randn(response, generator=generator),
                "old_log_probs": -3.5 + 0.1 * torch.randn(response, generator=generator),
                "values": torch.zeros(response),
                "returns": torch.randn(response, generator=generator),
                "teacher_ids": ids,
                "teacher_log_probs": teacher_logits.log_softmax(1) + torch.log1p(-tail.exp())[:, None],
                "teacher_tail": tail,
            }
        )
    return batch


def of_package(options: Any, microbatch: Microbatch, logits: torch.Tensor, divisor: Any = None) -> Any:
    """The loss of this package, as its documentation says for either value of calculate_per_token_loss.

    Args:
        divisor: what Megatron's average over microbatches divides by, if it is not the right number.
    """
    from megatron.core import parallel_state

    samples = microbatch.samples
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    layout = losses.SequenceLayout.build(
        list(map(len, columns["tokens"])),
        list(map(len, columns["loss_mask"])),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )
    if not microbatch.calculate_per_token_loss and divisor is None:
        masks = [sample["loss_mask"] for sample in microbatch.batch]
        microbatches = microbatch.num_microbatches * microbatch.split.dp
        divisor = losses.mean_count(masks, microbatches, options.normalization)
    cp_group = parallel_state.get_context_parallel_group() if microbatch.split.cp > 1 else None
    groups = {"cp_group": cp_group, "normalizer": divisor}
    if isinstance(options, losses.DistillationOptions):
        names = ("teacher_ids", "teacher_log_probs", "teacher_tail")
        teacher = [losses.TopKDistribution(*(sample[name] for name in names)) for sample in samples]
        batch = losses.DistillationBatch([teacher], columns["loss_mask"])
        return losses.make_distillation_loss_func(layout, batch, options, **groups)(logits)
    policy = losses.PolicyBatch(columns["advantages"], columns["loss_mask"], columns["old_log_probs"])
    return losses.make_loss_func(columns["tokens"], layout, policy, options, **groups)(logits)


def counted_on_each_cp_rank(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: each rank has the loss of whole samples, and should count their tokens once."""
    loss, tokens, metrics = of_package(losses.PolicyOptions(), microbatch, logits)
    return loss, tokens * microbatch.split.cp, metrics


def mean_over_microbatch(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: the mean over tokens of a microbatch, which Megatron averages."""
    tokens = sum(int(sample["loss_mask"].sum()) for sample in microbatch.samples)
    return of_package(losses.PolicyOptions(), microbatch, logits, max(tokens, 1))


def of_nothing(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    return 0 * logits.sum(), {}


@pytest.fixture(autouse=True)
def _forks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spawn_ranks", ranks)


ONLY_CP = {"CP 2": SPLITS["CP 2"]}
ONE_RANK = {name: SPLITS[name] for name in ("2 microbatches", "uneven microbatches")}


@pytest.mark.parametrize(
    ("options", "normalization", "calculate_per_token_loss"),
    [
        pytest.param(*case, marks=pytest.mark.slow if index in (0, 7) else pytest.mark.nightly)
        for index, case in enumerate(
            product((losses.PolicyOptions, losses.DistillationOptions), ("token", "sequence"), (True, False))
        )
    ],
)
def test_own_losses_weigh_the_same(options: Any, normalization: Any, calculate_per_token_loss: bool) -> None:
    loss_func = partial(of_package, options(normalization=normalization))
    report = check_normalization(loss_func, global_batch(), calculate_per_token_loss=calculate_per_token_loss)
    assert report.same, report
    assert list(report.differences) == list(SPLITS)


def test_means_over_microbatches() -> None:
    report = check_normalization(mean_over_microbatch, global_batch(), ONE_RANK)
    assert report.different == list(ONE_RANK)


def test_context_parallelism_that_is_forgotten() -> None:
    loss_func = counted_on_each_cp_rank
    report = check_normalization(loss_func, global_batch(), ONLY_CP, calculate_per_token_loss=True)
    assert report.differences == {"CP 2": pytest.approx(0.5, rel=1e-4)}


def test_a_loss_of_nothing() -> None:
    with pytest.raises(InvalidInputError, match="gradient of the undivided batch has the norm 0"):
        check_normalization(of_nothing, global_batch(), ONLY_CP)


def test_cuts() -> None:
    for split, expected in (
        (Split(dp=2, microbatches=2), [[[10, 8], [6, 10]], [[5, 4], [4, 4]]]),
        (Split(dp=2, microbatches=2, even=False), [[[10], [8]], [[6], [10, 5, 4, 4, 4]]]),
    ):
        cut = [[[len(x["tokens"]) for x in part] for part in of_dp] for of_dp in split.cut(global_batch())]
        assert cut == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": []}, "batch and splits must not be empty"),
        ({"splits": {}}, "batch and splits must not be empty"),
        ({"batch": [{"tokens": torch.zeros(3)}]}, r"sample 0 of the batch needs .* loss_mask"),
        ({"batch": [{"tokens": torch.zeros(3), "loss_mask": torch.ones(3)}]}, "one token of a prompt"),
        ({"batch": global_batch()[:1] * 2}, "same number of unmasked tokens"),
        ({"splits": {"none": Split(dp=0)}}, "sizes must be positive, and they are .*dp=0"),
        ({"splits": {"many": Split(dp=3)}}, "8 samples, and .*dp=3.* needs a multiple of 3"),
        ({"splits": {"more": Split(microbatches=9, even=False)}}, "a multiple of 9, or as many at least"),
    ],
)
def test_bad_input_starts_no_rank(changes: dict[str, Any], message: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spawn_ranks", lambda *args: pytest.fail("a rank has started"))
    with pytest.raises(InvalidInputError, match=message):
        check_normalization(of_nothing, **{"batch": global_batch(), **changes})


def test_a_report_is_a_table() -> None:
    report = NormalizationReport({"DP 2": 1e-7, "nothing": float("nan")})
    assert str(report).splitlines() == [
        "split                   relative difference from the undivided batch",
        "DP 2                    1.0e-07",
        "nothing                 nan",
    ]
    assert not report.same and report.different == ["nothing"]
    assert NormalizationReport({"DP 2": 1e-7}).same
