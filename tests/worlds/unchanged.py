"""What the modules and classes of Megatron hold: a build or a score leaves it as it was."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def megatron_unchanged() -> Iterator[None]:
    """Assert that the block leaves the modules of Megatron and their classes as they were."""
    before = _attributes()
    yield
    after = _attributes()
    assert [name for name in before | after if before.get(name) != after.get(name)] == []


def _attributes() -> dict[str, Any]:
    attributes = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron."):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for owner in (module, *(one for one in classes if one.__module__.startswith("megatron."))):
                for name, value in vars(owner).items():
                    # Python itself caches what pickles of a class need, and which warnings were given.
                    if name not in ("__slotnames__", "__warningregistry__"):
                        attributes[f"{module_name}.{owner.__name__}.{name}"] = _Same(value)
    return attributes


class _Same:
    """Equal for the same object with the same content."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.content = list(map(id, value)) if isinstance(value, (dict, list, set)) else None
        if hasattr(value, "cache_info"):
            self.content = value.cache_info().currsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value and self.content == other.content
