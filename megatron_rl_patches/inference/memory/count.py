"""Parameters of every pipeline stage, from the real ``GPTModel`` on the meta device.

A child process builds it, with torch's fake process groups, so that the caller's groups stay untouched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...common.chunks import unwrap
from ...errors import InvalidInputError
from .model import GPTDescription, ParallelSizes

if TYPE_CHECKING:
    import torch


#: Bytes of a number, and torch's name, of each dtype.
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
# What a router has with moe_router_enable_expert_bias. Other buffers are caches of rotary embeddings.
_ROUTER_BUFFERS = ("expert_bias", "local_tokens_per_expert")
_TORCH_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


class Parameter(NamedTuple):
    """One parameter or buffer of a model chunk, with its size on one rank."""

    numel: int
    #: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    dtype: str
    #: Its gradients are reduced over the expert-data-parallel group (Megatron: ``allreduce`` is False).
    expert: bool
    #: It belongs to the output layer, or is the embedding that serves as one.
    head: bool = False
    #: False: a buffer, such as the biases of a router, without gradient and optimizer state.
    trained: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return self.numel * ITEM_SIZES[self.dtype]


class Stage(NamedTuple):
    """The chunks of a pipeline stage, which differ where only training has multi-token prediction."""

    training: list[list[Parameter]]
    inference_only: list[list[Parameter]]


def parameters_of(chunk: torch.nn.Module) -> list[Parameter]:
    """Return the parameters of a real model chunk, in their order, and then the buffers of its routers."""
    if unknown := {str(p.dtype) for p in chunk.parameters()} - _TORCH_NAMES.keys():
        dtypes = ", ".join(sorted(unknown))
        raise InvalidInputError(f"parameters of dtype {dtypes}: counted are {', '.join(ITEM_SIZES)}")
    head = _output_layer_of(unwrap(chunk))
    parameters = [
        Parameter(p.numel(), _TORCH_NAMES[str(p.dtype)], not getattr(p, "allreduce", True), id(p) in head)
        for p in chunk.parameters()
    ]
    # Megatron keeps the biases of routers in fp32: Float16Module converts them, the first forward pass back.
    buffers = [
        Parameter(
            buffer.numel(),
            "fp32" if name.endswith("expert_bias") else _TORCH_NAMES[str(buffer.dtype)],
            expert=False,
            trained=False,
        )
        for name, buffer in chunk.named_buffers()
        if name.endswith(_ROUTER_BUFFERS)
    ]
    return parameters + buffers


def _output_layer_of(model: Any) -> set[int]:
    """Return the identities of the parameters of the output layer."""
    layer = getattr(model, "output_layer", None)
    if layer is None or not getattr(model, "post_process", True):
        return set()
    is_shared = getattr(layer, "weight", None) is None
    shared = [model.shared_embedding_or_output_weight()] if is_shared else []
    return set(map(id, [*layer.parameters(), *shared]))


def count_parameters(description: GPTDescription, sizes: ParallelSizes, dtype: str) -> list[Stage]:
    """Count the parameters of each pipeline stage, in seconds and without memory for them."""

    def plain(value: Any) -> Any:
        """Return what JSON knows in place of a pipeline's layout in a config, or of a kind of layer."""
        return value.input_data if hasattr(value, "input_data") else value.name

    return _counted(json.dumps([vars(description), vars(sizes), dtype], default=plain))


@functools.cache
def _counted(task: str) -> list[Stage]:
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=task,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",
            # Counting needs no patches, and their messages would confuse.
            "MEGATRON_RL_PATCHES": "0",
        },
    )
    if child.returncode:
        raise InvalidInputError(f"counting the parameters failed:\n{child.stderr.strip()}")
    answer = json.loads(child.stdout.splitlines()[-1])
    if isinstance(answer, str):
        raise InvalidInputError(f"Megatron does not build this model: {answer}")
    return [Stage(*([[Parameter(*p) for p in chunk] for chunk in use] for use in stage)) for stage in answer]


def main() -> None:
    """Run the child: reads a task as JSON from stdin, writes the stages or Megatron's objection to stdout."""
    description, sizes, dtype = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    # Without these the local layers use torch's norms, which have the same parameters and build anywhere.
    for absent in ("apex", "transformer_engine"):
        sys.modules[absent] = cast(ModuleType, None)
    answer: list[Any] | str
    try:
        answer = list(_stages(GPTDescription(**description), ParallelSizes(**sizes), dtype))
    except Exception as error:
        answer = str(error) or repr(error)
    print(json.dumps(answer))


def _stages(description: GPTDescription, sizes: ParallelSizes, dtype: str) -> Iterator[Stage]:
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from ..models.model import build_inference_model

    config_class = MLATransformerConfig if description.multi_latent_attention else TransformerConfig
    config = config_class(
        **description.config_fields(config_class),
        **sizes.config_fields(),
        pipeline_dtype=torch.float32,
        perform_initialization=False,
    )
    for stage in range(sizes.pipeline_model_parallel_size):
        with _fake_rank(sizes, stage):
            provider = _provider(description, sizes.tensor_model_parallel_size)
            build = functools.partial(build_inference_model, provider, config, dtype=dtype, device="meta")
            scoring = [parameters_of(chunk) for chunk in build()]
            with_mtp = description.mtp_num_layers is not None
            training = [parameters_of(chunk) for chunk in build(with_mtp=True)] if with_mtp else scoring
            yield Stage(training, scoring)


@contextmanager
def _fake_rank(sizes: ParallelSizes, stage: int) -> Iterator[None]:
    """Act as the first rank of a pipeline stage; there are no replicas, as they have the same shapes."""
    import torch.distributed
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp, ep = sizes.tensor_model_parallel_size, sizes.expert_model_parallel_size
    ranks_per_stage = math.lcm(tp, ep * (sizes.expert_tensor_parallel_size or tp))
    torch.distributed.init_process_group(
        "fake",
        store=FakeStore(),
        rank=stage * ranks_per_stage,
        world_size=sizes.pipeline_model_parallel_size * ranks_per_stage,
    )
    try:
        parallel_state.initialize_model_parallel(
            tp,
            sizes.pipeline_model_parallel_size,
            sizes.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _provider(description: GPTDescription, tensor_parallel: int) -> Callable[..., Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention

    # Some releases set HAVE_TE if their own wrapper file can be imported, and then fail on missing classes.
    multi_latent_attention.HAVE_TE = False
    positions = description.learned_absolute_position_embeddings

    def provide(config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        staged = {"vp_stage": vp_stage, "normalization": description.normalization}
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, **_accepted(get_gpt_decoder_block_spec, staged)
        )
        layers.layer_specs = [
            _countable(config, spec, number)
            for number, spec in enumerate(layers.layer_specs, _first_layer(config, vp_stage))
        ]
        return GPTModel(
            config,
            layers,
            vocab_size=description.padded_vocab_size(tensor_parallel),
            max_sequence_length=positions or 1,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not description.untie_embeddings_and_output_weights,
            position_embedding_type="learned_absolute" if positions else "rope",
            **_accepted(GPTModel, {"vp_stage": vp_stage}),
            **({"mtp_block_spec": _mtp_spec(config, layers, staged)} if config.mtp_num_layers else {}),
        )

    return provide


def _countable(config: Any, spec: Any, number: int) -> Any:
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


def _first_layer(config: Any, vp_stage: int | None) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    offset: int = get_transformer_layer_offset(
        config, **_accepted(get_transformer_layer_offset, {"vp_stage": vp_stage})
    )
    return offset


def _mtp_spec(config: Any, layers: Any, staged: dict[str, Any]) -> Any:
    """Return the layers of multi-token prediction of this chunk, which are built like the last layer."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not layers.layer_specs:  # a stage of a pipeline's layout may have no others
        arguments = _accepted(gpt_layer_specs.get_gpt_decoder_layer_specs, staged)
        *_, last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, False, **arguments)
        layers = _countable(config, last, config.num_layers - 1)
    block_spec = gpt_layer_specs.get_gpt_mtp_block_spec
    return block_spec(config, layers, use_transformer_engine=False, **_accepted(block_spec, staged))


def _accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that this release has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


if __name__ == "__main__":
    main()
