"""Parameters of every pipeline stage, from the real ``GPTModel``: a child process builds it on meta."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...common.chunks import unwrap
from ...common.lazy import require_megatron
from ...common.text import one_line
from ...errors import InvalidInputError

if TYPE_CHECKING:
    import torch

#: Bytes of a number of each dtype.
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_TORCH_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
# What a router has with moe_router_enable_expert_bias. Other buffers are caches of rotary embeddings.
_ROUTER_BUFFERS = ("expert_bias", "local_tokens_per_expert")
# Parts of the names of fields that say how a GPU computes, and that need its packages; none changes a shape.
_COMPUTATION = re.compile(
    "batch_invariant|context_parallel|cuda_graph|deepep|dispatcher|dtype|fp4|fp8|fus|gemm|grad|grouped|inference|"
    "kitchen|memory_efficient|offload|overlap|padding|paged|persist|rank_capacity|recompute|sequence_parallel|"
    "symmetric|transformer_impl|variable|zero_centered"
)
#: Fields that a described model must have.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class GPTArguments:
    """What ``GPTModel`` needs besides a ``TransformerConfig``, by the names of its arguments.

    Attributes:
        vocab_size: before it is padded to a multiple of ``make_vocab_size_divisible_by`` × TP size.
        position_embedding_type: ``"learned_absolute"`` has ``max_sequence_length`` embeddings.
    """

    vocab_size: int
    make_vocab_size_divisible_by: int = 128
    share_embeddings_and_output_weights: bool = True
    position_embedding_type: str = "rope"
    max_sequence_length: int = 1

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return the rows of the embedding on all tensor-parallel ranks together."""
        return self.vocab_size + -self.vocab_size % (self.make_vocab_size_divisible_by * tensor_parallel_size)


class Parameter(NamedTuple):
    """One parameter or buffer of a model chunk, with its size on one rank."""

    numel: int
    dtype: str  # "bf16", "fp16" or "fp32"
    expert: bool  # its gradients are reduced over the expert-data-parallel group (``allreduce`` is False)
    head: bool = False  # it belongs to the output layer, or is the embedding that serves as one
    trained: bool = True  # False: a buffer, such as the biases of a router, without gradient and state

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return self.numel * ITEM_SIZES[self.dtype]


class Stage(NamedTuple):
    """The chunks of a pipeline stage; only those of training have multi-token prediction."""

    training: list[list[Parameter]]
    inference_only: list[list[Parameter]]


def parameters_of(chunk: torch.nn.Module) -> list[Parameter]:
    """Return the parameters of a real model chunk, in their order, and then the buffers of its routers."""
    if unknown := {str(p.dtype) for p in chunk.parameters()} - _TORCH_NAMES.keys():
        dtypes = ", ".join(sorted(unknown))
        raise InvalidInputError(f"parameters of dtype {dtypes}: counted are {', '.join(ITEM_SIZES)}")
    model: Any = unwrap(chunk)
    layer = getattr(model, "output_layer", None) if getattr(model, "post_process", True) else None
    head = set() if layer is None else set(map(id, layer.parameters()))
    if layer is not None and getattr(layer, "weight", None) is None:
        head.add(id(model.shared_embedding_or_output_weight()))
    of_routers = [buffer for name, buffer in chunk.named_buffers() if name.endswith(_ROUTER_BUFFERS)]
    return [
        Parameter(p.numel(), _TORCH_NAMES[str(p.dtype)], not getattr(p, "allreduce", True), id(p) in head)
        for p in chunk.parameters()
    ] + [Parameter(b.numel(), _TORCH_NAMES[str(b.dtype)], expert=False, trained=False) for b in of_routers]


def count_parameters(fields: Mapping[str, Any], dtype: str) -> list[Stage]:
    """Count the parameters of each pipeline stage of a model that has these fields, without memory for it."""
    require_megatron("an estimate")
    task = json.dumps([fields, dtype], default=repr)
    # Counting needs no patches, and their messages would confuse.
    variables = {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_RL_PATCHES": "0"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, "-m", __name__]
    child = subprocess.run(command, input=task, capture_output=True, text=True, env=environment)
    if child.returncode:
        last_line = child.stderr.strip().rpartition("\n")[2]
        raise InvalidInputError(f"counting the parameters failed ({child.returncode}): {last_line}")
    answer = json.loads(child.stdout.splitlines()[-1])
    if isinstance(answer, str):
        raise InvalidInputError(answer)
    return [Stage(*([[Parameter(*p) for p in chunk] for chunk in use] for use in stage)) for stage in answer]


# --- in the child process


def main() -> None:
    """Read the task as JSON from stdin; write the stages, or why there are none, to stdout."""
    fields, dtype = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    # Without these the local layers use torch's norms, which have the same parameters and build anywhere.
    for absent in ("apex", "transformer_engine"):
        sys.modules[absent] = cast(ModuleType, None)
    try:
        answer: list[Any] | str = list(stages(fields, dtype))
    except InvalidInputError as error:
        answer = " ".join(str(error).split())
    except Exception as error:
        answer = f"Megatron does not build this model: {one_line(error)}"
        if "divisible by pipeline" in answer:
            answer += "; num_layers_in_last_pipeline_stage (or _first_) gives one stage another number"
    print(json.dumps(answer))


def stages(fields: Mapping[str, Any], dtype: str) -> Iterator[Stage]:
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from ..models.model import build_inference_model

    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    _check(fields, config_class)
    values = {name: value for name, value in fields.items() if not _COMPUTATION.search(name)}
    own = {name: values.pop(name) for name in GPTArguments.__annotations__ if name in values}
    values["mtp_num_layers"] = values.get("mtp_num_layers") or None
    if values.get("virtual_pipeline_model_parallel_size") == 1:
        del values["virtual_pipeline_model_parallel_size"]
    model = config_class(**{**values, "pipeline_dtype": torch.float32, "perform_initialization": False})
    if not model.multi_latent_attention and model.num_attention_heads % model.num_query_groups:
        raise InvalidInputError(
            f"num_query_groups is {model.num_query_groups}; expected a divisor of num_attention_heads, "
            f"{model.num_attention_heads}"
        )
    for stage in range(model.pipeline_model_parallel_size):
        with _fake_rank(model, stage):
            provider = functools.partial(_provide, GPTArguments(**own))
            build = functools.partial(build_inference_model, provider, model, dtype=dtype, device="meta")
            training = scoring = list(map(parameters_of, build()))
            if model.mtp_num_layers:
                training = list(map(parameters_of, build(with_mtp=True)))
            yield Stage(training, scoring)


def _check(fields: Mapping[str, Any], config_class: Any) -> None:
    """Refuse names that are no fields, and what Megatron would misread: the text ``"False"`` is true."""
    all_fields = (*dataclasses.fields(config_class), *dataclasses.fields(GPTArguments))
    defaults = {field.name: field.default for field in all_fields}
    for name, value in fields.items():
        if name not in defaults:
            meant = "".join(f"; did you mean {n}?" for n in difflib.get_close_matches(name, defaults, 1))
            owner = f"{config_class.__name__} of this megatron-core"
            raise InvalidInputError(f"{name}: {owner} has no such field{meant}")
        default = defaults[name]
        if None not in (default, value) and isinstance(default, bool) != isinstance(value, bool):
            raise InvalidInputError(f"{name} is {value!r}; expected a value such as {default!r}")
        if type(value) is int and value < (name in REQUIRED):
            raise InvalidInputError(f"{name} is {value}; it must be at least {int(name in REQUIRED)}")
    if missing := [name for name in REQUIRED if name not in fields]:
        raise InvalidInputError(f"missing: {', '.join(missing)}")


@contextmanager
def _fake_rank(config: Any, stage: int) -> Iterator[None]:
    """Act as the first rank of a pipeline stage; there are no replicas, as they have the same shapes."""
    import torch.distributed
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp, pp, ep = (getattr(config, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert"))
    experts_tp, vpp = config.expert_tensor_parallel_size or tp, config.virtual_pipeline_model_parallel_size
    experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": experts_tp}
    ranks = math.lcm(tp, ep * experts_tp)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=stage * ranks, world_size=pp * ranks)
    try:
        parallel_state.initialize_model_parallel(tp, pp, vpp, **experts, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _provide(
    own: GPTArguments, config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    # Some releases set HAVE_TE if their own wrapper file can be imported, and then fail on missing classes.
    multi_latent_attention.HAVE_TE = False
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    arguments = {"use_transformer_engine": False, "normalization": config.normalization}
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, **arguments, vp_stage=vp_stage)
    block.layer_specs = [_buildable(config, spec, first + i) for i, spec in enumerate(block.layer_specs)]
    mtp = None
    if config.mtp_num_layers:
        # These layers are built like the last one; a stage of a pipeline's layout may have no others.
        last: Any = block
        if not block.layer_specs:
            *_, last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **arguments)
            last = _buildable(config, last, config.num_layers - 1)
        local: Any = {"use_transformer_engine": False, "vp_stage": vp_stage}
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, **local)
    values = dataclasses.asdict(own)
    del values["make_vocab_size_divisible_by"]
    values["vocab_size"] = own.padded_vocab_size(config.tensor_model_parallel_size)
    ends = {"pre_process": pre_process, "post_process": post_process}
    return GPTModel(config, block, **values, **ends, mtp_block_spec=mtp, vp_stage=vp_stage)


def _buildable(config: Any, spec: Any, number: int) -> Any:
    """Return the specification of a layer in which everything can be built without a GPU's packages."""
    from megatron.core.transformer.identity_op import IdentityOp

    spec = copy.deepcopy(spec)
    layer = spec.submodules
    if config.multi_latent_attention:
        # Core attention has no parameters then, and the local implementation refuses latent attention.
        layer.self_attention.submodules.core_attention = IdentityOp
    if getattr(config, "experimental_attention_variant", None) is None:
        return spec

    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.ssm import gated_delta_net

    if variants.get_linear_attention_pattern(config)[number]:
        gated_delta_net.HAVE_FLA = True  # the class refuses to be built without kernels, which only compute
        attention = variants.get_gated_delta_net_module_spec(config, LocalSpecProvider())
        # The norm of the input, which TransformerEngine fuses with this projection, is one of the layer here.
        attention.submodules.in_proj = LocalSpecProvider().column_parallel_linear()
        layer.self_attention = attention
    return spec


if __name__ == "__main__":
    main()
