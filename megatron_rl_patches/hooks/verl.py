"""For verl: ``actor_rollout_ref.model.external_lib=megatron_rl_patches.hooks.verl``.

verl imports the module that this setting names in every process that makes the model's configuration, and
before it makes the model. The import applies the default set of patches, or what ``MEGATRON_RL_PATCHES``
selects where it is set. The first patched call says on rank 0 which are in place.
"""

from __future__ import annotations

from . import switch_on

switch_on()
