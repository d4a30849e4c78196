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
    "distillation/loss_min",
    "Weights are NaN",
    "Gradients are wrong under routing replay",
)
# Headings whose message is made from a value or in a compiled library, and where it was observed.
OBSERVED_IN = {
    "KeyError: Float16Module(": "tests/real/test_mock_ddp_contract.py: the KeyError of a real module",
    "torch.OutOfMemoryError: CUDA out of memory": "torch, on a GPU; what is allocated is in docs/benchmarks",
    "one of the variables needed for gradient computation has been modified by an inplace operation": ""
    "torch; tests/frameworks/test_real_lean_loss.py",
    "does not match instances": "megatron-core, set_replay_data; tests/real/test_router_replay.py",
    "device-side assert triggered": "CUDA; tests/gpu",
    "Unsupported loss mode: megatron_rl_patches.…": "get_distillation_loss_settings of verl, with our names",
    "argument --loss-type: invalid choice: 'opd_loss'": "argparse, with the choices of slime",
}


def _folder(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else ROOT / "not installed"


# Where all other messages are: ours, and those of others.
SOURCES = (
    ROOT / "megatron_rl_patches",
    ROOT / "_megatron_rl_patches_startup.py",
    ROOT / "tests" / "frameworks" / "stand_in",
    _folder("megatron.core") / "distributed",
    _folder("megatron.core") / "timers.py",
    _folder("torch") / "utils" / "checkpoint.py",
)
RAY = _folder("ray") / "_private" / "runtime_env"
OF_RAY = "TypeError: runtime_env['env_vars'] must be of type Dict[str, str]"


def test_the_faq_quotes_messages_as_the_sources_have_them() -> None:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    headings = {heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    assert headings > {OF_RAY, *OBSERVED_IN}
    quoted = {h for h in headings if not h.startswith(SYMPTOMS)} - set(OBSERVED_IN)
    sources = "\n".join(map(_text, (*SOURCES, RAY)))
    missing = {heading for heading in quoted if re.sub(r"^\w+Error: ", "", heading) not in sources}
    assert missing <= (set() if RAY.exists() else {OF_RAY})


def _text(place: Path) -> str:
    """Return the text of all modules, in which strings that go on in the next line are joined."""
    text = "\n".join(
        path.read_text("utf-8") for path in ([place] if place.is_file() else place.rglob("*.py"))
    )
    return re.sub(r"['\"]\s*\n\s*f?['\"]", "", text)
