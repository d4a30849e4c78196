"""A patch in a package of its own: a rank that waits long for the reduction of gradients says so.

    pip install examples/third_party_patch
    MEGATRON_RL_PATCHES=1 MEGATRON_RL_PATCHES_REDUCTION_SECONDS=5 torchrun train.py

`megatron-rl-patches check` checks it together with the others, and `megatron_rl_patches.revert()` removes it.
"""

import os
import time
from dataclasses import dataclass

from megatron_rl_patches import Patch


@dataclass(frozen=True)
class SlowReductionOptions:
    """Each field is a keyword of Settings, and a variable: MEGATRON_RL_PATCHES_REDUCTION_SECONDS."""

    reduction_seconds: float = 30.0


patch = Patch(
    name="slow-reduction",
    summary="a rank that waits long for the reduction of gradients says so",
    upstream=("my-org/my-rl#123",),
    options=SlowReductionOptions,
)


@patch.wrap(
    "megatron.core.distributed.finalize_model_grads",  # the module that defines the function
    "finalize_model_grads",  # or "Class.method"
    parameters=("model",),  # what the adapter reads; without it nothing is patched
    skip_if=lambda target: "it warns by itself" if target.calls("warn_if_slow") else None,
)
def finalize_model_grads(call):
    start = time.monotonic()
    result = call()  # the original, as it was called
    seconds = time.monotonic() - start
    if seconds > call.options.reduction_seconds:
        rank, chunks = os.environ.get("RANK", "0"), len(call["model"])
        print(f"rank {rank}: gradients of {chunks} chunks took {seconds:.1f} s to reduce", flush=True)
    return result
