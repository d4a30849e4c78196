"""Losses of slime, vime and miles as their trainers call them, on stand-ins and on real checkouts.

Import this on ranks only, inside ``cpu_backend()``.
"""

import copy
import functools
import importlib
import inspect
import itertools
from argparse import Namespace
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl_patches.losses import PolicyBatch, PolicyOptions, policy_loss
from tests.references.dense import dense_log_probs_and_entropy

_HOMES = {framework: f"{framework}.backends.megatron_utils" for framework in ("slime", "vime")}
_HOMES["miles"] = "miles.backends.training_utils"
LOSSES = {name: f"{home}.loss" for name, home in _HOMES.items()}
SCORES = {**LOSSES, "miles": f"{_HOMES['miles']}.loss_hub.logit_processors"}
CP_UTILS = {name: f"{home}.cp_utils" for name, home in _HOMES.items()}

TOTALS, RESPONSES = (9, 11, 4), (4, 6, 2)
VOCAB = 24


class Arguments(Namespace):
    """An option that is not given is off: each release of a framework has some of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def initialize(tp: int = 1, cp: int = 1) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)


def set_parallel_state_of_miles() -> None:
    """Hand Megatron's groups to miles, which has others besides, of one rank."""
    home = importlib.import_module("miles.backends.training_utils.parallel")
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "intra_dp": parallel_state.get_data_parallel_group(),
        "intra_dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    parameters = inspect.signature(home.ParallelState).parameters.items()
    infos = dict.fromkeys(
        (name for name, parameter in parameters if parameter.default is inspect.Parameter.empty),
        home.GroupInfo(rank=0, size=1, group=None),
    )
    for name in infos.keys() & groups:
        group = groups[name]
        infos[name] = home.GroupInfo(rank=group.rank(), size=group.size(), group=group)
    home.set_parallel_state(home.ParallelState(**infos))


def _arguments_of(framework: str, options: dict[str, Any]) -> Any:
    """Return arguments that the framework reads from a command line; stand-ins have those set here."""
    module = importlib.import_module(LOSSES[framework])
    if "stand_in" not in str(module.__file__):
        args = copy.copy(_parsed(framework, *sorted(options.items())))
        if options.get("loss_type") == "value_loss":  # no command line has it: the critic sets it
            args.loss_type = "value_loss"
        return args
    ranges = {"eps_clip": 0.2, "eps_clip_high": 0.2}
    defaults = {"loss_type": "policy_loss", "rollout_temperature": 1.0, "entropy_coef": 0.0, **ranges}
    return Arguments(**{**defaults, **options})


@functools.cache
def _parsed(framework: str, *options: tuple[str, Any]) -> Any:
    from megatron_rl_patches.testing import TinyModel
    from tests.frameworks.real_jobs import parse_arguments

    flags = {"loss_type": "policy_loss", **dict(options)}
    if flags["loss_type"] == "value_loss":
        del flags["loss_type"]
    if flags.get("use_kl_loss"):
        flags["ref_load"] = "."  # a folder that is there
    tp = parallel_state.get_tensor_model_parallel_world_size()
    cp = parallel_state.get_context_parallel_world_size()
    replicas = parallel_state.get_data_parallel_world_size()
    samples = flags.pop("global_batch_size", 3 * replicas)
    return parse_arguments(framework, TinyModel(tp=tp, cp=cp), samples, **flags)


class LossJob:
    """A microbatch of packed samples, on this rank's share of the vocabulary and of the sequences."""

    def __init__(
        self,
        framework: str,
        *,
        totals: tuple[int, ...] = TOTALS,
        responses: tuple[int, ...] = RESPONSES,
        vocabulary: int = VOCAB,
        deferred: bool = False,
        masked: bool = False,
        **options: Any,
    ) -> None:
        """``masked``: each token was sampled from a part of the vocabulary, which the framework knows."""
        self.totals, self.responses, self.vocabulary = totals, responses, vocabulary
        self.framework, self.deferred = framework, deferred
        if framework == "miles":
            set_parallel_state_of_miles()
        self.args = _arguments_of(framework, options)
        generator = torch.Generator().manual_seed(0)
        self.whole = 3 * torch.randn(sum(totals), vocabulary, generator=generator)
        self.tokens = [torch.randint(vocabulary, (length,), generator=generator) for length in totals]
        self.weights = torch.linspace(0.5, 1.5, sum(responses)).split(responses)
        sampled = torch.cat([tokens[-n:] for tokens, n in zip(self.tokens, responses, strict=True)])[:, None]
        at_random = torch.rand(sum(responses), vocabulary, generator=generator) < 0.4
        self.keep_mask = at_random.scatter(1, sampled, True) if masked else None
        self.columns = columns_of_rank(vocabulary)
        self.rows = _rows_of_rank(totals, getattr(self.args, "allgather_cp", False))  # OpenClaw-RL lacks it

    def logits(self, whole_vocabulary: bool = False) -> Tensor:
        """Of the model: a leaf to read the gradient from, and no leaf to the loss."""
        padded = torch.cat([self.whole, torch.zeros(1, self.vocabulary)])
        columns = slice(None) if whole_vocabulary else self.columns
        self.leaf = padded[self.rows][:, columns].clone().requires_grad_()
        return deferred(self.leaf[None]) if self.deferred else self.leaf[None] * 1.0

    def local(self, values: Any) -> list[Tensor]:
        """This context-parallel rank's part of what is given for each response token."""
        if parallel_state.get_context_parallel_world_size() == 1:
            return list(values)
        slice_with_cp = importlib.import_module(CP_UTILS[self.framework]).slice_log_prob_with_cp
        return list(map(slice_with_cp, values, self.totals, self.responses))

    def result(self, backward: bool = True) -> dict[str, Any]:
        """Return the framework's results, and the gradient of a loss with weights that differ."""
        logits = self.logits()
        returned, scores = self.scored(logits, with_entropy=True, **self._mask())
        log_probs, entropy = torch.cat(scores["log_probs"]), torch.cat(scores["entropy"])
        weights = torch.cat(self.local(self.weights))
        loss = self._loss_of(weights, log_probs, entropy)
        if backward:
            (loss + 0 * logits.sum()).backward()
        return {
            "made": self.deferred and not logits.is_deferred,
            "returned": describe(returned),
            "requires_grad": [value.requires_grad for value in (log_probs, entropy)],
            "log_probs": log_probs.detach(),
            "entropy": entropy.detach(),
            "gradient": self.leaf.grad,
        }

    def scored(self, logits: Tensor, **further: Any) -> tuple[Any, dict[str, list[Tensor]]]:
        """Return all that the framework returns for these logits, and its scores of each response."""
        returned = importlib.import_module(SCORES[self.framework]).get_log_probs_and_entropy(
            logits, args=self.args, **self._samples(), **further
        )
        # miles, and slime up to v0.2.2, have nothing beside them.
        return returned, returned[1] if isinstance(returned, tuple) else returned

    def _samples(self) -> dict[str, Any]:
        """Return tokens and lengths under the names that frameworks have for them."""
        lengths = {"total_lengths": list(self.totals), "response_lengths": list(self.responses)}
        return {"unconcat_tokens": self.tokens, **lengths}

    def dense(self, temperature: float = 1.0) -> dict[str, Tensor]:
        """The same in float64 on the whole vocabulary; gradient of this rank's part."""
        logits = self.whole.double().requires_grad_()
        ends = torch.tensor(self.totals).cumsum(0).tolist()
        rows = torch.cat(
            [torch.arange(end - n - 1, end - 1) for end, n in zip(ends, self.responses, strict=True)]
        )
        tokens = torch.cat([tokens[-n:] for tokens, n in zip(self.tokens, self.responses, strict=True)])
        log_probs, entropy = dense_log_probs_and_entropy(logits, tokens, rows, temperature, self.keep_mask)
        self._loss_of(torch.cat(self.weights), log_probs, entropy).backward()
        padded = torch.cat([logits.grad, torch.zeros(1, self.vocabulary)])
        return {
            "log_probs": torch.cat(self.local(log_probs.detach().split(self.responses))),
            "entropy": torch.cat(self.local(entropy.detach().split(self.responses))),
            "gradient": padded[self.rows][:, self.columns],
        }

    def _mask(self) -> dict[str, Any]:
        """Return the tokens that each token was sampled from, as this release of the framework takes them."""
        if self.keep_mask is None:
            return {}
        ids_of_rows = [
            [row.nonzero().flatten().tolist() for row in mask]
            for mask in self.keep_mask.split(self.responses)
        ]
        ids = [[token for row in rows for token in row] for rows in ids_of_rows]
        offsets = [[0, *itertools.accumulate(map(len, rows))] for rows in ids_of_rows]
        names = self.names_of_masks()
        if len(names) == 1:
            make = importlib.import_module("miles.utils.sampling_mask").RolloutSamplingMask.from_mask_list
            return {names[0]: [*map(make, ids_of_rows)]}
        return dict(zip(names, (ids, offsets), strict=True))

    def names_of_masks(self) -> list[str]:
        """Return the parameters by which this release takes the tokens: masks, or their ids and offsets."""
        scores = importlib.import_module(SCORES[self.framework]).get_log_probs_and_entropy
        ends = ("sampling_mask", "token_ids", "mask_ids", "_offsets")
        return [name for name in inspect.signature(scores).parameters if name.endswith(ends)]

    def _loss_of(self, weights: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
        return (weights * log_probs).sum() - self.args.entropy_coef * (weights * entropy).sum()

    def batch(self) -> dict[str, Any]:
        """A microbatch for ``loss_function``, with ratios next to 1, so that hardly anything is clipped."""
        denominators = [torch.tensor(float(length)) for length in self.responses]
        weights = self.local(self.weights)
        lengths = list(map(len, weights))
        log_probs = self.dense(self.args.rollout_temperature)["log_probs"].float().split(lengths)
        return {
            **self._samples(),
            "loss_masks": [torch.ones(length, dtype=torch.int) for length in self.responses],
            "rollout_mask_sums": denominators,
            "group_mask_sums": denominators,
            "advantages": [w - 0.9 for w in weights],
            "log_probs": [x + 0.3 * (w - 1) for x, w in zip(log_probs, weights, strict=True)],
        }

    def loss(self, dense: bool = False, batch: dict[str, Any] | None = None) -> dict[str, Any]:
        """Through the framework's ``loss_function``, with its own policy loss.

        ``dense``: its log-probabilities and entropies are computed in float64 on the whole vocabulary.
        """
        module = importlib.import_module(LOSSES[self.framework])
        batch = self.batch() if batch is None else batch
        logits = self.logits(whole_vocabulary=dense)
        with _with_dense_scores(self.framework) if dense else nullcontext():
            returned = call(
                module.loss_function,
                args=self.args,
                batch=batch,
                num_microbatches=1,
                step_global_batch_size=3,
                logits=logits,
                apply_megatron_loss_scaling=True,
            )
            returned[0].backward()
        return {
            "made": self.deferred and not logits.is_deferred,
            "returned": describe(returned),
            "loss": returned[0].detach(),
            "metrics": dict(zip(returned[2]["keys"], returned[2]["values"][1:].tolist(), strict=True)),
            "gradient": self.leaf.grad[:, self.columns] if dense else self.leaf.grad,
        }


def deferred(logits: Tensor) -> Any:
    """Return deferred logits with these values, which are hidden states for an identity as the weight."""
    from megatron_rl_patches.losses import deferred_logits

    return deferred_logits(logits, torch.eye(logits.shape[-1]), tile_bytes=256)


def _with_dense_scores(framework: str) -> Any:
    def calculate(logits: Tensor, tokens: Tensor, *unused: Any, with_entropy: bool, **unused_too: Any) -> Any:
        log_probs, entropy = dense_log_probs_and_entropy(logits, tokens[: len(logits)])
        return log_probs[:, None], entropy if with_entropy else None

    return mock.patch.object(
        importlib.import_module(SCORES[framework]), "calculate_log_probs_and_entropy", calculate
    )


def columns_of_rank(vocabulary: int) -> slice:
    width = vocabulary // parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * width
    return slice(first, first + width)


def _rows_of_rank(totals: tuple[int, ...], allgather_cp: bool) -> Tensor:
    """Rows of the packed sequences that this context-parallel rank has; padding is row ``sum(totals)``."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1 or allgather_cp:
        piece = -(-sum(totals) // size)
        return torch.arange(rank * piece, (rank + 1) * piece).clamp(max=sum(totals))
    rows, start = [], 0
    for total in totals:
        piece = -(-total // (2 * size))
        for chunk in (rank, 2 * size - 1 - rank):
            positions = torch.arange(chunk * piece, (chunk + 1) * piece)
            rows.append(torch.where(positions < total, start + positions, sum(totals)))
        start += total
    return torch.cat(rows)


def takes_packed_tokens(gpt: Any) -> None:
    """Packed sequences need TransformerEngine's attention: here a microbatch is one sequence.

    Multi-token prediction gets its labels, and the mask of its loss.
    """
    forward = gpt.forward

    def forward_packed(input_ids: torch.Tensor, loss_mask: Any = None, **packing: Any) -> torch.Tensor:
        positions_bs = torch.arange(input_ids.size(1)).expand_as(input_ids)
        mask_ss = torch.ones(1, 1, *positions_bs.shape[-1:] * 2, dtype=torch.bool).triu(1)
        mtp = {"mtp_kwargs": packing["mtp_kwargs"], "loss_mask": loss_mask} if "mtp_kwargs" in packing else {}
        return forward(input_ids, positions_bs, mask_ss, **mtp)

    gpt.forward = forward_packed


def call(function: Any, **arguments: Any) -> Any:
    """With those arguments that this release of the function takes."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in names})


def describe(value: Any) -> Any:
    """Types, shapes and dtypes, all the way down."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [describe(item) for item in value]
    return value if isinstance(value, str) else type(value).__name__


def distance(got: Tensor, want: Tensor, at_least: float = 1e-30) -> float:
    """Largest difference, relative to the largest value, or to ``at_least``."""
    if want.numel() == 0:
        assert got.numel() == 0
        return 0.0
    largest = want.double().abs().max().clamp(min=at_least)
    return ((got.double() - want.double()).abs().max() / largest).item()


# --- importance sampling: four responses, one of them masked, and the functions of the frameworks

CORRECTIONS = {"slime": LOSSES["slime"], "miles": f"{_HOMES['miles']}.loss_hub.corrections"}
_GENERATOR = torch.Generator().manual_seed(6)
MASKS = [torch.tensor(mask).float() for mask in ([1, 1, 0, 1, 1, 1, 1], [1] * 4, [0] * 2, [1] * 3)]
SAMPLED = [torch.randn(len(mask), generator=_GENERATOR) - 5 for mask in MASKS]
TRAINED = [values + 0.3 * torch.randn(len(values), generator=_GENERATOR) for values in SAMPLED]


def importance_weights(**options: Any) -> Tensor:
    """Return what this package's policy loss weights each token with."""
    new = [values.clone().requires_grad_() for values in TRAINED]
    batch = PolicyBatch([torch.ones(())] * 4, MASKS, TRAINED, rollout_log_probs=SAMPLED)
    return -torch.cat(torch.autograd.grad(policy_loss(new, batch, PolicyOptions(**options))[0], new))
