"""The sites of ``inference-only``; how they are judged is in ``test_judgements.py``."""

from __future__ import annotations

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.inference_only import patch


def test_every_role_site_is_there_whatever_the_roles() -> None:
    without_roles = Settings(inference_roles=()).options_of(patch)
    assert patch.sites_for(without_roles) == patch.sites_for(Settings().options_of(patch))
