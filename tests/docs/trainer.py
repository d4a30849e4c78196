"""Stand-in for a framework's training script: it prints the patches of a process launched as a page says.

``test_shell_blocks.py`` copies it, with the path of the stand-in for megatron-core in front.
"""

import importlib
import json
import os
import sys

HYDRA = ("+ray_kwargs.ray_init.runtime_env.env_vars.", "++policy.megatron_cfg.env_vars.")
OPTIONS = [*zip(sys.argv, [*sys.argv[1:], ""], strict=True)]

# Those that the arguments of a framework hand to its training processes.
variables = {}
for option, value in OPTIONS:
    if option == "--train-env-vars":
        variables.update(json.loads(value))
    elif option == "--extra-env-vars":
        variables.update(item.split("=", 1) for item in value.split())
    elif option.startswith(HYDRA):
        name, value = option.rpartition("env_vars.")[2].split("=", 1)
        assert not value.isdecimal(), "Hydra makes a number of it, which Ray refuses"
        variables[name] = value.strip("'")  # which Hydra needs around a comma
if variables and "RELAUNCHED" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables, "RELAUNCHED": "1"})

import probe  # noqa: E402

# As the frameworks do in their training processes.
for option, value in OPTIONS:
    if option == "--custom-megatron-init-path":
        module, _, name = value.rpartition(".")
        getattr(importlib.import_module(module), name)(None)
    elif option.startswith("actor_rollout_ref.model.external_lib="):
        importlib.import_module(option.partition("=")[2])

ours = {name: value for name, value in os.environ.items() if name.startswith("MEGATRON_RL_PATCHES")}
print(json.dumps({"patched": probe.patched(), "variables": ours}))
