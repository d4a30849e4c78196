"""In the shape of Megatron-Bridge's: whoever builds says whether the model is wrapped."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config


def get_model(
    model_provider: Any,
    ddp_config: Any,
    model_type: Any = None,
    overlap_param_gather_with_optimizer_step: bool = False,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    wrap_with_ddp: bool = True,
    *,
    pg_collection: Any,
) -> list[Any]:
    model = [model_provider.provide()]
    if wrap_with_ddp:
        config = get_model_config(model[0])
        model = [DistributedDataParallel(config, ddp_config, model_module) for model_module in model]
    return model
