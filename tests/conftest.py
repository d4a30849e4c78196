from __future__ import annotations

from hypothesis import settings

# Tests share cores with ranks that other tests spawn: how long an example takes says nothing.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")
