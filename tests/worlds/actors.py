"""An actor that holds the weights of one model at a time, as those of slime and miles do."""

from typing import Any

import torch


class Actor:
    """Loads other models from ``weights.pt`` in a folder; copies of weights have tags."""

    _enable_weight_backup = True

    def __init__(self, args: Any, model: Any, optimizer: Any = None, opt_param_scheduler: Any = None) -> None:
        self.args, self.model = args, model
        self.loaded: list[tuple[str, Any]] = []
        self.state = model, optimizer, opt_param_scheduler
        self.weights_backuper = WeightsBackuper(model[0].module)
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")

    def load_other_checkpoint(self, model_tag: str, path: str) -> None:
        self.loaded.append((model_tag, getattr(self.args, "ckpt_step", None)))
        self.model[0].module.load_state_dict(torch.load(f"{path}/weights.pt"), strict=False)
        self.weights_backuper.backup(model_tag)

    def _switch_model(self, target_tag: str) -> None:
        if self._enable_weight_backup:
            self.weights_backuper.restore(target_tag)


class WeightsBackuper:
    """Copies of a model's weights by tag, of which one at a time is in the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.backup_tags = model, dict[str, dict[str, torch.Tensor]]()

    def backup(self, tag: str) -> None:
        state = self.model.state_dict()
        self.backup_tags[tag] = {name: w.clone() for name, w in state.items() if torch.is_tensor(w)}

    def restore(self, tag: str) -> None:
        self.model.load_state_dict(self.backup_tags[tag], strict=False)
