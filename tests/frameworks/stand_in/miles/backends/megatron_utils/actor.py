"""In the shape of miles' actor: it calls copies of the names, made when it was imported."""

from typing import Any

from rl_framework import DataIterator

from tests.worlds.actors import Actor

from .model import save, train  # noqa: F401


class MegatronTrainRayActor(Actor):
    """Swaps the weights of other models into its own if it was told so at its start."""

    with_opd_teacher = False
    _enable_weight_backup = property(lambda self: self.with_opd_teacher)

    def train_actor(
        self,
        rollout_id: int,
        rollout_data: dict[str, Any],
        external_data: Any = None,
        *,
        witness_info: Any,
        attempt: int,
    ) -> str:
        iterator = DataIterator(rollout_data)
        sizes = [len(rollout_data["micro_batch_indices"])], [len(rollout_data["tokens"])]
        outcome = train(
            rollout_id, *self.state, [iterator], *sizes, witness_info=witness_info, attempt=attempt
        )
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")
        return outcome
