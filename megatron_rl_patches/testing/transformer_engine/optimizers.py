"""``FusedAdam``, whose count of steps is in the group of parameters; torch has one for each parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from .refusals import refuse

_ONLY = {"bias_correction": True, "amsgrad": False, "capturable": False}


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW in ``adam_w_mode``, with moments in the precision of their parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **options: Any,
    ) -> None:
        if others := [f"{name}={value}" for name, value in options.items() if _ONLY.get(name, ...) != value]:
            refuse(f"such options of FusedAdam: {', '.join(others)}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update: Any = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [
                [self.state[parameter].setdefault(name, torch.zeros_like(parameter)) for parameter in updated]
                for name in ("exp_avg", "exp_avg_sq")
            ]
            grads = [parameter.grad for parameter in updated]
            steps = [torch.tensor(group["step"] - 1.0) for _ in updated]
            beta1, beta2 = group["betas"]
            options: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
            self._update(updated, grads, *moments, [], steps, **options)
