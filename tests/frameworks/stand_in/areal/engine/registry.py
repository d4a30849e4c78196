"""In the shape of AReaL's model registry (``areal.models.mcore.registry``)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP


def make_mcore_model(provider: Callable[[], Any], mcore_config: SimpleNamespace) -> list[Any]:
    model = provider()
    return [DDP(model.config, mcore_config.ddp, model) if mcore_config.wrap_with_ddp else model]
