"""In the shape of AReaL's: the registry builds, and does not know whether the engine has an optimizer."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP

from .registry import make_mcore_model


class MegatronEngine:
    def __init__(self, config: Any) -> None:
        self.config, self.optimizer_config, self.mcore_config = config, config.optimizer, config.megatron

    def initialize(self, addr: Any, ft_spec: Any) -> None:
        self.model = make_mcore_model(self.config.model_provider, self.mcore_config)
        if self.mcore_config.ddp.overlap_grad_reduce and isinstance(self.model[0], DDP):
            self.model[0].config.no_sync_func = self.model[0].no_sync
