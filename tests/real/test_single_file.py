"""A loop in the file that Python runs: its ``train()`` is patched once the program has defined it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOP = """
print("run", flush=True)
import os
import torch
from megatron_rl_patches import apply, Settings, status
from megatron_rl_patches.testing import TinyModel, cpu_backend

with cpu_backend():
    from tests.references import tiny_gpt

if {apply}:
    apply("reentrant-train", settings=Settings(train_functions=[{function!r}]))

def train(model, optimizer, data):
    assert tiny_gpt.get_model_config(model[0]).no_sync_func is None
    tiny_gpt.get_model_config(model[0]).no_sync_func = model[0].no_sync
    return tiny_gpt.train_step(model, optimizer, data, 1)

def main():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    options = TinyModel()
    model, optimizer = options.build()
    states = {{site.target: site.state for site in status()}}
    assert states["__main__.train"] == "applied", states
    for rollout in range(2):
        train(model, optimizer, tiny_gpt.data_iterators(options))
        print("trained", flush=True)
    os._exit(0)  # before torch 2.8 an orderly end may wait for gloo's threads forever

if __name__ == "__main__":
    with cpu_backend():
        main()
"""


@pytest.mark.parametrize("by_variable", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_second_train_of_a_single_file(tmp_path: Path, by_variable: bool) -> None:
    function = "a_loop:train" if by_variable else "__main__:train"
    command = [sys.executable, *(["a_loop.py"] if by_variable else ["-m", "a_loop"])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL")}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), environ.get("PYTHONPATH", "")))
    if by_variable:
        environ["MEGATRON_RL_PATCHES"] = "reentrant-train"
        environ["MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS"] = function
    (tmp_path / "a_loop.py").write_text(LOOP.format(apply=not by_variable, function=function))
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["run", "trained", "trained"]
