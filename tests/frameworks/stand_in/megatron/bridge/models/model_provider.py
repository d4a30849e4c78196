"""In the shape of Megatron-Bridge's: whoever builds says whether the model is wrapped."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP


def get_model(
    model_provider: Any, ddp_config: Any, use_torch_fsdp2: bool = False, wrap_with_ddp: bool = True
) -> list[Any]:
    model = model_provider.provide()
    return [DDP(model.config, ddp_config, model) if wrap_with_ddp else model]
