"""How the sites of a patch are judged, on code in the shapes that upstream has or may have."""

from __future__ import annotations

import textwrap

from megatron_rl_patches.engine.judge import judge
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.target_source import from_source


def assert_judged(patch: Patch, target: str, source: str, expected: str) -> None:
    """Judge a site whose module is ``source``; a method's class is put around it.

    Args:
        expected: the state, or ``STATE: a part of the reason``.
    """
    [site] = [site for site in patch.sites if site.target == target]
    source = textwrap.dedent(source).strip()
    owner, _, _ = site.qualname.rpartition(".")
    if owner:
        source = f"class {owner}:\n{textwrap.indent(source, '    ')}"
    verdict = judge(site, from_source(site.module, site.qualname, source))
    state, _, reason = expected.partition(": ")
    assert verdict.state == state and reason in verdict.reason, verdict
