"""Run a checkout's own unit tests, with or without patches, each at the number of ranks that it needs."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl_patches.errors import MegatronRLPatchesError

PASSED, SKIPPED, NOT_RUNNABLE, FAILED, HANGS = "passed", "skipped", "not_runnable", "failed", "hangs"
REASONS = ("TransformerEngine", "CUDA kernel", "tensor on a GPU", "more ranks", "data", "other package")
TRANSFORMER_ENGINE, CUDA_KERNEL, GPU_TENSOR, MORE_RANKS, DATA, OTHER_PACKAGE = REASONS


@dataclass(frozen=True)
class Result:
    """What became of one test at one number of ranks; a line of a results file."""

    nodeid: str  # a test, or a file whose import failed or which skips itself
    ranks: int
    patches: str  # as given: "", "all" or names with commas between them
    outcome: str
    reason: str = ""  # one of REASONS if the test is not runnable here
    message: str = ""  # what was raised or why it is skipped; of ranks that hang, their stacks
    seconds: float = 0.0

    def append_to(self, path: Path) -> None:
        with path.open("a") as file:
            file.write(f"\n{json.dumps(asdict(self))}")  # in a new line, also after one that was cut off


def read_results(path: Path) -> list[Result]:
    """Read a results file. Lines that were cut off are left out."""
    results = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            results.append(Result(**json.loads(line)))
    return results


def final_of(path: Path) -> list[Result]:
    """Return one result per test without patches, of those in a file.

    It is the one at the fewest ranks at which the test passed, or else at the most ranks.
    """
    chosen: dict[str, Result] = {}
    for result in sorted(read_results(path), key=lambda result: result.ranks):
        before = chosen.get(result.nodeid)
        if not result.patches and (before is None or before.outcome != PASSED):
            chosen[result.nodeid] = result
    return list(chosen.values())


class Change(NamedTuple):
    """A test whose verdict differs between a run without and a run with patches."""

    without: Result
    patched: Result

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {"without": asdict(self.without), "with": asdict(self.patched)}


@dataclass(frozen=True)
class Runs:
    """Runs of the tests of a checkout of Megatron-LM.

    Attributes:
        results: gets a line for each test. A test that has one at the same ranks and patches is left out, so
            a run that was interrupted goes on where it was.
        options: more options of the plugin.
    """

    checkout: Path
    results: Path
    options: Sequence[str] = ()

    def run(
        self,
        select: Iterable[str] = ("tests/unit_tests",),
        *,
        ranks: int = 1,
        patches: str = "",
        only: Collection[str] | None = None,
    ) -> None:
        """Run tests at a number of ranks. pytest has a process of its own, and its output goes to stderr.

        ``only`` lists the node ids of all tests that are to run, or of their files, in place of ``select``.
        """
        rootdir, results = self.checkout.resolve(), self.results.resolve()
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            command = [sys.executable, "-m", "pytest", "-p", "conformance.plugin", "-o", "addopts="]
            command += ["-p", "no:cacheprovider", "--tb=short", "-q", f"--rootdir={rootdir}", *self.options]
            command += [f"--ranks={ranks}", f"--patches={patches}", f"--results={results}"]
            if only is not None:
                select = _files_of(only)
                listed = Path(folder, "only")
                listed.write_text("\n".join(only))
                command.append(f"--only={listed}")
            command += select
            # The patches are those that the caller asks for, and no others.
            variables = {name: value for name, value in os.environ.items() if name != "MEGATRON_RL_PATCHES"}
            # Some tests call ``python3`` and ``python3-config``, to build the C++ of Megatron's datasets.
            own = (str(Path(sys.executable).parent), str(Path(sys.base_prefix, "bin")))
            variables["PATH"] = os.pathsep.join([*own, variables.get("PATH", os.defpath)])
            before = filter(None, [variables.get("PYTHONPATH")])
            variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *before])
            # The file descriptor of stderr gets what goes to stdout.
            done = subprocess.run(command, cwd=rootdir, env=variables, stdin=subprocess.DEVNULL, stdout=2)
        if done.returncode not in (0, 1, 5):  # all tests passed, some failed, none was selected
            raise MegatronRLPatchesError(
                f"pytest ended with exit code {done.returncode}; its output says why"
            )

    def run_at_smallest(
        self, select: Iterable[str], ranks: Sequence[int], only: Collection[str] | None = None
    ) -> None:
        """Run each test at the first of these numbers of ranks, and at the next ones until it passes.

        Only tests that need more ranks or fail run again, unless their message shows that this number of
        ranks does not help either. :func:`final_of` selects one result per test in the end.
        """
        self.run(select, ranks=ranks[0], only=only)
        for count in ranks[1:]:
            # Messages of tests that lack ranks differ, and some tests fail without such a message.
            unsettled = [x for x in final_of(self.results) if x.reason == MORE_RANKS or x.outcome == FAILED]
            fewer = [x for x in unsettled if x.ranks < count and count % ranks_needed(x.message) == 0]
            if again := [one.nodeid for one in fewer]:
                self.run(ranks=count, only=again)

    def run_with_patches(self, patches: str) -> None:
        """Run with patches the tests that could run without them, at as many ranks."""
        by_ranks: dict[int, list[str]] = {}
        for result in final_of(self.results):
            if result.outcome != NOT_RUNNABLE:
                by_ranks.setdefault(result.ranks, []).append(result.nodeid)
        for count, only in sorted(by_ranks.items()):
            self.run(ranks=count, patches=patches, only=only)

    def changes(self, patches: str) -> list[Change]:
        """Return the tests whose verdicts these patches have changed, after a run with them.

        A test that it has no result of, as its file could not be collected, counts as changed.
        """
        patched = {(x.nodeid, x.ranks): x for x in read_results(self.results) if x.patches == patches}
        changed = []
        for one in final_of(self.results) if patched else ():
            if one.outcome != NOT_RUNNABLE:
                absent = replace(one, patches=patches, outcome=FAILED, message="it was not collected")
                other = patched.get((one.nodeid, one.ranks), absent)
                if (one.outcome, one.reason) != (other.outcome, other.reason):
                    changed.append(Change(one, other))
        return changed

    def repeated_changes(self, changed: Sequence[Change], patches: str) -> list[Change]:
        """Run the files of tests whose verdict has changed once more, both ways; return what changes again.

        A test that depends on timing may give another verdict without any patch. So may one that depends on
        the tests before it, of which a run with patches leaves out those that cannot run; here all run.
        """
        again: list[Change] = []
        for count in sorted({change.without.ranks for change in changed}):
            nodeids = {change.without.nodeid for change in changed if change.without.ranks == count}
            with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
                once_more = replace(self, results=Path(folder, "results"))
                for names in ("", patches):
                    once_more.run(_files_of(nodeids), ranks=count, patches=names)
                again += [x for x in once_more.changes(patches) if x.without.nodeid in nodeids]
        return again


def _files_of(nodeids: Iterable[str]) -> list[str]:
    return sorted({nodeid.partition("::")[0] for nodeid in nodeids})


_NEEDED = re.compile(
    r"(?i)not divisible by (?:\w+ size )?\(?(\d+)|world_size=(\d+), but"
    r"|requires (?:at least )?(\d+) (?:gpus|ranks)|, but found (\d+) ranks"
)


def ranks_needed(message: str) -> int:
    """Return a divisor that the number of ranks must have according to the message; 1 if it names none."""
    match = _NEEDED.search(message)
    return int(match[match.lastindex or 0]) if match else 1


# --- why a test cannot run here

# Packages of CUDA kernels. Without a GPU their import fails, or they do nothing.
_KERNELS = (
    r"triton|apex|amp_C|flash_attn\w*|flash_mla|flashinfer|mamba_ssm|causal_conv1d|grouped_gemm|deep_ep|fla"
    r"|fast_hadamard_transform|nvshmem|cupy|cudnn|pynvml|kitchen|nvidia_kitchen"
)
# The first pattern that matches the message of a test gives the reason.
_RAISED = {
    MORE_RANKS: (
        r"world.?size \(?\d+\)? is not divisible|not divisible by \w+ size|new group's world size",
        r"over sized with world size|divisible by partial DistOpt shard factor",
        r"Mesh should not be bigger than default world size|invalid root rank",
        r"Valid ranks are 0 to|assert \d+ <= \d+\n +\+  where \d+ = Utils\.world_size",
    ),
    TRANSFORMER_ENGINE: (
        r"(?i:transformer.?engine)|\bTE[A-Z]\w+|\bte_\w+|NVTE|FP8GlobalStateManager|\bTE >=",
        # Where TransformerEngine is not installed, Megatron replaces its classes by mocks.
        r"spec_utils\.py:\d+: module = import_module",
        r"Mock object has no attribute '(weight|module|cuda)'|fp8_utils' has no attribute",
        r"StopIteration: \nat \S*unittest/mock\.py|StopIteration:  when instantiating",
        r"str is not a Module subclass|isinstance\(\) arg 2 must be a type",
    ),
    # On which device a tensor is, is what these tests ask, and the optimizer that keeps states on the CPU.
    GPU_TENSOR: (
        r"assert 'cpu' == 'cuda'|where False = .*\.is_cuda\b|hybrid_optimizer\.py:\d+: gpu_param = ",
        r"assert device\(type='cpu'\) == device\(type='cuda'",
    ),
    CUDA_KERNEL: (
        rf"No module named '({_KERNELS})\b|Mamba ?SSM is not installed|using cudagraphs with RNG",
        r"CUDA Graphs are not supported|does not support cudagraphs|dummy base class CUDAGraph",
        # Without fused norms Megatron uses torch's, which refuses some of their options.
        r"Grouped GEMM is not available|not supported by torch LayerNorm|name 'causal_conv1d",
        r"LayerNorm\.__init__\(\) got an unexpected keyword argument 'config'",
        # These asserts stand before a kernel.
        r"assert .*\.is_cuda\b|must be on CUDA|self\.main_grad\.allocation_stream ==",
        r"0 active drivers|CUDA_HOME|nccl_allocator|libcuda\.so",
        r"Torch not compiled with CUDA|/triton/|CUDA driver version is insufficient",
        r"SymmetricMemory MemPool did not find backend",
    ),
    OTHER_PACKAGE: (
        r"No module named '(?!megatron|tests)|could not import '|modelopt|is not installed",
        r"name 'nvtx' is not defined|package is required|`nvidia-resiliency-ext` installation is required",
    ),
    DATA: (
        r"FileNotFoundError|/opt/data|Tokenizer path doesn't exist",
        r"NameResolutionError|Max retries exceeded|couldn't connect|offline mode is enabled",
    ),
}
# The authors of the tests skip them with such reasons.
_SKIPPED = {
    MORE_RANKS: (r"(?i)world.?size|\d gpus|\branks\b|[} ]gpus\b",),
    TRANSFORMER_ENGINE: (r"\bTE\b|(?i:transformer.?engine)|\bTE[A-Z]\w+",),
    CUDA_KERNEL: (
        r"(?i)triton|apex|flash.?(?:att|infer)|fp8|fp4|cuda.?graph|nccl|nvshmem|deep ?ep|hybrid ?ep|amp_C",
        r"(?i)hopper|blackwell|(?:grouped|deep).?gemm|kitchen|\bFLA\b|fused|mamba",
    ),
    OTHER_PACKAGE: (r"(?i)could not import|is required|not installed|is not available",),
    DATA: (r"(?i)does not exist|download",),
}
# Megatron-LM's own CI has eight GPUs, so a test that wants more ranks is skipped there, too.
_RANKS_IN_CI = 8


# What the stand-in of TransformerEngine refuses or does not have. Tracebacks of other errors have the name of
# Megatron's file in them.
_NOT_IN_STAND_IN = (
    r"[Tt]he stand-in of TransformerEngine has no|(?:TE|Transformer ?Engine)(?: version| to)? ?>= ?\d",
    r"(?:No module named|cannot import name '\w+' from|module) 'transformer_engine",
    r"(?:\bTE\b|Transformer ?Engine).* not available",
)


def reason_of(
    message: str, *, skipped: bool = False, ranks: int = 1, transformer_engine: bool = False
) -> str:
    """Return why a test that raised or skipped with this message cannot run here; "" if that is not known."""
    known = _SKIPPED if skipped else _RAISED
    if transformer_engine:
        known = known | {TRANSFORMER_ENGINE: _NOT_IN_STAND_IN}
    for reason, patterns in known.items():
        if any(re.search(pattern, message) for pattern in patterns):
            return "" if skipped and reason == MORE_RANKS and ranks >= _RANKS_IN_CI else reason
    return ""
