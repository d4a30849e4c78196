"""How often the package's modules call each other in a walk does not grow."""

import subprocess
import sys

import pytest

from tests.lab.walks import MOST, WALKS, stays_of
from tests.worlds.program import ROOT


@pytest.mark.filterwarnings("ignore")  # those of Megatron, which may be imported here first
@pytest.mark.parametrize("name", [name for name in WALKS if name != "apply"])
def test_walks_stay_short(name: str) -> None:
    assert len(stays_of(WALKS[name])) <= MOST[name]


def test_the_walk_of_apply_stays_short() -> None:
    """In a process of its own, as it takes more if frameworks are imported already."""
    program = "from tests.lab.walks import *; print(len(stays_of(WALKS['apply'])))"
    stays = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT)
    assert int(stays) <= MOST["apply"]
