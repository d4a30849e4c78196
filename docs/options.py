"""Writes docs/options.md from what the patches declare: ``python docs/options.py``, or ``make pages``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.settings import ROOTS_VARIABLE, STRICT_VARIABLE, VARIABLE, variable_of

PAGE = Path(__file__).with_name("options.md")


def _head() -> str:
    return f"""# Options: every variable and setting

<!-- `make pages` writes this page from what the patches declare. Do not edit it. -->

Each option is a field of `Settings` and a variable:

```python
from megatron_rl_patches import Settings, apply

apply(settings=Settings(inference_roles=["judge"], warn=False))
```

In a variable, write `1` or `0` for a switch, commas between the items of a list, and `name=value` for a pair.
If a value does not parse, a process that the variables switch on says so in one line, and uses the default;
`apply()` raises `PatchError`. [How it works](how-it-works.md#activation) says which processes the variables
reach.

## Which patches

| `{VARIABLE}` | meaning |
|---|---|
| unset, empty, `0`, `false`, `off`, `no`, `none` | nothing happens, nothing is loaded |
| `1`, `true`, `on`, `yes`, `default` | the default set: {_listed("default")} |
| `all` | the default set, and {_listed("all")} |
| `reentrant-train` | only this patch; write commas between several |
| `1,-lean-loss` | the default set without `lean-loss` |
| `1,distillation` | the default set, and {_listed("by name")}, which must be selected by name |

`apply()` switches on the default set, and takes the same names: `apply("all")`, `apply("reentrant-train")`.
Patches of other installed packages are in the default set, unless they say otherwise.

- **`strict`** (`bool`, default `0`): a patch that cannot take effect is an error where its framework is
  imported, not a warning. Variable `{STRICT_VARIABLE}`.
- Variable **`{ROOTS_VARIABLE}`** (list of names, default empty): more packages whose import switches
  the patches on. Only patches of other packages need it.
"""


def _listed(name: str) -> str:
    patches = sorted(patch.name for patch in registry.patches().values() if patch.selected_by == name)
    return ", ".join(f"`{patch}`" for patch in patches)


def page() -> str:
    """Return the page: a section for each patch that has options, in their order."""
    return "\n".join([_head(), *(line for patch in registry.patches().values() for line in _section(patch))])


def _section(patch: Any) -> Iterator[str]:
    if patch.options is None:
        return
    types, meanings = registry.field_types(patch.options), _meanings(patch.options)
    yield f"## {patch.name}\n\n[`{patch.name}`](patches/{patch.name}.md): {patch.summary}.\n"
    for field in fields(patch.options):
        assert field.default is not MISSING
        kind = f"{_type(types[field.name])}, default {_default(field.default)}"
        yield f"- **`{field.name}`** ({kind}): {meanings[field.name]}. Variable `{variable_of(field.name)}`."
    yield ""


def _meanings(options: Any) -> dict[str, str]:
    """Return what the docstring says of each attribute."""
    attributes = inspect.cleandoc(options.__doc__).partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", attributes, re.MULTILINE)
    return {name: _markdown(" ".join(text.split()).rstrip(".")) for name, text in entries}


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`[\w.]*?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type, get_args(kind)))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return "pairs `name=path`" if get_origin(item) is tuple else f"list of {_type(item)}"
    return f"`{kind.__name__}`"


def _default(value: Any) -> str:
    if value == ():
        return "empty"
    if isinstance(value, bool):
        return "`1`" if value else "`0`"
    return f"`{','.join(value)}`" if isinstance(value, tuple) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
