"""The FAQ quotes what the sources say."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.docs.pages import ROOT

# Headings of the FAQ that describe a symptom instead of quoting a message.
SYMPTOMS = (
    "Parameters that are stale",
    "A hang in backward",
    "The learning rate is another",
    "No line in the log",
)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    return (
        Path(next(iter(spec.submodule_search_locations or ())))
        if spec
        else Path(f"{package} is not installed")
    )


MEGATRON, RAY, TORCH = map(_folder, ("megatron.core", "ray", "torch"))
STAND_INS = ROOT / "tests" / "frameworks" / "stand_in"
PACKAGE = ROOT / "megatron_rl_patches"
# Headings that quote a message, and the source that has it.
QUOTED_FROM = {
    "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None": STAND_INS,
    "assert len(self.remove_forward_pre_hook_handles) == 0": MEGATRON / "distributed",
    "AssertionError: timer has already been started": MEGATRON / "timers.py",
    "AssertionError: timer is not started": MEGATRON / "timers.py",
    "AssertionError: Should not have multiple communication calls outstanding at once": MEGATRON
    / "distributed",
    "AssertionError: Communication call has not been issued for this bucket": MEGATRON / "distributed",
    "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly": TORCH
    / "utils"
    / "checkpoint.py",
    "assert args.consumed_train_samples == 0": STAND_INS,
    "TypeError: runtime_env['env_vars'] must be of type Dict[str, str]": RAY / "_private" / "runtime_env",
    "not activated, going on without:": ROOT / "_megatron_rl_patches_startup.py",
    "megatron_rl_patches: skipped": PACKAGE / "engine",
    "these were never imported by this process, so nothing was patched there:": PACKAGE / "engine",
    "patches differ between ranks:": PACKAGE / "engine",
    "looks at deferred logits": PACKAGE / "losses",
    "torch.compile failed for": PACKAGE / "losses",
    "no gradient can be computed, since": PACKAGE / "losses",
    "clean-up after an exception in train() failed:": PACKAGE / "reentry",
    "the checkpoint is incomplete": PACKAGE / "inference",
    "not safe to load:": PACKAGE / "inference",
    "ranks see different checkpoints": PACKAGE / "inference",
    "rows in the checkpoint and": PACKAGE / "inference",
    "still running: rank": PACKAGE / "testing",
}
# Headings whose message is made from a value or in a compiled library, and where it was observed.
OBSERVED_IN = {
    "KeyError: Float16Module(": "tests/real/test_mock_ddp_contract.py: the KeyError of a real module",
    "torch.OutOfMemoryError: CUDA out of memory": "torch, on a GPU; what is allocated is in docs/benchmarks",
    "one of the variables needed for gradient computation has been modified by an inplace operation": ""
    "torch; tests/frameworks/test_real_lean_loss.py",
    "device-side assert triggered": "CUDA; tests/gpu",
    "argument --loss-type: invalid choice: 'opd_loss'": "argparse, with the choices of slime",
}


def test_the_faq_quotes_messages_as_the_sources_have_them() -> None:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    headings = {heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    assert {h for h in headings if not h.startswith(SYMPTOMS)} == {*QUOTED_FROM, *OBSERVED_IN}
    outdated = {h: place for h, place in QUOTED_FROM.items() if place.exists() and not _is_in(h, place)}
    assert outdated == {}


def _is_in(heading: str, place: Path) -> bool:
    message = re.sub(r"^\w+Error: ", "", heading)
    # Join strings that go on in the next line.
    sources = (
        re.sub(r"['\"]\s*\n\s*f?['\"]", "", path.read_text("utf-8"))
        for path in ([place] if place.is_file() else place.rglob("*.py"))
    )
    return any(message in source for source in sources)
