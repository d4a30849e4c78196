"""The Triton kernels that torch's compiler makes of the functions of a block, as sources.

Cases of the rehearsal run at real sizes, on fake CUDA tensors, in a process that has the libraries of
:mod:`tests.lab.rehearsal.stand_ins`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_rl_patches import losses
from megatron_rl_patches.losses.vocab import compiling
from megatron_rl_patches.losses.vocab.divergences import Divergence
from tests.lab.rehearsal.cases import backward, ids, layer
from tests.lab.rehearsal.recorder import recording

#: Others have published numbers for this output layer: [rows, hidden size] and the vocabulary.
ROWS, HIDDEN, VOCABULARY = 8192, 4096, 131_072
GEMMA = 262_144  # the vocabulary of Gemma
QWEN = 151_936  # the vocabulary of Qwen, which is a multiple of 128 and of no larger power of two
#: Multiprocessors of A100, H100 SXM and B200, by compute capability.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
#: H100. The sources for other GPUs differ in their number of multiprocessors alone.
CAPABILITY = 90


def head(entropy: bool = True) -> None:
    hidden, weight = layer(torch.bfloat16, HIDDEN, rows=ROWS, columns=VOCABULARY)
    backward(hidden, *scores(losses.deferred_logits(hidden, weight), ids(ROWS), entropy))


def materialized(dtype: torch.dtype, mask: bool = False) -> None:
    logits = torch.empty(ROWS // 2, QWEN, device="cuda", dtype=dtype, requires_grad=True)
    keep_mask = torch.empty(logits.shape, device="cuda", dtype=torch.bool) if mask else None
    backward(logits, *scores(logits, ids(len(logits)), keep_mask=keep_mask))


def scores(logits: Tensor, targets: Tensor, entropy: bool = True, **options: Any) -> tuple[Tensor, ...]:
    function = losses.vocab_parallel_log_probs_and_entropy if entropy else losses.vocab_parallel_log_probs
    values = function(logits, targets, temperature=0.8, **options)
    return values if isinstance(values, tuple) else (values,)


def at_ids() -> None:
    # With 131,072 ids, a block would have as many rows as a stretch has columns, and the compiled code would
    # work for no other number of rows.
    logits = torch.empty(ROWS, GEMMA, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    backward(logits, *losses.vocab_parallel_log_probs_at(logits, ids(ROWS, 64), with_tail=True))


def divergence(name: Any) -> None:
    hidden, weight = layer(torch.bfloat16, HIDDEN, rows=ROWS // 2, columns=VOCABULARY)
    teacher = losses.deferred_logits(hidden.detach(), weight.detach())
    student = losses.deferred_logits(hidden, weight)
    backward(hidden, losses.full_vocabulary_divergence(student, teacher, divergence=name))


CASES: dict[str, Callable[[], None]] = {
    "head": head,
    "head, log-probs": partial(head, entropy=False),
    "ids": at_ids,
    "materialized, float32": partial(materialized, torch.float32),
    "materialized, float32, keep-mask": partial(materialized, torch.float32, mask=True),
    "reverse_kl": partial(divergence, "reverse_kl"),
    "forward_kl": partial(divergence, "forward_kl"),
    "jensen_shannon": partial(divergence, "jensen_shannon"),
}


# --- a GPU for the compiler where there is none: it asks for properties, and starts no kernel


class _OnTheCpu(TorchDispatchMode):
    """The compiler folds constants with real tensors, which it makes on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _fold_on_the_cpu(self: Any, node: Any, deduce: Any = UniformValueConstantFolder._deduce_value) -> Any:
    with _OnTheCpu():
        return deduce(self, node)


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """Let the compiler, and triton, see a GPU of this compute capability, such as 90."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    major_minor = divmod(capability, 10)
    of_triton = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda *device: major_minor,
        get_current_stream=lambda *device: 0,
        map_python_to_cpp_type=lambda name: name,
    )
    properties = SimpleNamespace(
        name=f"pretended sm_{capability}",
        major=major_minor[0],
        minor=major_minor[1],
        multi_processor_count=MULTIPROCESSORS[capability],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    with ExitStack() as stack:
        for owner, name, value in (
            (driver, "_active", of_triton),
            (torch.cuda, "_initialized", True),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *device: major_minor),
            (torch.cuda, "get_device_properties", lambda *device: properties),
            (torch.cuda, "get_device_name", lambda *device: properties.name),
            (torch.cuda, "synchronize", lambda *device: None),
            (torch.cuda, "_exchange_device", lambda index: 0),
            (torch.cuda, "_maybe_exchange_device", lambda index: 0),
            (torch.cuda, "get_rng_state", lambda *device: torch.empty(0, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda *state: None),
            (torch._C, "_cuda_getDevice", lambda: 0),
            (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False),
            (CudaInterface, "is_available", staticmethod(lambda: True)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: capability)),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: True)),
            (CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
            (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
            (UniformValueConstantFolder, "_deduce_value", _fold_on_the_cpu),
        ):
            stack.enter_context(patch.object(owner, name, value, create=True))
        torch.utils._triton.triton_backend.cache_clear()
        torch.utils._triton.triton_hash_with_backend.cache_clear()
        yield


# --- what it generates


class _Generated(Exception):
    """The code is there; it is not loaded, since that would take a GPU."""


def generate(compiled: Callable[..., Any], *args: Any) -> str:
    """Return the code that the compiler makes of a call with fake tensors."""
    torch._dynamo.reset()
    with patch.object(GraphLowering, "save_output_code", side_effect=_Generated) as save:
        try:
            compiled(*args)
        except Exception:
            if not save.called:
                raise
    return save.call_args.args[0]


class Source(NamedTuple):
    """What the compiler makes of a function."""

    code: str
    #: Of the code, in its order: numbers of the arguments' tensors, or of a tensor and one of its sizes_of().
    inputs: list[list[int]]


def inputs_of(function: Callable[..., Any], args: Sequence[Any]) -> list[list[int]]:
    """Return what the compiler takes for these arguments, see :class:`Source`."""
    tensors, inputs = tensors_of(args), list[list[int]]()

    def place(x: Any) -> list[int]:
        if isinstance(x, Tensor):
            return [next(number for number, tensor in enumerate(tensors) if tensor is x)]
        return next(
            [i, d] for i, tensor in enumerate(tensors) for d, n in enumerate(sizes_of(tensor)) if n == x
        )

    def backend(graph: Any, examples: object) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            inputs.extend([place(value) for value in values])
            return graph.forward(*values)

        return call

    torch._dynamo.reset()
    torch.compile(function, dynamic=True, fullgraph=True, backend=backend)(*args)
    return inputs


def sizes_of(tensor: Tensor) -> list[int]:
    """Return the numbers of a tensor that the compiler may take for an argument."""
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def tensors_of(args: Any) -> list[Tensor]:
    leaves = tree_leaves(args)
    weights = [x.beta for x in leaves if isinstance(x, Divergence)]
    return [x for x in (*leaves, *weights) if isinstance(x, Tensor)]


def sources_of(case: Callable[[], None]) -> dict[str, Source]:
    """Run a case, and return what the compiler makes of each function, by its name."""
    sources: dict[str, Source] = {}
    compiled = compiling._compiled

    def generating(function: Callable[..., Any], is_elementwise: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if function.__name__ not in sources:
                logits = args[0][0] if isinstance(args[0], list) else args[0]
                with _disable_current_modes(), logits.fake_mode:
                    code = generate(compiled(function, is_elementwise), *args)
                    sources[function.__name__] = Source(code, inputs_of(function, args))
            return function(*args)

        return call

    with recording(), pretended_gpu(CAPABILITY), patch.object(compiling, "_compiled", generating):
        case()
    return sources


def generated_codes(case: Callable[[], None]) -> list[str]:
    """Run a case on a GPU, and return all code that the compiler generates for it."""
    codes: list[str] = []
    torch._dynamo.reset()
    with (
        inductor.patch(force_disable_caches=True),
        patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        case()
    return codes
