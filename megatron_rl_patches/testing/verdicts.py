"""Results of Megatron-LM's tests on a CPU: the outcome of each test, and why it could not run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

PASSED, SKIPPED, NOT_RUNNABLE, FAILED, HANGS = OUTCOMES = (
    "passed",
    "skipped",
    "not_runnable",
    "failed",
    "hangs",
)
TRANSFORMER_ENGINE, CUDA_KERNEL, GPU_TENSOR, MORE_RANKS, DATA, OTHER_PACKAGE = REASONS = (
    "TransformerEngine",
    "CUDA kernel",
    "tensor on a GPU",
    "more ranks",
    "data",
    "other package",
)


@dataclass(frozen=True)
class Result:
    """What became of one test at one number of ranks; a line of a results file.

    Attributes:
        nodeid: the test, or a file whose import failed or which skips itself.
        ranks: how many ranks it ran on.
        patches: the patches that were in place, as given: "", "all" or names with commas between them.
        outcome: one of ``OUTCOMES``.
        reason: one of ``REASONS`` if the test is not runnable here, otherwise empty.
        message: what was raised or the reason of the skip, with the rank that failed first, or the stacks of
            the ranks that hang; empty if the test has passed.
        seconds: wall time.
        commit: that of the checkout, as :func:`commit_of` gives it.
    """

    nodeid: str
    ranks: int
    patches: str
    outcome: str
    reason: str = ""
    message: str = ""
    seconds: float = 0.0
    commit: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def commit_of(checkout: Path) -> str:
    """Return the checkout's commit, with a digest of what differs from it; empty without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "HEAD").decode(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}+{sha256(changed).hexdigest()[:8]}" if changed else commit


def read_results(path: Path) -> Iterator[Result]:
    """Read a results file. Lines that were cut off are left out."""
    if path.exists():
        yield from parse_results(path.read_bytes())


def parse_results(lines: bytes) -> Iterator[Result]:
    for line in lines.splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        yield Result(**values)


def final_of(path: Path, patches: str = "") -> list[Result]:
    """Return :func:`final` of the results in a file that were obtained with these patches."""
    return final(result for result in read_results(path) if result.patches == patches)


def final(results: Iterable[Result]) -> list[Result]:
    """Return one result per test: at the fewest ranks at which it passed, or else at the most ranks.

    The results are those of one set of patches.
    """
    chosen: dict[str, Result] = {}
    for result in sorted(results, key=lambda result: result.ranks):
        before = chosen.get(result.nodeid)
        if before is None or before.outcome != PASSED:
            chosen[result.nodeid] = result
    return list(chosen.values())


# Packages of CUDA kernels. Without a GPU their import fails, or they do nothing.
_KERNELS = (
    r"triton|apex|amp_C|flash_attn\w*|flash_mla|flashinfer|mamba_ssm|causal_conv1d|grouped_gemm|deep_ep|fla"
    r"|fast_hadamard_transform|nvshmem|cupy|cudnn|pynvml|kitchen|nvidia_kitchen"
)
# The first pattern that matches the message gives the reason.
_RAISED = [
    (MORE_RANKS, r"world.?size \(?\d+\)? is not divisible|not divisible by \w+ size|new group's world size"),
    (MORE_RANKS, r"over sized with world size|divisible by partial DistOpt shard factor"),
    (MORE_RANKS, r"Valid ranks are 0 to|assert \d+ <= \d+\n +\+  where \d+ = Utils\.world_size"),
    (
        TRANSFORMER_ENGINE,
        r"(?i:transformer.?engine)|\bTE[A-Z]\w+|\bte_\w+|NVTE|FP8GlobalStateManager|\bTE >=",
    ),
    # Where TransformerEngine is not installed, Megatron replaces its classes by mocks.
    (TRANSFORMER_ENGINE, r"spec_utils\.py:\d+: module = import_module"),
    (TRANSFORMER_ENGINE, r"Mock object has no attribute '(weight|module|cuda)'|fp8_utils' has no attribute"),
    (TRANSFORMER_ENGINE, r"StopIteration: \nat \S*unittest/mock\.py|StopIteration:  when instantiating"),
    (TRANSFORMER_ENGINE, r"str is not a Module subclass|isinstance\(\) arg 2 must be a type"),
    (CUDA_KERNEL, rf"No module named '({_KERNELS})\b|Mamba ?SSM is not installed|using cudagraphs with RNG"),
    # Without fused norms Megatron uses torch's, which refuses some of their options.
    (CUDA_KERNEL, r"Grouped GEMM is not available|not supported by torch LayerNorm|name 'causal_conv1d"),
    (CUDA_KERNEL, r"LayerNorm\.__init__\(\) got an unexpected keyword argument 'config'"),
    # On which device a tensor is, is what these tests ask, and the optimizer that keeps states on the CPU.
    (
        GPU_TENSOR,
        r"assert 'cpu' == 'cuda'|where False = .*\.is_cuda\b|hybrid_optimizer\.py:\d+: gpu_param = ",
    ),
    (GPU_TENSOR, r"assert device\(type='cpu'\) == device\(type='cuda'"),
    # These asserts stand before a kernel.
    (CUDA_KERNEL, r"assert .*\.is_cuda\b|must be on CUDA|self\.main_grad\.allocation_stream =="),
    (CUDA_KERNEL, r"0 active drivers|CUDA_HOME|nccl_allocator|libcuda\.so"),
    (CUDA_KERNEL, r"Torch not compiled with CUDA|/triton/|CUDA driver version is insufficient"),
    (CUDA_KERNEL, r"SymmetricMemory MemPool did not find backend"),
    (OTHER_PACKAGE, r"No module named '(?!megatron|tests)|could not import '|modelopt|is not installed"),
    (
        OTHER_PACKAGE,
        r"name 'nvtx' is not defined|package is required|`nvidia-resiliency-ext` installation is required",
    ),
    (DATA, r"FileNotFoundError|/opt/data|Tokenizer path doesn't exist"),
    (DATA, r"NameResolutionError|Max retries exceeded|couldn't connect|offline mode is enabled"),
]
# Reasons with which the authors of the tests skip them.
_SKIPPED = [
    (MORE_RANKS, r"(?i)world.?size|\d gpus|\branks\b|[} ]gpus\b"),
    (TRANSFORMER_ENGINE, r"\bTE\b|(?i:transformer.?engine)|\bTE[A-Z]\w+"),
    (
        CUDA_KERNEL,
        r"(?i)triton|apex|flash.?(?:att|infer)|fp8|fp4|cuda.?graph|nccl|nvshmem|deep ?ep|hybrid ?ep|amp_C",
    ),
    (CUDA_KERNEL, r"(?i)hopper|blackwell|(?:grouped|deep).?gemm|kitchen|\bFLA\b|fused|mamba"),
    (OTHER_PACKAGE, r"(?i)could not import|is required|not installed|is not available"),
    (DATA, r"(?i)does not exist|download"),
]


# Megatron-LM's own CI has eight GPUs, so a test that wants more ranks is skipped there, too.
_RANKS_IN_CI = 8


def reason_of(message: str, *, skipped: bool = False, ranks: int = 1) -> str:
    """Return why a test that raised or skipped with this message cannot run here; "" if that is not known."""
    rules = _SKIPPED if skipped else _RAISED
    reason = next((reason for reason, pattern in rules if re.search(pattern, message)), "")
    return "" if skipped and reason == MORE_RANKS and ranks >= _RANKS_IN_CI else reason


_NEEDED = re.compile(
    r"(?i)not divisible by (?:\w+ size )?\(?(\d+)|world_size=(\d+), but"
    r"|requires (?:at least )?(\d+) (?:gpus|ranks)"
)


def ranks_needed(message: str) -> int:
    """Return a divisor that the number of ranks must have according to the message; 1 if it names none."""
    match = _NEEDED.search(message)
    return int(match[match.lastindex or 0]) if match else 1
