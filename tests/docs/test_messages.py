"""The FAQ and the pages of messages quote what the sources say, and leave no message out."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.docs import messages
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs" / "messages").glob("*.md"))
# Prefixes of another message, and texts so short that any string would match them.
PREFIXES = re.compile(r"[^a-z]*([a-z]{0,12}|megatron_rl_patches)[^a-z]*")
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
# Headings that quote a framework, and the source that has the message.
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
}
# Headings whose message is made from a value or in a compiled library, and where it was observed.
OBSERVED_IN = {
    "KeyError: Float16Module(": "tests/real/test_mock_ddp_contract.py: the KeyError of a real module",
    "torch.OutOfMemoryError: CUDA out of memory": "torch, on a GPU; what is allocated is in docs/benchmarks",
    "one of the variables needed for gradient computation has been modified by an inplace operation": ""
    "torch; tests/frameworks/test_real_lean_loss.py",
    "argument --loss-type: invalid choice: 'opd_loss'": "argparse, with the choices of slime",
}


def _quotes() -> dict[str, str]:
    """Return the messages in the first column of the tables, without backticks, with their page."""
    return {
        _flat(span): page.name
        for page in PAGES
        for row in re.findall(r"^\| (.+?) \| ", page.read_text("utf-8"), re.MULTILINE)
        for _, span in re.findall(r"(`+)(.+?)\1", row)
        if span != "RanksFailed"
    }


def _flat(text: str) -> str:
    return messages.one_line(text.replace("`", ""))


def test_what_is_quoted_is_in_the_sources() -> None:
    strings = [_flat(text) for text in messages.strings() if text.strip(messages.ELLIPSIS)]
    outdated = [
        f"{page}: {quote}"
        for quote, page in _quotes().items()
        if not any(messages.begins_with(text, quote) for text in strings)
    ]
    assert outdated == [], "\n".join(outdated)


def test_every_message_is_on_a_page() -> None:
    missing = [
        f"{place}: {text}"
        for text, place in messages.templates().items()
        if not PREFIXES.fullmatch(text.replace(messages.ELLIPSIS, ""))
        and not any(messages.begins_with(_flat(text), quote) for quote in _quotes())
    ]
    assert missing == [], "\n".join(["add to docs/messages:", *missing])


def test_the_faq_quotes_frameworks_as_their_sources_say() -> None:
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
