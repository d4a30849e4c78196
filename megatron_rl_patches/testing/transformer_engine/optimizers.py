"""``FusedAdam``, whose count of steps is in the group of parameters; torch has one for each parameter."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from .refusals import check_options

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW in ``adam_w_mode``, whose moments and computations are in float32."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        **options: Any,
    ) -> None:
        check_options("FusedAdam", options)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update: Any = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in (group for group in self.param_groups if group["params"]):
            group["step"] = group.get("step", 0) + 1
            for parameter, name in product(group["params"], _MOMENTS):
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [[self.state[parameter][name] for parameter in updated] for name in _MOMENTS]
            values, grads = ([x.float() for x in of] for of in (updated, [x.grad for x in updated]))
            steps = [torch.tensor(group["step"] - 1.0) for _ in updated]
            beta1, beta2 = group["betas"]
            options: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
            self._update(values, grads, *moments, [], steps, **options)
            for parameter, value in zip(updated, values, strict=True):
                parameter.copy_(value)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, and leave moments in float32; torch would give them the type of their parameter."""
        super().load_state_dict(state_dict)
        both = state_dict["param_groups"], self.param_groups
        numbers, parameters = (chain(*(group["params"] for group in groups)) for groups in both)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)
