"""Docstrings name each other as ``:func:`name```, and end in ``::`` before code; not so on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"( ?)::$", re.MULTILINE)


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(lambda role: f"`{role[1].split('.')[-1]}`", obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(lambda colons: "" if colons[1] else ":", text)
