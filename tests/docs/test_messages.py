"""The FAQ and the pages of messages: what they quote is what is said, and nothing that is said is missing."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs import messages
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs" / "messages").glob("*.md"))
# Wrapped around another message, or so short that any text would do.
WRAPPERS = re.compile(r"[^a-z]*([a-z]{0,12}|megatron_rl_patches)[^a-z]*")
# Headings of the FAQ that are no message, but what is seen.
SIGHTS = (
    "Parameters that are stale",
    "A hang in backward",
    "The learning rate is another",
    "No line in the log",
)


# Where the host says it: in the installed megatron-core and torch, in our stand-ins for hosts, or elsewhere.
def _folder(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path(f"no {package} here")


MEGATRON, RAY, TORCH = map(_folder, ("megatron.core", "ray", "torch"))
STAND_INS = ROOT / "tests" / "hosts" / "stand_in"
SAID_IN = {
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
}
# Made from a value, or in a compiled library; where it was seen.
SEEN_IN = {
    "KeyError: Float16Module(": "tests/real/test_mock_ddp_contract.py: the KeyError of a real module",
    "torch.OutOfMemoryError: CUDA out of memory": "torch, on a GPU; what is allocated is in docs/benchmarks",
    "one of the variables needed for gradient computation has been modified by an inplace operation": ""
    "torch; tests/hosts/test_real_lean_loss.py",
    "argument --loss-type: invalid choice: 'topk_opd_loss'": "argparse, with the choices of slime",
}


def _quoted(page: Path) -> list[str]:
    """The messages in the first column of the tables."""
    rows = re.findall(r"^\| (.+?) \| ", page.read_text("utf-8"), re.MULTILINE)
    spans = [span for row in rows for _, span in re.findall(r"(`+)(.+?)\1", row)]
    return [span.strip() for span in spans]


def _flat(text: str) -> str:
    return messages.one_line(text.replace("`", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_quoted_is_in_the_sources(page: Path) -> None:
    said = [_flat(text) for text in messages.all_texts()]
    unsaid = [
        quote
        for quote in _quoted(page)
        if quote != "RanksFailed" and not any(messages.begins_as(text, _flat(quote)) for text in said)
    ]
    assert unsaid == []


def test_every_message_is_on_a_page() -> None:
    quotes = [_flat(quote) for page in PAGES for quote in _quoted(page)]
    missing = [
        f"{message.place}: {message.text}"
        for message in messages.all_messages()
        if not WRAPPERS.fullmatch(message.text.replace(messages.HOLE, ""))
        and not any(messages.begins_as(_flat(message.text), quote) for quote in quotes)
    ]
    assert missing == [], "add them to docs/messages"


def _headings() -> list[str]:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    return [heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)]


def test_every_heading_of_the_faq_is_accounted_for() -> None:
    messages_of_hosts = {h for h in _headings() if not h.startswith(SIGHTS)}
    assert messages_of_hosts == {*SAID_IN, *SEEN_IN}


@pytest.mark.parametrize("heading", SAID_IN)
def test_a_message_of_a_host_is_in_its_source(heading: str) -> None:
    place = SAID_IN[heading]
    if not place.exists():
        pytest.skip(str(place))
    message = re.sub(r"^\w+Error: ", "", heading)
    for path in [place] if place.is_file() else place.rglob("*.py"):
        # Strings that go on in the next line.
        source = re.sub(r"['\"]\s*\n\s*f?['\"]", "", path.read_text("utf-8"))
        if message in source:
            return
    pytest.fail(f"{message!r} is nowhere in {place}")
