"""The sites of ``reentrant-train``; how they are judged is in ``test_judgements.py``."""

from __future__ import annotations

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.reentrant_train import patch


def test_train_functions_of_unknown_frameworks_are_sites() -> None:
    settings = Settings(train_functions=("fork.backends.model:train", "fork.loop:Trainer.fit"))
    extra = patch.sites_for(settings.options_of(patch))[len(patch.sites) :]
    assert [(site.module, site.qualname, site.framework) for site in extra] == [
        ("fork.backends.model", "train", "fork"),
        ("fork.loop", "Trainer.fit", "fork"),
    ]
