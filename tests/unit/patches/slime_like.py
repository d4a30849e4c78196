"""A framework in slime's shape, on torch alone: arguments, an actor that swaps weights, a custom loss.

:func:`write` puts it into a folder under the name slime; it is text so that nobody imports it by accident.
"""

from __future__ import annotations

from pathlib import Path

ARGUMENTS = """
import argparse

def get_slime_extra_args_provider(add_custom_arguments=None):
    def add_slime_arguments(parser):
        losses = ["policy_loss", "sft_loss", "custom_loss"]
        parser.add_argument("--loss-type", choices=losses, default="policy_loss")
        parser.add_argument("--custom-loss-function-path")
        parser.add_argument("--allgather-cp", action="store_true")
        parser.add_argument("--use-routing-replay", action="store_true")
        parser.add_argument(
            "--disable-weights-backuper", action="store_false", dest="enable_weights_backuper"
        )
        parser.add_argument("--entropy-coef", type=float, default=0.0)
        parser.add_argument("--rollout-temperature", type=float, default=0.8)
        return parser
    return add_slime_arguments

def parse_args(argv):
    args = get_slime_extra_args_provider()(argparse.ArgumentParser()).parse_args(argv)
    slime_validate_args(args)
    return args

CUSTOM_CONFIG = {}  # slime reads it from a file

def slime_validate_args(args):
    assert args.loss_type != "custom_loss" or args.custom_loss_function_path
    vars(args).update(CUSTOM_CONFIG)
"""

DATA = """
import torch

class DataIterator:
    def __init__(self, rollout_data, micro_batch_indices):
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0

    def get_next(self, keys):
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        selected = {key: self.rollout_data.get(key) for key in keys}
        return {key: vals and [vals[i] for i in indices] for key, vals in selected.items()}

    def reset(self):
        self.offset = 0

def get_batch(data_iterator, keys, pad_multiplier=8):
    batch = data_iterator.get_next(keys)
    tokens = torch.cat(batch["tokens"])
    padding = -len(tokens) % pad_multiplier
    batch["tokens"] = torch.nn.functional.pad(tokens, (0, padding))[None]
    return batch
"""

MODEL = """
import importlib
import torch
from .data import get_batch

KEYS = ["tokens", "total_lengths", "response_lengths", "loss_masks"]

@torch.no_grad()
def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix=""):
    for iterator in data_iterator:
        iterator.reset()
    collected = []
    for _ in range(sum(num_microbatches)):
        batch = get_batch(data_iterator[0], KEYS)
        lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
        if args.is_last_stage:
            _, of_samples = f(model[0](batch["tokens"]), args=args, with_entropy=False, **lengths)
            collected.append(of_samples)
    if not args.is_last_stage:
        return {}
    order = sum(data_iterator[0].micro_batch_indices, [])
    results = {}
    for key in collected[0]:
        values = sum((one[key] for one in collected), [])
        results[store_prefix + key] = [value for _, value in sorted(zip(order, values), key=lambda x: x[0])]
    return results

def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

def train_one_step(args, data_iterator, model, optimizer):
    batch = get_batch(data_iterator[0], KEYS)
    lengths, masks = batch["response_lengths"], batch["loss_masks"]

    def sum_of_sample_mean(x):
        return sum((a * b).sum() / b.sum() for a, b in zip(x.split(lengths), masks))

    loss, log = load_function(args.custom_loss_function_path)(
        args, batch, model[0](batch["tokens"]), sum_of_sample_mean
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return log

def train(rollout_id, model, optimizer, opt_param_scheduler, data_iterator, num_microbatches):
    for iterator in data_iterator:
        iterator.reset()
    steps = range(sum(num_microbatches))
    return [train_one_step(opt_param_scheduler, data_iterator, model, optimizer) for _ in steps]
"""

ACTOR = """
import torch
from .data import DataIterator
from .model import train

class Backuper:
    def __init__(self, model):
        self.model, self.images = model, {}

    @property
    def backup_tags(self):
        return list(self.images)

    def backup(self, tag):
        self.images[tag] = {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self, tag):
        self.model.load_state_dict(self.images[tag])

class MegatronTrainRayActor:
    def __init__(self, args, model, optimizer):
        self.args, self.model, self.optimizer = args, [model], optimizer
        self.weights_backuper = Backuper(model)
        self.weights_backuper.backup("actor")
        self.loaded, self.logged, self.steps = [], [], []

    def load_other_checkpoint(self, model_tag, path):
        self.loaded.append(model_tag)
        self.model[0].load_state_dict(torch.load(path + "/model.pt"))
        self.weights_backuper.backup(model_tag)
        self._active_model_tag = model_tag

    def _switch_model(self, target_tag):
        self.weights_backuper.restore(target_tag)
        self._active_model_tag = target_tag

    def train_actor(self, rollout_id, rollout_data):
        indices = rollout_data["micro_batch_indices"]
        self.logged.append(sorted(rollout_data))
        iterators = [DataIterator(rollout_data, indices)]
        # slime's arguments are global; here they come in place of the scheduler.
        self.steps += train(rollout_id, self.model, self.optimizer, self.args, iterators, [len(indices)])
        assert sorted(rollout_data) == self.logged[-1], "a dump of the rollout comes after it"
        self.weights_backuper.backup("actor")
"""


def write(folder: Path) -> None:
    for path, text in {
        "utils/arguments": ARGUMENTS,
        "backends/megatron_utils/data": DATA,
        "backends/megatron_utils/model": MODEL,
        "backends/megatron_utils/actor": ACTOR,
    }.items():
        file = folder / "slime" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in (file.parent, file.parent.parent, folder / "slime"):
            if package != folder:
                (package / "__init__.py").touch()
        file.write_text(text)
