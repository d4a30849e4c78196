"""In the shape of NeMo-RL's: it copies a private function of Megatron-Bridge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.bridge.training.setup import _update_model_config_funcs


def finalize_megatron_setup(megatron_cfg: SimpleNamespace, model: Any, optimizer: Any) -> None:
    _update_model_config_funcs(
        [model],
        megatron_cfg.model,
        megatron_cfg.ddp,
        optimizer,
        align_grad_reduce=megatron_cfg.dist.align_grad_reduce,
    )
