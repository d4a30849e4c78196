"""In the shape of slime's actor: it calls copies of the names, made when it was imported."""

from typing import Any

from tests.worlds.actors import Actor

from .data import DataIterator
from .model import save, train  # noqa: F401


class MegatronTrainRayActor(Actor):
    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        iterator = DataIterator(rollout_data)
        sizes = [len(rollout_data["micro_batch_indices"])], [len(rollout_data["tokens"])]
        train(rollout_id, *self.state, [iterator], *sizes)
        self.weights_backuper.backup("actor")
