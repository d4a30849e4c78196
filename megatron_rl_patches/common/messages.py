"""Log messages: each says what happened, whether that is harmful, and what to do."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

#: All of them are logged here, so that one line silences or redirects them.
log = logging.getLogger("megatron_rl_patches")
#: Every message of the modules that are imported; the FAQ lists them.
messages: list[Message] = []


@dataclass(frozen=True)
class Message:
    """What is logged. The three texts are sentences; values stand in braces, as in ``str.format``."""

    happened: str  # without a period at its end
    harm: str  # whether it is harmful, and to what
    remedy: str  # what to do
    level: int = logging.WARNING

    def __post_init__(self) -> None:
        messages.append(self)

    def text(self, **values: Any) -> str:
        """Return the line that is logged."""
        return f"megatron_rl_patches: {self.happened}. {self.harm} {self.remedy}".format(**values)

    def log(self, **values: Any) -> None:
        log.log(self.level, "%s", self.text(**values))
