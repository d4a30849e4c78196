"""What triton and its assembler make of a kernel for GPUs that are not here: registers, spills, instructions.

``python -m tests.lab.kernels.machine_code CASE`` compiles the kernels that read logits in a case of
:mod:`.sources`, and prints as JSON their configurations up to the first one that is fast enough, or with
``--all`` all of them, the digests of the case's kernels, and the source of each function. It runs in a
process that has the libraries of :mod:`tests.lab.rehearsal.stand_ins`.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.lab.kernels import sources
from tests.lab.kernels.sources import MULTIPROCESSORS, pretended_gpu

TORCH = ".".join(torch.__version__.split(".")[:2])
#: The digests of the head's kernels by release of torch, as ``python -m tests.lab.kernels.page`` writes them.
DIGESTS = Path(__file__).with_name("digests.json")
# name = async_compile.triton('name', '''source''', device_str='cuda')
_KERNELS = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '{3}(.*?)'{3}, device_str", re.M | re.S)
# "        /*0040*/                   @!P0 IMAD.WIDE R2, R3, R4, R5 ;"
_INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\b.*;", re.M)
_USE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")

STATISTICS, GRADIENT = "block_statistics", "block_gradient"
WRITES_LOGITS = {GRADIENT, "_block_derivative"}
#: The most instructions for each logit, or for each pair of logits, by case and function.
MOST = {
    "head": {STATISTICS: 22, GRADIENT: 26},
    "head, log-probs": {STATISTICS: 22, GRADIENT: 26},
    "ids": {STATISTICS: 17, GRADIENT: 18},  # with a mask of a row's ids
    # Its vocabulary is divided into stretches of 128 columns.
    "materialized, float32": {STATISTICS: 26, GRADIENT: 26},
    "materialized, float32, keep-mask": {STATISTICS: 29, GRADIENT: 35},  # two softmaxes
    "reverse_kl": {"_conditional_parts": 95, "_block_derivative": 35},
    "forward_kl": {"_conditional_parts": 95, "_block_derivative": 105},
    "jensen_shannon": {"_normalizers": 22, "_sums": 215, "_block_derivative": 120},
}


@dataclass(frozen=True)
class Kernel:
    """One configuration of a kernel on one GPU."""

    case: str  # of sources.CASES
    function: str  # of the package, that the kernel belongs to
    capability: int  # of the GPU, such as 90
    configuration: str  # sizes of the block of one program, and its warps
    registers: int  # of a thread
    spilled: int  # bytes of a thread that are not in registers
    per_element: float  # instructions for each element that the kernel goes over
    wide_loads: float  # bytes of each element that are loaded 16 at a time
    widest_store: int  # in bytes, to the memory of the GPU
    has_loop: bool  # it goes over a row in several steps, and may read it more than once

    def is_fast(self) -> bool:
        has_one_step = not self.has_loop or "R0_BLOCK 1024" in self.configuration
        return (
            self.spilled == 0
            and self.per_element <= MOST[self.case][self.function]
            and self.wide_loads >= bytes_of_logits(self.case, self.function)
            and (self.widest_store == 16 or self.function not in WRITES_LOGITS)
            and has_one_step
        )


def digests(code: str) -> list[str]:
    """Return what identifies the function of each kernel, without what is said of the GPU around it."""
    functions = (source[source.index("@triton.jit") :] for _, source in _KERNELS.findall(code))
    return [hashlib.sha256(function.encode()).hexdigest() for function in functions]


def recorded_digests() -> set[str] | None:
    """Return those of the head's kernels with this torch; ``None`` if they are not recorded."""
    digests = json.loads(DIGESTS.read_text()).get(TORCH)
    return None if digests is None else set(digests)


def load(name: str, source: str, folder: Path, capability: int) -> Any:
    """Import a kernel as if it had been generated for this GPU."""
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    of_gpu = f"multi_processor_count={MULTIPROCESSORS[capability]}, cc={capability}, major={capability // 10}"
    source = re.sub(r"multi_processor_count=\d+, cc=\d+, major=\d+", of_gpu, source)
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compiled(code: str, case: str, function: str, capability: int, folder: Path) -> Iterator[Kernel]:
    """Compile every configuration of the first kernel, which reads all logits of one side or of both.

    Later ones read those of the other side, or the stretch with a row's largest logit, or merge results.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def run(tool: str, *options: str) -> str:
        return subprocess.run([tools / tool, *options], capture_output=True, text=True, check=True).stdout

    name, source = _KERNELS.findall(code)[0]
    kernel = load(name, source, folder, capability)
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        ast = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = kernel._create_compile_options(config, meta)
        binary = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
        file = folder / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        use = _USE.search(run("cuobjdump", "--dump-resource-usage", str(file)))
        assert use is not None
        registers, stack, local = map(int, use.groups())
        instructions = Counter(_INSTRUCTION.findall(run("nvdisasm", "-c", str(file))))
        count = sum(n for name, n in instructions.items() if not name.startswith(("NOP", "BRA")))
        elements = config.kwargs["XBLOCK"] * config.kwargs.get("YBLOCK", 1)
        if persistent := re.search(r"'r0_': (\d+)", source) if "triton_per_" in name else None:
            elements *= int(persistent[1])
        elements *= config.kwargs.get("R0_BLOCK", 1)
        threads = 32 * binary.metadata.num_warps
        yield Kernel(
            case,
            function,
            capability,
            ", ".join(f"{key} {value}" for key, value in config.kwargs.items())
            + f", {binary.metadata.num_warps} warps",
            registers,
            stack + local,
            round(count / max(elements / threads, 1), 1),
            16 * threads / elements * sum(n for name, n in instructions.items() if _width(name, "LDG") == 16),
            max(_width(name, "STG") for name in instructions),
            "for r0_offset" in source,
        )


def _width(instruction: str, kind: str) -> int:
    """Return how many bytes an instruction moves for each thread, and 0 for one of another kind."""
    if not instruction.startswith(kind):
        return 0
    width = re.search(r"\.U?(8|16|64|128)\b", instruction)
    return int(width[1]) // 8 if width else 4


def bytes_of_logits(case: str, function: str) -> int:
    """Return how many bytes of logits and their mask a kernel has to load for each element."""
    if function == "_normalizers" or case.startswith("head"):
        return 2  # bfloat16; _normalizers have a kernel for each side
    if case == "ids":
        return 3 if function == STATISTICS else 2
    return 5 if "keep-mask" in case else 4  # float32, or bfloat16 of two sides


def _until_fast(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    for kernel in kernels:
        yield kernel
        if kernel.is_fast():
            return


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch._inductor.config.force_disable_caches = True
    case, select = sys.argv[1], list if "--all" in sys.argv else _until_fast
    of_functions = sources.sources_of(sources.CASES[case])
    rows: list[Kernel] = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TRITON_CACHE_DIR"] = temporary
        for capability in MULTIPROCESSORS:
            with pretended_gpu(capability):
                for function, source in of_functions.items():
                    rows += select(compiled(source.code, case, function, capability, Path(temporary)))
    of_all = sorted({digest for source in of_functions.values() for digest in digests(source.code)})
    result = {"kernels": [asdict(row) for row in rows], "digests": of_all, "sources": of_functions}
    print(json.dumps(result), flush=True)
    os._exit(0)  # an orderly end would release streams that are not there
