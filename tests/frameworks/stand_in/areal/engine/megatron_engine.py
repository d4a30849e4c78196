"""In the shape of AReaL's: what builds does not know whether the engine has an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP


def make_mcore_model(provider: Callable[[], Any], mcore_config: Any) -> list[Any]:
    model = provider()
    return [DDP(model.config, mcore_config.ddp, model) if mcore_config.wrap_with_ddp else model]


class MegatronEngine:
    def __init__(self, config: Any) -> None:
        self.config, self.optimizer_config, self.mcore_config = config, config.optimizer, config.megatron

    def initialize(self, addr: Any, ft_spec: Any) -> None:
        self.model = make_mcore_model(self.config.model_provider, self.mcore_config)
        if self.mcore_config.ddp.overlap_grad_reduce and isinstance(self.model[0], DDP):
            self.model[0].config.no_sync_func = self.model[0].no_sync
