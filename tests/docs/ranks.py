"""Follows the Python of the pages on a rank, with real megatron-core."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron_rl_patches
from megatron_rl_patches.testing import cpu_backend

#: Lines of a page where a block begins, and the block.
Code = Sequence[tuple[int, str]]


def follow(
    pages: Mapping[str, Code], examples: Mapping[str, str], names: Sequence[str], folder: str
) -> dict[str, str]:
    """Run the blocks of each page in one namespace, each example of a docstring in one of its own, and look
    up the dotted names.

    Returns:
        page, example or dotted name -> traceback, for each that failed.
    """
    failures = {}
    with cpu_backend():
        from tests.docs import stand_ins

        os.chdir(folder)
        stand_ins.initialize()
        stand_ins.save_teachers(Path(folder))
        for page, blocks in pages.items():
            set_up, check = stand_ins.SETUPS.get(page, (dict, lambda names: None))
            failures[page] = _run(page, blocks, set_up, check)
        for name, example in examples.items():
            failures[name] = _run(name, [(1, example)], stand_ins.docstrings, lambda names: None)
        for name in names:
            failures[name] = _run(name, [(1, f"import pkgutil; pkgutil.resolve_name({name!r})")], dict, bool)
    return {name: failure for name, failure in failures.items() if failure}


def _run(name: str, blocks: Code, set_up: Any, check: Any) -> str:
    try:
        names = {"__name__": "page", **set_up()}
        for line, code in blocks:
            # So that tracebacks have the lines of the page.
            exec(compile("\n" * (line - 1) + code, name, "exec", dont_inherit=True), names)
        check(names)
    except Exception:
        return traceback.format_exc()
    finally:
        megatron_rl_patches.revert()
    return ""
