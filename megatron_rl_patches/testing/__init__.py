"""Tools to test RL pipelines on megatron-core without a GPU.

Importing the package loads neither torch nor megatron; mocks and models do when they are first used.
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazy_names
from .cpu_backend import cpu_backend as cpu_backend
from .ranks import RanksFailed as RanksFailed
from .ranks import spawn_ranks as spawn_ranks

if TYPE_CHECKING:
    from .mock_ddp import MockDDP as MockDDP
    from .mock_modules import MockBucketGroup as MockBucketGroup
    from .mock_modules import MockConfig as MockConfig
    from .mock_modules import MockDDPConfig as MockDDPConfig
    from .mock_modules import MockModule as MockModule
    from .mock_optimizer import MockOptimizer as MockOptimizer
    from .normalization import SPLITS as SPLITS
    from .normalization import Microbatch as Microbatch
    from .normalization import NormalizationReport as NormalizationReport
    from .normalization import Split as Split
    from .normalization import check_normalization as check_normalization
    from .tiny_models import TinyModel as TinyModel
    from .tiny_models import tiny_model as tiny_model

__getattr__, __dir__, _lazy = lazy_names(
    __name__,
    {
        ".mock_ddp": ["MockDDP"],
        ".mock_modules": ["MockBucketGroup", "MockConfig", "MockDDPConfig", "MockModule"],
        ".mock_optimizer": ["MockOptimizer"],
        ".normalization": ["SPLITS", "Microbatch", "NormalizationReport", "Split", "check_normalization"],
        ".tiny_models": ["TinyModel", "tiny_model"],
    },
)
__all__ = ["RanksFailed", "cpu_backend", "spawn_ranks", *_lazy]
