"""Parameters of every pipeline stage, from the real ``GPTModel`` on the meta device.

A child process builds it, with torch's fake process groups, so that the caller's groups stay untouched.
"""

from __future__ import annotations

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
_TORCH_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


class Parameter(NamedTuple):
    """One parameter of a model chunk, with its size on one rank."""

    numel: int
    #: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    dtype: str
    #: Its gradients are reduced over the expert-data-parallel group (Megatron: ``allreduce`` is False).
    expert: bool
    #: It belongs to the output layer, or is the embedding that serves as one.
    head: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return self.numel * ITEM_SIZES[self.dtype]


def parameters_of(chunk: torch.nn.Module) -> list[Parameter]:
    """Return the parameters of a real model chunk, in the order of ``chunk.parameters()``."""
    if unknown := {str(p.dtype) for p in chunk.parameters()} - _TORCH_NAMES.keys():
        dtypes = ", ".join(sorted(unknown))
        raise InvalidInputError(f"parameters of dtype {dtypes}: counted are {', '.join(ITEM_SIZES)}")
    head = _output_layer_of(unwrap(chunk))
    return [
        Parameter(p.numel(), _TORCH_NAMES[str(p.dtype)], not getattr(p, "allreduce", True), id(p) in head)
        for p in chunk.parameters()
    ]


def _output_layer_of(model: Any) -> set[int]:
    """Return the identities of the parameters of the output layer."""
    layer = getattr(model, "output_layer", None)
    if layer is None or not getattr(model, "post_process", True):
        return set()
    is_shared = getattr(layer, "weight", None) is None
    shared = [model.shared_embedding_or_output_weight()] if is_shared else []
    return set(map(id, [*layer.parameters(), *shared]))


def count_parameters(
    description: GPTDescription, sizes: ParallelSizes, dtype: str
) -> list[list[list[Parameter]]]:
    """Count the parameters of each chunk of each pipeline stage, in seconds and without memory for them."""

    def plain(value: Any) -> Any:
        """Return what JSON knows in place of a pipeline's layout in a config, or of a kind of layer."""
        return value.input_data if hasattr(value, "input_data") else value.name

    return _counted(json.dumps([vars(description), vars(sizes), dtype], default=plain))


@functools.cache
def _counted(task: str) -> list[list[list[Parameter]]]:
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
    return [[[Parameter(*p) for p in chunk] for chunk in stage] for stage in answer]


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


def _stages(description: GPTDescription, sizes: ParallelSizes, dtype: str) -> Iterator[list[list[Parameter]]]:
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
            chunks = build_inference_model(provider, config, dtype=dtype, device="meta")
            yield [parameters_of(chunk) for chunk in chunks]


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
    from megatron.core.transformer.identity_op import IdentityOp

    # Some releases set HAVE_TE if their own wrapper file can be imported, and then fail on missing classes.
    multi_latent_attention.HAVE_TE = False
    positions = description.learned_absolute_position_embeddings

    def provide(config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        staged = {"vp_stage": vp_stage, "normalization": description.normalization}
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, **_accepted(get_gpt_decoder_block_spec, staged)
        )
        for layer in layers.layer_specs:
            # Core attention has no parameters, and the local implementation refuses latent attention.
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
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
        )

    return provide


def _accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that this release has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


if __name__ == "__main__":
    main()
