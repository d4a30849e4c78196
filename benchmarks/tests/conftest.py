from __future__ import annotations

import os
import warnings
from importlib import import_module

# Before torch: two tests at a time, with a thread per core each, would spin more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Megatron warns of what is not installed, and a warning is an error in a test.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("benchmarks.gpu_steps")
