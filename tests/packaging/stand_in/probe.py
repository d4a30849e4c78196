"""What a program of the tests asks of its own process."""

import json
import os
import sys

PACKAGE = "megatron_rl_patches"


def state():
    """What is there, without importing anything."""
    return {
        "trigger": any(type(finder).__module__ == f"_{PACKAGE}_startup" for finder in sys.meta_path),
        "wrapt": "wrapt" in sys.modules,
        "package": PACKAGE in sys.modules,
    }


def patched():
    """Import the framework as a trainer would; whether its two methods carry a layer of ours."""
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

    methods = [vars(DistributedDataParallel)[f"{verb}_forward_pre_hook"] for verb in ("enable", "disable")]
    layers = [type(method).__module__ == f"{PACKAGE}.engine.wrapper" for method in methods]
    assert layers[0] == layers[1] == hasattr(methods[0], "__wrapped__"), methods
    return layers[0]


def report(**values):
    print(json.dumps(values))


def patched_in_child(queue):
    queue.put((os.getpid(), patched()))
