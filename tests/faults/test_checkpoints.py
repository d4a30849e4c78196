"""A full disk, shards that are cut or vanish under a ``TeacherPool``, and several jobs at one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import applied
from megatron_rl_patches.errors import CheckpointError
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.test_interruption import SETTINGS

OLD, NEW, NEWEST = 20, 40, 60


def _on_rank_0(function: Callable[..., Any], *args: Any) -> None:
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()


# ---------------------------------------------------------------------------- the pool


def _cut(folder: Path) -> None:
    from tests.real import checkpoints

    checkpoints.cut(folder, min(folder.glob("*.distcp")).name, "decoder.")


def _pool_meets_faults(root: Path) -> None:
    """On rank 1 alone: a shard is cut; it vanishes after its size has been looked at."""
    from megatron_rl_patches.inference import TeacherPool
    from megatron_rl_patches.inference.checkpoints.torch_dist import TorchDistCheckpoint
    from tests.real import checkpoints
    from tests.real.tiny_gpt import Options, Parallelism

    options = Options(parallelism=Parallelism(tp=2))
    checkpoints.save_torch_dist(*checkpoints.trained(options), root / "healthy", OLD)
    for name in ("cut", "vanishing"):
        _on_rank_0(shutil.copytree, root / "healthy", root / name)
    _on_rank_0(_cut, root / "cut" / f"iter_{OLD:07d}")
    mine = {name: root / (name if dist.get_rank() == 1 else "healthy") for name in ("cut", "vanishing")}
    check_files = TorchDistCheckpoint.check_files

    def check_and_remove(self: Any, names: Any) -> None:
        check_files(self, names)
        if self.folder.parent.name == "vanishing":
            for file in self.folder.glob("*.distcp"):
                file.unlink()

    model = checkpoints.scoring(options)
    pool = TeacherPool(model)
    pool.add("healthy", root / "healthy")

    def refused(name: str) -> None:
        before, resident = checkpoints.whole_weights(model), pool.resident
        with pytest.raises(CheckpointError, match="rank 1: "):
            pool.add(name, mine[name])
        assert checkpoints.equal(before, checkpoints.whole_weights(model)), name
        assert (pool.names, pool.resident) == (["healthy"], resident), name

    own = checkpoints.whole_weights(model)
    with mock.patch.object(TorchDistCheckpoint, "check_files", check_and_remove):
        for name in mine:
            refused(name)
            with pool.use("healthy"):
                refused(name)
                assert not checkpoints.equal(own, checkpoints.whole_weights(model))
            assert checkpoints.equal(own, checkpoints.whole_weights(model))


# ---------------------------------------------------------------------------- a full disk


def _disk_is_full(root: Path) -> None:
    """Saving fails within a call of ``train()`` and after it; training goes on as if it had not."""
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_rl_patches.reentry.forward_pre_hooks import preserved_hooks
    from tests.real import checkpoints, tiny_gpt
    from tests.real.faults import Trainee, fault
    from tests.real.tiny_gpt import Options

    trainee = Trainee(Options())
    make_folder = checkpoints._new_folder

    def full_on_rank_1(root: Path, iteration: int) -> Path:
        folder = make_folder(root, iteration)
        if dist.get_rank() == 1:
            for number in range(2):
                (folder / f"__1_{number}.distcp").symlink_to("/dev/full")
        return folder

    def save(iteration: int) -> None:
        with preserved_hooks(trainee.model):
            tiny_gpt.disable_forward_pre_hook(trainee.model)
            checkpoints.save_torch_dist(trainee.model, trainee.optimizer, root, iteration)

    trainee.train(1)
    with mock.patch.object(checkpoints, "_new_folder", full_on_rank_1):
        with (
            pytest.raises((OSError, CheckpointException)) as inside,
            fault("after step", 1, trainee.optimizer, lambda stage: save(OLD)),  # hooks are on
        ):
            trainee.train(2)
        trainee.done += 2
        trainee.train(1)
        with pytest.raises((OSError, CheckpointException)) as outside:
            save(NEW)
    for error in (inside, outside):
        # Every rank raises; the one that coordinates says why.
        assert dist.get_rank() == 1 or "No space left on device" in str(error.value)
    trainee.train(2)
    undisturbed = Trainee(Options())
    undisturbed.train(trainee.done)
    assert trainee.checksums() == undisturbed.checksums()
    assert not (root / checkpoints.TRACKER).exists()


# ---------------------------------------------------------------------------- several at once


def _two_jobs(root: Path, folder: Path) -> None:
    """One loads while the other does; then while the other writes a newer iteration."""
    from megatron_rl_patches.inference import load_inference_checkpoint
    from tests.faults.groups import appointments, meet, worlds_of
    from tests.real import checkpoints
    from tests.real.tiny_gpt import Options

    rank = dist.get_rank()
    store = appointments(folder, "appointments")
    with worlds_of(1, folder, "world"):
        weights = {}
        model = checkpoints.scoring(Options())
        meet(store, "both load", rank)
        assert load_inference_checkpoint(model, root) == OLD
        weights[OLD] = checkpoints.whole_weights(model)
        saved = {NEW: 2.0, NEWEST: 4.0}
        for iteration, factor in saved.items():
            weights[iteration] = {name: tensor * factor for name, tensor in weights[OLD].items()}

        def load() -> int:
            iteration = load_inference_checkpoint(model, root)
            assert checkpoints.equal(checkpoints.whole_weights(model), weights[iteration])
            return iteration

        if rank == 0:
            for moment, expected in (("folder is there", OLD), ("tensors are there", OLD), ("done", NEW)):
                meet(store, moment, rank)
                assert load() == expected, moment
                meet(store, f"seen that {moment}", rank)
            found = [load()]
            while found[-1] != NEWEST:
                found.append(load())
            assert set(found) <= {NEW, NEWEST}
        else:
            trainer, optimizer = checkpoints.trained(Options())
            make_folder, track = checkpoints._new_folder, checkpoints._track

            def show(moment: str) -> None:
                meet(store, moment, rank)
                meet(store, f"seen that {moment}", rank)

            def make_and_show(*args: Any) -> Path:
                made = make_folder(*args)
                show("folder is there")
                return made

            def show_and_track(*args: Any) -> None:
                show("tensors are there")
                track(*args)

            def save(iteration: int) -> None:
                load_inference_checkpoint(trainer, root / f"iter_{OLD:07d}")
                with torch.no_grad():
                    for parameter in trainer[0].parameters():
                        parameter.mul_(saved[iteration])
                checkpoints.save_torch_dist(trainer, optimizer, root, iteration)

            with (
                mock.patch.object(checkpoints, "_new_folder", make_and_show),
                mock.patch.object(checkpoints, "_track", show_and_track),
            ):
                save(NEW)
            show("done")
            save(NEWEST)
        meet(store, "end", rank)


def _all(folder: str) -> None:
    root = Path(folder)
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        _pool_meets_faults(root / "pool")
        _disk_is_full(root / "full")
        _two_jobs(root / "pool" / "healthy", root)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_checkpoints(tmp_path: Path) -> None:
    spawn_ranks(_all, 2, str(tmp_path), timeout=150)
