"""Libraries in the place of the CUDA runtime and driver, whose functions report success and do nothing.

With them autograd runs on fake CUDA tensors where there is neither a GPU nor a driver: torch asks for streams
and events, and never launches a kernel. ``python -m tests.lab.rehearsal.stand_ins`` rehearses, and writes
what is counted into the page of the head.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.references.heads import ALL_KEPT, BASE, DEFERRED, NOT_IN_PLACE, STOCK
from tests.references.pages import fill, table

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "head.md"
COUNTED = PAGE.with_name("head_counted.json")
#: What the page shows: columns, and keys of a head's record.
COLUMNS = {"peak": "beyond gradients", "with inputs and gradients": "with inputs and gradients"}
NAMES = {
    STOCK: "stock code (slime)",
    NOT_IN_PLACE: "`lean-loss`",
    BASE: "`lean-loss`, in place (verl)",
    DEFERRED: "`lean-head`, no tiles kept",
    ALL_KEPT: "`lean-head`, all kept",
}

# What torch reads after the call: an output parameter, by its position, and its value.
_RUNTIME_OUTPUTS = {
    "cudaGetDeviceCount": "*(int *)a = 1;",
    "cudaGetDevice": "*(int *)a = 0;",
    "cudaDeviceGetStreamPriorityRange": "*(int *)a = 0; *(int *)b = -5;",
    "cudaStreamCreateWithPriority": "*(void **)a = next_handle();",
    "cudaEventCreateWithFlags": "*(void **)a = next_handle();",
    "cudaStreamGetPriority": "*(int *)b = 0;",
    "cudaStreamIsCapturing": "*(int *)b = 0;",
}
_CONTEXT_STATE = "cuDevicePrimaryCtxGetState"
_HAS_CONTEXT = f"int {_CONTEXT_STATE}(int d, unsigned *flags, int *on) {{ *flags = 0; *on = 1; return 0; }}"
_RUNTIME = (
    *("cudaSetDevice", "cudaFree", "cudaStreamQuery", "cudaStreamSynchronize", "cudaStreamWaitEvent"),
    *("cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventQuery", "cudaEventSynchronize"),
    *("cudaEventDestroy", "cudaDeviceSynchronize", "cudaGetLastError", "cudaPeekAtLastError"),
)
_HANDLES = """
static char handles[65536];
static int used;
static void *next_handle(void) { return &handles[used++ % 65536]; }
"""


def run(module: str, *arguments: str, stdin: str | None = None, **variables: str) -> str:
    """Run a module in a fresh process with environment variables, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=stdin,
        env={**os.environ, **variables},
        cwd=PAGE.parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_with_libraries(module: str, *arguments: str, **variables: str) -> str:
    """Run a module in the same way, with the libraries, or skip the test where they do not help."""
    if torch.version.cuda is None:
        pytest.skip("torch is not built with CUDA")
    if torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("there is a GPU, or no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        with_libraries = _environment(Path(torch.__file__).parent / "lib", Path(folder))
        return run(module, *arguments, **{**with_libraries, **variables})


def rehearsed(part: str) -> Any:
    """Run a part of :mod:`.cases`, and return what it prints."""
    return json.loads(run_with_libraries("tests.lab.rehearsal.cases", part).splitlines()[-1])


def texts(counted: dict[str, list[dict[str, str]]], page: str) -> dict[Path, str]:
    """Return the file and the page with what is counted; of stock code without a checkout, old numbers."""
    counted = json.loads(COUNTED.read_text("utf-8")) | counted
    published = [*dict.fromkeys(row["set-up"] for row in counted["heads"])][:3]
    rows = [
        {"set-up": setup, "head": name, "products": row["products"]}
        | {column: f"{row[key].replace(', ', ' (')} ×)" for column, key in COLUMNS.items()}
        for setup, (head, name) in product(published, NAMES.items())
        for row in counted["heads"] + counted["stock"]
        if (row["set-up"], row["head"]) == (setup, head)
    ]
    return {
        COUNTED: json.dumps(counted, indent=1, ensure_ascii=False) + "\n",
        PAGE: fill(page, {"counted": table(rows)}),
    }


def _environment(torch_libraries: Path, folder: Path) -> dict[str, str]:
    """Compile the libraries into a folder, and return the variables with which a process uses them.

    Nothing is compiled with them: no kernel may start.
    """
    runtime = [_HANDLES, *(_function(name, body) for name, body in _RUNTIME_OUTPUTS.items())]
    runtime += [_function(name, "") for name in _RUNTIME]
    needed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(torch_libraries / "libcaffe2_nvrtc.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = sorted(set(re.findall(r" (cu[A-Z]\w+)", needed)) - {_CONTEXT_STATE})
    driver = [*(f"int {name}(void) {{ return 999; }}" for name in names), _HAS_CONTEXT]
    _compile(folder / "libfake_cudart.so", runtime)
    _compile(folder / "libcuda.so.1", driver, "-Wl,-soname,libcuda.so.1")
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_PRELOAD": str(folder / "libfake_cudart.so"),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "TORCHDYNAMO_DISABLE": "1",
    }


def _function(name: str, body: str) -> str:
    return f"int {name}(void *a, void *b, void *c) {{ {body} return 0; }}"


def _compile(library: Path, lines: list[str], *options: str) -> None:
    source = library.with_name(f"{library.name}.c")
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True)


if __name__ == "__main__":
    for file, text in texts(rehearsed("counted"), PAGE.read_text("utf-8")).items():
        file.write_text(text, "utf-8")
