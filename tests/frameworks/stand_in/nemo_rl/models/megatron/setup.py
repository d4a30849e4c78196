"""In the shape of NeMo-RL's: it copies functions of Megatron-Bridge, a private one among them."""

from typing import Any

import torch
from megatron.bridge.models.model_provider import get_model
from megatron.bridge.training.setup import _update_model_config_funcs


def finalize_megatron_setup(megatron_cfg: Any, model: Any, optimizer: Any) -> None:
    _update_model_config_funcs([model], megatron_cfg.model, megatron_cfg.ddp, optimizer)


def setup_model_and_optimizer(
    policy_cfg: dict[str, Any], megatron_cfg: Any, load_optimizer: bool = True
) -> tuple[Any, Any]:
    model = get_model(megatron_cfg.model, megatron_cfg.ddp, megatron_cfg.dist.use_torch_fsdp2)
    return model, policy_cfg["optimizer"] if load_optimizer else None


def setup_reference_model_state(config: dict[str, Any], megatron_cfg: Any) -> dict[str, Any]:
    model = get_model(megatron_cfg.model, megatron_cfg.ddp, megatron_cfg.dist.use_torch_fsdp2)
    config["built"](model)
    state_dict = model[0].state_dict().items()
    return {name: item.detach().clone() for name, item in state_dict if isinstance(item, torch.Tensor)}
