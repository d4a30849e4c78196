"""verl's own Megatron engine, with given logits, or a tiny GPT in the place of the model that it would load.

The teacher's distribution depends on the last token alone, so that all it knows has a closed form. Import
this on ranks only, inside ``cpu_backend()``, with verl and tensordict on the path.
"""

import contextlib
import functools
import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_rl_patches.frameworks import verl_distillation
from megatron_rl_patches.testing import TinyModel
from tests.frameworks import import_stubs, loss_jobs
from tests.frameworks.loss_jobs import columns_of_rank, describe
from tests.frameworks.rollouts import check_layers
from tests.references import tiny_gpt
from tests.references.dense import buckets, dense_log_probs_and_entropy

VERL_ENGINE = "verl.workers.engine.megatron.transformer_impl"
SAMPLES = 2
TEMPERATURE = 0.7
#: Of each command line. A microbatch is one sample.
WORDS = (
    "model_engine=megatron",
    "actor_rollout_ref.model.path=.",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)


@functools.cache
def read(*words: str) -> Any:
    """Return what verl reads from the command line of its ``main_ppo``."""
    hydra = importlib.import_module("hydra")
    folder = Path(str(importlib.import_module("verl.trainer.main_ppo").__file__)).with_name("config")
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", [*WORDS, *words])


def distillation(**loss: Any) -> list[str]:
    """Return words of a command line: a teacher, whose servers have eight GPUs, and options of the loss."""
    loss = {name: "null" if value is None else value for name, value in loss.items()}
    return [
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.teacher_models.teacher_model.model_path=.",
        *(f"distillation.distillation_loss.{name}={value}" for name, value in loss.items()),
    ]


def make_engine(*words: str) -> tuple[Any, Any]:
    """Return the engine without a model, and its loss, as verl's worker makes them of a command line.

    There are no files of Hugging Face: neither a tokenizer nor weights.
    """
    workers = importlib.import_module("verl.workers.engine_workers")
    hf_config = SimpleNamespace(architectures=["GPT"], model_type="qwen3", hidden_size=tiny_gpt.HIDDEN)
    hf_config.vocab_size = tiny_gpt.VOCABULARY
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config, made = read(*words), mock.MagicMock()
    made.return_value.get_dispatch_collect.return_value = {"dispatch_dp_rank": {}, "collect_dp_rank": {}}
    worker_type = workers.ActorRolloutRefWorker
    with (
        mock.patch.object(workers.Worker, "__init__", lambda self: setattr(self, "_rank", 0)),
        mock.patch.object(worker_type, "set_dispatch_collect"),
        mock.patch.object(worker_type, "actor_worker_cls", made),
        mock.patch.multiple(
            importlib.import_module("verl.workers.config.model"),
            AutoConfig=mock.Mock(from_pretrained=lambda *unused, **unused_too: hf_config),
            hf_tokenizer=lambda *unused, **unused_too: tokenizer,
            hf_processor=lambda *unused, **unused_too: None,
            get_generation_config=lambda *unused, **unused_too: None,
        ),
    ):
        worker = worker_type(config.actor_rollout_ref, "actor", distillation_config=config.distillation)
        worker.init_model()
    of_worker = made.call_args.kwargs["config"]
    engine = importlib.import_module(VERL_ENGINE).MegatronEngineWithLMHead(
        of_worker.model_config,
        of_worker.engine_config,
        of_worker.optimizer_config,
        of_worker.checkpoint_config,
    )
    return engine, worker.loss_fn


def build_model(engine: Any, options: TinyModel) -> None:
    """Let the engine build its model with Megatron-Bridge; the layers are TransformerEngine's.

    The model is like Qwen3. There are no weights to load.
    """
    if "megatron.bridge" not in sys.modules:
        import_stubs.install(f"{import_stubs.PACKAGES} {import_stubs.OF_BRIDGE}")
        importlib.import_module("tensorboard.compat.tf.io.gfile")  # it takes this for an attribute
    providers = importlib.import_module("megatron.bridge.models.qwen.qwen_provider")
    of_model = options.transformer_config()
    hidden, heads = of_model.hidden_size, of_model.num_attention_heads
    of_experts = {"moe_router_topk": 2, "moe_ffn_hidden_size": hidden}
    experts = {"num_moe_experts": of_model.num_moe_experts, **of_experts} if of_model.num_moe_experts else {}
    provider = getattr(providers, "Qwen3MoEModelProvider" if experts else "Qwen3ModelProvider")(
        num_layers=of_model.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=options.vocab_size,
        seq_length=options.seq_length,
        **experts,
    )
    bridge = SimpleNamespace(
        to_megatron_provider=lambda load_weights: provider, load_hf_weights=lambda *args, **kwargs: None
    )
    auto_bridge = SimpleNamespace(from_hf_pretrained=lambda *args, **kwargs: bridge)
    with mock.patch.object(importlib.import_module("verl.models.mcore.bridge"), "AutoBridge", auto_bridge):
        engine._build_tf_config()
        engine.module = engine._build_megatron_module()
    engine.optimizer = engine._build_optimizer()


def process_logits(engine: Any, logits: Tensor, labels: Tensor, temperature: Tensor, **ways: Any) -> Any:
    """Call the engine's ``_lm_head_logits_processor``, for log-probs alone unless the ways say otherwise."""
    defaults = {
        "calculate_sum_pi_squared": False,
        "calculate_entropy": False,
        "distillation_use_topk": False,
        "distillation_only": False,
        "batch": None,
        "logits_processor_func": None,
        "data_format": "thd",
    }
    return engine._lm_head_logits_processor(logits, labels, temperature, **{**defaults, **ways})


def on_the_cpu() -> Any:
    """A TensorDict does not know that the GPU's index means the CPU."""
    return mock.patch.object(importlib.import_module(VERL_ENGINE), "get_device_id", lambda: "cpu")


def tensordict(jagged: dict[str, list[Tensor]], numbers: dict[str, Any], **columns: Tensor) -> Any:
    """A batch of samples; those of the first columns have lengths of their own, and no padding."""
    for name, values in jagged.items():
        columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return importlib.import_module("verl.utils.tensordict_utils").get_tensordict(columns, numbers)


def sizes_of_large_logits(tp: int) -> tuple[dict[str, Any], int]:
    """Return sizes of a model, and elements of its logits: any other tensor has less than half of them."""
    tiny_gpt.VOCABULARY, tiny_gpt.SEQUENCE = 2048, 256
    config = {"num_layers": 1, "num_attention_heads": 2}
    return {"tp": tp, "vocab_size": 2048, "seq_length": 256, "config": config}, 256 * 2048 // tp


class EngineJob:
    """``train_batch`` and ``infer_batch`` with PPO's loss, the entropy and a temperature."""

    def __init__(self, *words: str, packed: bool = True, **sizes: Any) -> None:
        options = TinyModel(**sizes, bf16=True, overlap_param_gather=False)
        options.initialize()
        parallel_state.destroy_model_parallel()
        actor, megatron = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
        self.engine, self.loss = make_engine(
            f"actor_rollout_ref.model.use_remove_padding={packed}",
            f"{actor}.entropy_coeff=0.1",
            f"{actor}.optim.lr={options.lr}",
            f"{megatron}.tensor_model_parallel_size={options.tp}",
            f"{megatron}.expert_model_parallel_size={options.ep}",
            f"{megatron}.sequence_parallel={options.layers != 'local'}",
            f"+{megatron}.override_ddp_config.overlap_grad_reduce={options.overlap_grad_reduce}",
            *words,
        )
        if options.layers == "transformer_engine":
            build_model(self.engine, options)
        else:
            model, self.engine.optimizer = options.build()
            utils = importlib.import_module("verl.utils.megatron_utils")
            utils.register_megatron_training_hooks(model, self.engine.optimizer)
            for chunk in model:
                loss_jobs.takes_packed_tokens(unwrap_model(chunk))
            self.engine.module, self.engine.tf_config = model, get_model_config(model[0])
        check_layers(self.engine.module, options)
        self.batches = tiny_gpt.SyntheticData()
        self.model, self.request = self.engine.module, dict[str, Any]()
        self.tu = importlib.import_module("verl.utils.tensordict_utils")
        self.workers = importlib.import_module("verl.workers.engine_workers")
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

    def scores(self) -> Any:
        """Scores of the next batch, without gradients; its tokens; and the states before the output layer."""
        states, data = list[Tensor](), self.data()
        head = unwrap_model(self.engine.module[0]).output_layer
        hook = head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        with on_the_cpu(), self.engine.eval_mode(disable_auto_offload=True):
            output = self.engine.infer_batch(data)["model_output"]
        hook.remove()
        return output, data["input_ids"].unbind(), states

    def errors(self, scores: Any) -> list[Tensor]:
        """Differences of log-probabilities and entropies from float64, of the same states and weights."""
        output, tokens, states = scores
        head = unwrap_model(self.engine.module[0]).output_layer
        weight = gather_from_sequence_parallel_region(head.weight.detach()).double()
        if head.sequence_parallel:
            states = map(gather_from_sequence_parallel_region, states)
        exact = [
            dense_log_probs_and_entropy(of[: len(ids) - 1, 0] @ weight.T, ids[1:], temperature=TEMPERATURE)
            for of, ids in zip(map(Tensor.double, states), tokens, strict=True)
        ]
        got = (torch.cat([of[:-1] for of in output[name].unbind()]) for name in ("log_probs", "entropy"))
        return [one - torch.cat(of) for one, of in zip(got, zip(*exact, strict=True), strict=True)]

    def train(self) -> list[float]:
        """Return the losses of the microbatches, and the gradient norm; ``gradient`` is what it is of."""
        step = self.engine.optimizer_step

        def noting() -> Any:
            self.gradient = [p.main_grad.clone() for c in self.engine.module for p in c.parameters()]
            return step()

        noted = mock.patch.object(self.engine, "optimizer_step", noting)
        with on_the_cpu(), noted, self.engine.train_mode(disable_auto_offload=True):
            output = self.engine.train_batch(self.data(), self.loss)
            norm = output["metrics"].get("grad_norm", 0.0)  # on one rank of the model only
        return [*output["loss"], float(norm)]

    def update(self, data: Any = None, epochs: int = 1) -> dict[str, Any]:
        data = self.batch() if data is None else data
        size = SAMPLES * parallel_state.get_data_parallel_world_size()
        self.tu.assign_non_tensor(data, mini_batch_size=size, epochs=epochs, seed=0, dataloader_kwargs={})
        output = self._call_worker("train_mini_batch", data)
        return {} if output is None else self.tu.get(output, "metrics")

    def scored(self, temperature: float = TEMPERATURE, scoring: Any = contextlib.nullcontext) -> Any:
        """Return the next batch, whose old log-probs the worker has scored in this context of the job."""
        data = self.batch()
        request = data.clone()
        request["temperature"] = torch.full((SAMPLES,), temperature)
        with scoring(self):
            self.tu.assign_non_tensor(request, compute_loss=False, **self.request)
            scores = self._call_worker("infer_batch", request)["log_probs"].unbind()
        parts = zip(scores, data["responses"].unbind(), strict=True)
        log_probs = [of[-len(response) - 1 : -1].float() for of, response in parts]
        data["old_log_probs"] = torch.nested.as_nested_tensor(log_probs, layout=torch.jagged)
        return data

    def _call_worker(self, method: str, data: Any) -> Any:
        timer, memory = SimpleNamespace(last=0.0), SimpleNamespace(used=0)
        with (
            on_the_cpu(),
            mock.patch.object(self.engine, "lr_scheduler_step", lambda: None),
            mock.patch.object(self.workers, "Timer", lambda **unused: contextlib.nullcontext(timer)),
            mock.patch.object(self.workers.psutil, "virtual_memory", lambda: memory),
        ):
            return getattr(self.worker, method)(data)

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for chunk in self.engine.module for parameter in chunk.parameters()]

    def batch(self) -> Any:
        return self.data()

    def data(self) -> Any:
        prompt = tiny_gpt.SEQUENCE // 2
        tokens = [next(self.batches)["tokens"][0] for _ in range(SAMPLES)]
        # Samples have lengths of their own.
        tokens = [sample[: len(sample) - 2 * number] for number, sample in enumerate(tokens)]
        responses = [sample[prompt:] for sample in tokens]
        log_prob = -math.log(tiny_gpt.VOCABULARY)
        jagged = {
            "input_ids": tokens,
            "prompts": [sample[:prompt] for sample in tokens],
            "responses": responses,
            "loss_mask": [torch.ones_like(response) for response in responses],
            "response_mask": [torch.ones_like(response) for response in responses],
            "old_log_probs": [torch.full(response.shape, log_prob) for response in responses],
            "advantages": [torch.linspace(-1, 1, len(response)) for response in responses],
            "routed_experts": [torch.arange(2).expand(len(sample), 4, 2) for sample in tokens],
        }
        numbers = {
            "calculate_entropy": True,
            "enable_routing_replay": self.engine.enable_routing_replay,
            "global_batch_size": SAMPLES,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
        }
        return tensordict(jagged, numbers, temperature=torch.full((SAMPLES,), TEMPERATURE))


class LogitsJob:
    """The engine's ``_lm_head_logits_processor``, and the functions under it."""

    def __init__(self, rows: int = 10, vocabulary: int = loss_jobs.VOCAB, deferred: bool = False) -> None:
        self.deferred = deferred
        self.columns = columns_of_rank(vocabulary)
        generator = torch.Generator().manual_seed(0)
        self.whole = 3 * torch.randn(1, rows, vocabulary, generator=generator)
        self.labels = torch.randint(vocabulary, (1, rows), generator=generator)
        self.temperature = torch.full((1, rows), TEMPERATURE)
        if deferred:
            self.temperature[:, -2:] = 0.0  # as verl pads it; not elsewhere, since verl makes it 1e-8
        self.weights = torch.linspace(0.5, 1.5, rows)

    def logits(self) -> Tensor:
        self.leaf = self.whole[..., self.columns].clone().requires_grad_()
        return loss_jobs.deferred(self.leaf) if self.deferred else self.leaf * 1.0

    def processed(self, entropy: bool, chunks: bool = False, squares: bool = True) -> dict[str, Any]:
        actor = "actor_rollout_ref.actor"
        engine, _ = make_engine(
            f"{actor}.megatron.entropy_from_logits_with_chunking={chunks}",
            f"{actor}.megatron.entropy_from_logits_chunk_size=4",
        )
        logits = self.logits()
        returned = process_logits(
            engine,
            logits,
            self.labels,
            self.temperature.clone(),
            calculate_sum_pi_squared=squares,
            calculate_entropy=entropy,
        )
        self._loss_of(returned).backward()
        return {
            "made": self.deferred and not logits.is_deferred,
            "returned": describe(dict(sorted(returned.items()))),
            **{name: value.detach() for name, value in returned.items()},
            "gradient": self.leaf.grad,
        }

    def dense(self, entropy: bool) -> dict[str, Tensor]:
        logits = self.whole.double().requires_grad_()
        scores = dense_log_probs_and_entropy(logits[0], self.labels[0], temperature=TEMPERATURE)
        values = {"log_probs": scores[0][None]} | ({"entropy": scores[1][None]} if entropy else {})
        self._loss_of(values).backward()
        seen = {name: value.detach() for name, value in values.items()}
        return {**seen, "gradient": logits.grad[..., self.columns]}

    def _loss_of(self, scores: dict[str, Tensor]) -> Tensor:
        loss = (self.weights * scores["log_probs"]).sum()
        if "entropy" in scores:
            loss = loss - 0.1 * (self.weights * scores["entropy"]).sum()
        return loss


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
        words = distillation(loss_mode=loss_mode, topk=topk, use_task_rewards=policy)
        super().__init__(*words, packed=packed, **sizes)
        self.table, self.topk, self.policy, self.packed, self.old = table, topk, policy, packed, old
        self.flags = {"calculate_entropy": policy, "distillation_only": not policy}
        self.flags["distillation_use_topk"] = True

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
        self.tu.assign_non_tensor(data, **self.flags)
        return data

    def of_logits(self, is_deferred: bool = False) -> dict[str, Any]:
        """Loss and gradient, by the engine's own functions, of a student that is surer than its teacher."""
        util = importlib.import_module("verl.models.mcore.util")
        self.batches = tiny_gpt.SyntheticData()  # the same in each call
        data = self.batch()
        ids, lengths = data["input_ids"], [len(response) for response in data["responses"].unbind()]
        self.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths))
        way, further = ("thd", (ids, SAMPLES)) if self.packed else ("bshd", ())
        cut, layout, _ = getattr(util, f"preprocess_{way}_engine")(ids)
        postprocess = getattr(util, f"postprocess_{way}_engine")
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(*cut.shape, len(self.table), generator=generator)
        whole = TEMPERATURE * (1.2 * self.table[cut].float() + noise)
        leaf = whole[..., columns_of_rank(len(self.table))].clone().requires_grad_()
        logits = loss_jobs.deferred(leaf) if is_deferred else leaf * 1.0
        with verl_distillation._shares_logits.enter(self.policy):  # as train_mini_batch does with the patch
            outputs = process_logits(
                self.engine,
                logits,
                cut.roll(-1, 1),
                torch.full(cut.shape, TEMPERATURE),
                **self.flags,
                logits_processor_func=self.loss,
                batch=data,
                data_format=way,
            )
        outputs = {name: postprocess(values, layout, *further) for name, values in outputs.items()}
        loss, metrics = self.loss(model_output=outputs, data=data)
        loss.backward()
        places = postprocess(torch.arange(cut.numel()).view(cut.shape), layout, *further).unbind()
        # Of the logits that predict a response token.
        rows = torch.cat([of[-length - 1 : -1] for of, length in zip(places, lengths, strict=True)])
        tokens = cut.flatten()[rows]
        return {
            "made": is_deferred and not logits.is_deferred,
            "is_overwritten": not is_deferred and not torch.equal(logits, leaf / TEMPERATURE),
            "loss": float(loss.detach()),
            "least": metrics["distillation/loss_min"].values[0],
            "gradient": leaf.grad.flatten(0, 1),
            "student": whole.double().flatten(0, 1),
            "rows": rows,
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
