"""The screenshots show what the commands print now, and pictures can be read."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

OUTDATED = "run: make screenshots"
READABLE = 9  # pixels


def _text(svg: str) -> str:
    """Return what can be read in the picture; how it is drawn depends on the version of rich."""
    shown = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return " ".join(html.unescape(" ".join(shown)).split())


def test_doctor() -> None:
    screenshots = runpy.run_path(str(ROOT / "docs" / "screenshots.py"))
    drawn = (screenshots["IMAGES"] / "doctor.svg").read_text("utf-8")
    assert _text(drawn) == _text(screenshots["doctor"]()), OUTDATED
    assert "unset MEGATRON_RL_PATCHES_STRIKT; export MEGATRON_RL_PATCHES_STRICT=1" in _text(drawn)
    assert str(ROOT) not in drawn and "url(http" not in drawn


@pytest.mark.parametrize(
    "image", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem
)
def test_labels_can_be_read_on_a_phone_and_in_the_dark(image: Path) -> None:
    text = image.read_text("utf-8")
    if image.stem in ("doctor", "logo", "favicon"):  # a terminal, which scrolls, and marks without text
        return
    assert "prefers-color-scheme: dark" in text
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\d+ )?([\d.]+)px", text)]
    assert sizes and min(sizes) * min(1, 368 / width) >= READABLE
