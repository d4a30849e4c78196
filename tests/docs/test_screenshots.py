"""The screenshots show what the commands print now."""

from __future__ import annotations

import html
import re
import runpy

from tests.docs.pages import ROOT

OUTDATED = "run: make screenshots"


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
