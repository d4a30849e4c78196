"""verl's own distillation, of a tiny GPT or of given logits; see :mod:`tests.frameworks.verl_jobs`.

The teacher's distribution depends on the last token alone, so that all it knows has a closed form.
"""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_rl_patches.frameworks import verl_distillation
from tests.frameworks.loss_jobs import columns_of_rank, deferred
from tests.frameworks.verl_jobs import SAMPLES, TEMPERATURE, EngineJob, distillation_loss, on_the_cpu
from tests.references import tiny_gpt

OURS = "megatron_rl_patches."


def teacher_table(vocabulary: int, seed: int = 0) -> Tensor:
    """Log-probabilities ``[token, next token]``, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    return logits.log_softmax(1)


class DistillationJob(EngineJob):
    """``train_mini_batch`` of the worker, with verl's ``distillation_ppo_loss``.

    Args:
        table: of the teacher.
        packed: ``use_remove_padding``.
        policy: add the policy loss, so that the log-probabilities overwrite the logits.
        old: table of the policy that sampled, for :meth:`of_logits` of an objective that needs it.
    """

    def __init__(
        self,
        table: Tensor,
        loss_mode: str,
        topk: int,
        *,
        packed: bool = True,
        policy: bool = False,
        old: Tensor | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(packed, **sizes)
        self.table, self.topk, self.policy, self.packed, self.old = table, topk, policy, packed, old
        self.tu = importlib.import_module("verl.utils.tensordict_utils")
        self.workers = importlib.import_module("verl.workers.engine_workers")
        self.loss = distillation_loss(loss_mode, topk, policy)
        self.engine._is_offload_param = self.engine._is_offload_optimizer = False
        self.engine.lr_scheduler_step = lambda: None
        self.worker = object.__new__(self.workers.TrainingWorker)
        vars(self.worker).update(
            engine=self.engine,
            engine_config=self.engine.engine_config,
            loss_fn=self.loss,
            model_config={"use_remove_padding": packed},
            device_name="cpu",
            flops_counter=None,
            profiler=importlib.import_module("verl.utils.profiler").DistProfiler(rank=0, config=None),
        )

    def update(self, data: Any = None, epochs: int = 1) -> dict[str, Any]:
        """Return the metrics of an update."""
        data = self.batch() if data is None else data
        size = SAMPLES * parallel_state.get_data_parallel_world_size()
        self.tu.assign_non_tensor(data, mini_batch_size=size, epochs=epochs, seed=0, dataloader_kwargs={})
        timer, memory = SimpleNamespace(last=0.0), SimpleNamespace(used=0)
        with (
            on_the_cpu(),
            mock.patch.object(self.workers, "Timer", lambda **unused: contextlib.nullcontext(timer)),
            mock.patch.object(self.workers.psutil, "virtual_memory", lambda: memory),
        ):
            output = self.worker.train_mini_batch(data)
        return {} if output is None else self.tu.get(output, "metrics")

    def batch(self) -> Any:
        """A batch with what verl's teacher server says of it."""
        data = self.data()
        tokens = data["input_ids"]
        log_probs, ids = self.table[tokens.values()].topk(self.topk, 1)
        ends = tokens.offsets()[1:] - 1
        log_probs[ends], ids[ends] = 0.0, 0  # as verl fills up the last position
        if self.old is not None:
            log_probs = torch.cat([log_probs, buckets(self.old[tokens.values()], ids)], 1)
        for name, values in (("teacher_logprobs", log_probs.float()), ("teacher_ids", ids.int())):
            data[name] = torch.nested.nested_tensor_from_jagged(values, offsets=tokens.offsets())
        self.tu.assign_non_tensor(
            data,
            calculate_entropy=self.policy,
            distillation_use_topk=True,
            distillation_only=not self.policy,
        )
        return data

    def train_to_the_end(self, updates: int) -> None:
        for update in range(updates):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = 0.01 * (1 - update / updates)
            self.update()

    def distributions(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``[n, V]`` of student and teacher at response tokens, at the temperature."""
        data, logits, tokens = self.data(), [], []
        for sample, prompt in zip(data["input_ids"].unbind(), data["prompts"].unbind(), strict=True):
            with torch.no_grad():
                part = tensor_parallel.gather_from_tensor_model_parallel_region(
                    self.engine.module[0](sample[None])
                )
            logits.append(part[0, len(prompt) - 1 : -1].double())
            tokens.append(sample[len(prompt) - 1 : -1])
        return (torch.cat(logits) / TEMPERATURE).log_softmax(1), self.table[torch.cat(tokens)]

    def of_logits(self, is_deferred: bool = False) -> dict[str, Any]:
        """Loss and gradient, by the engine's own functions, of a student that is surer than its teacher."""
        util = importlib.import_module("verl.models.mcore.util")
        self.batches = tiny_gpt.SyntheticData()  # the same in each call
        data = self.batch()
        ids, lengths = data["input_ids"], [len(response) for response in data["responses"].unbind()]
        self.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths))
        if self.packed:
            cut, packing, _ = util.preprocess_thd_engine(ids)
        else:
            cut, mask, _ = util.preprocess_bshd_engine(ids)
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(*cut.shape, len(self.table), generator=generator)
        whole = TEMPERATURE * (1.2 * self.table[cut].float() + noise)
        leaf = whole[..., columns_of_rank(len(self.table))].clone().requires_grad_()
        logits = deferred(leaf) if is_deferred else leaf * 1.0
        with verl_distillation._shares_logits.enter(self.policy):  # as train_mini_batch does with the patch
            outputs = self.engine._lm_head_logits_processor(
                logits,
                cut.roll(-1, 1),
                torch.full(cut.shape, TEMPERATURE),
                calculate_sum_pi_squared=False,
                calculate_entropy=self.policy,
                distillation_use_topk=True,
                distillation_only=not self.policy,
                logits_processor_func=self.loss,
                batch=data,
                data_format="thd" if self.packed else "bshd",
            )
        for name, values in outputs.items():
            if self.packed:
                outputs[name] = util.postprocess_thd_engine(values, packing, ids, SAMPLES)
            else:
                outputs[name] = util.postprocess_bshd_engine(values, mask)
        loss, metrics = self.loss(model_output=outputs, data=data)
        loss.backward()
        rows, start = [], 0  # of the logits that predict a response token
        size = parallel_state.get_tensor_model_parallel_world_size()
        for tokens, response in zip(ids.unbind(), lengths, strict=True):
            rows.append(start + torch.arange(len(tokens) - response - 1, len(tokens) - 1))
            start += -(-len(tokens) // size) * size if self.packed else cut.shape[1]
        tokens = cut.flatten()[torch.cat(rows)]
        return {
            "made": is_deferred and not logits.is_deferred,
            "is_overwritten": not is_deferred and not torch.equal(logits, leaf / TEMPERATURE),
            "loss": float(loss.detach()),
            "least": metrics["distillation/loss_min"].values[0],
            "gradient": leaf.grad.flatten(0, 1),
            "student": whole.double().flatten(0, 1),
            "rows": torch.cat(rows),
            "tokens": tokens,
            "teacher": self.table[tokens],
        }


def reference(run: dict[str, Any], function: Any) -> tuple[Tensor, Tensor]:
    """Loss ``[n]`` of each response token in float64, and the gradient of their mean, of this rank's columns.

    Args:
        function: from log-probabilities ``[n, V]`` of student and teacher to losses ``[n]``.
    """
    student = run["student"].clone().requires_grad_()
    losses = function((student[run["rows"]] / TEMPERATURE).log_softmax(1), run["teacher"])
    losses.mean().backward()
    assert student.grad is not None
    return losses.detach(), student.grad[:, columns_of_rank(student.shape[1])]


def buckets(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the ids and of all others together, ``[n, k + 1]``."""
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1)
