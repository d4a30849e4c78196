"""``pytest --layers transformer_engine``: build the tiny models of the matrix with these layers.

The stand-in of TransformerEngine has to be in place before Megatron is imported. So this module puts it
there when it is imported: by pytest's configuration, and by ranks before anything else.
"""

import atexit
import os
from contextlib import ExitStack

import pytest

from megatron_rl_patches.testing.transformer_engine.install import stand_in

_VARIABLE = "TESTS_LAYERS"  # processes that tests start inherit it
_for_good = ExitStack()
atexit.register(_for_good.close)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--layers", metavar="KIND", help="build tiny models with these layers: transformer_engine"
    )


def configure(config: pytest.Config) -> None:
    if layers := config.getoption("--layers"):
        os.environ[_VARIABLE] = layers
        _put_in_place()


def chosen() -> str:
    return os.environ.get(_VARIABLE, "local")


def _put_in_place() -> None:
    if chosen() == "transformer_engine":
        _for_good.enter_context(stand_in())


_put_in_place()
