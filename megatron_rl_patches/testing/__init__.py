"""Tools to test RL pipelines on megatron-core without a GPU.

Importing them loads neither torch nor megatron.
"""

from .cpu_backend import cpu_backend
from .mock_ddp import MockDDP, MockOptimizer
from .mock_modules import MockBucketGroup, MockConfig, MockDDPConfig, MockFloat16Module, MockModule
from .ranks import RanksFailed, spawn_ranks

__all__ = [
    "MockBucketGroup",
    "MockConfig",
    "MockDDP",
    "MockDDPConfig",
    "MockFloat16Module",
    "MockModule",
    "MockOptimizer",
    "RanksFailed",
    "cpu_backend",
    "spawn_ranks",
]
