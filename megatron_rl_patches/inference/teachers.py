"""Several teachers in the device memory of one: weights wait in host memory and are swapped in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..common.chunks import as_chunks
from ..errors import InferenceOnlyError, InvalidInputError
from ..losses import OutputHead
from .weights import TURNS_TO_FLOAT32, checksum, describe, differences, named_weights

Model = torch.nn.Module | Sequence[torch.nn.Module]
# Torch rounds pinned allocations up to powers of two: in one piece, a model could take twice its size.
_BLOCK_BYTES = 1 << 28


class TeacherPool:
    """Teachers of one shape that share one inference-only model.

    Device memory is the model's; each teacher takes its bytes in host memory, pinned if the model is on a
    GPU. Parameters keep their storages: CUDA graphs stay valid. ::

        pool = TeacherPool(build_inference_model(model_provider, config, dtype="bf16"))
        pool.add("math", "checkpoints/math")
        pool.add("code", "checkpoints/code")
        with pool.use("code") as model:
            scores = forward_log_probs(model, microbatches)

    **Inside** :meth:`use` the model holds the named teacher; an inner ``use`` puts back, bit for bit, what
    the outer one had. **Outside**, the last teacher stays: taking turns costs one copy a turn. **Weights that
    are no teacher's** are saved in host memory and put back by each outermost ``use``, unless they are all
    NaN, as ``build_inference_model`` leaves them: fill weights with NaN after other code, such as
    torch_memory_saver, has dropped their memory.

    **A swap costs** one copy from host memory, queued on the current CUDA stream. Where a teacher was left in
    the model, the CPU first waits for a checksum, which tells whether other code has loaded weights since.
    Parameters and persistent buffers are swapped, but no ``_extra_state``. A pool serves one thread.

    Args:
        model: model chunk, or list of chunks, frozen.

    Raises:
        InferenceOnlyError: a parameter requires grad; also later, if it does by then.
        InvalidInputError: a parameter has no plain memory (meta device, quantized tensor classes).
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._chunks = list(as_chunks(model))
        self._teachers: dict[str, HostCopy] = {}
        # Copies of output layers, and the checksums of those that are on the model's device.
        self._heads: dict[HostCopy, tuple[OutputHead | None, list[int] | None]] = {}
        self._in_use: tuple[str, ...] = ()
        self._resident: HostCopy | None = None  # the teacher's copy that the pool has put into the model
        self._partially_written = False  # a copy into the model began and did not end: its weights are a mix
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(module, TURNS_TO_FLOAT32):  # otherwise the first pass does it, in memory that is new
                getattr(module, TURNS_TO_FLOAT32)()
        weights, storages = _layout_of(self._chunks)
        self._expected = {name: weight.to("meta") for name, weight in weights.items()}  # to compare with
        self._sizes = [*map(len, storages)]

    @property
    def names(self) -> list[str]:
        """Names of the teachers, in the order in which they were added."""
        return list(self._teachers)

    def __len__(self) -> int:
        return len(self._teachers)

    def __contains__(self, name: object) -> bool:
        return name in self._teachers

    @property
    def resident(self) -> str | None:
        """The teacher whose weights the model holds; ``None`` if they are no teacher's."""
        resident = self._resident_copy()
        return next((name for name, copy in self._teachers.items() if copy is resident), None)

    def add(self, name: str, source: str | os.PathLike[str] | Callable[[Any], Any] | None = None) -> None:
        """Add a teacher. Afterwards, also if this raises, the model holds the same weights as before.

        A model that held nothing but NaN keeps the new teacher.

        Args:
            name: the name for :meth:`use`.
            source: its weights. ``None``: a copy of those that the model holds now; a path: a checkpoint,
                loaded with ``exact`` on all ranks together; or a function that loads them into the model
                that it gets, and may convert them.

        Raises:
            InvalidInputError: the name is taken, or the model holds no weights, only NaN.
            CheckpointError: the checkpoint cannot be loaded, or is of other names, shapes or dtypes.
        """
        if name in self._teachers:
            raise InvalidInputError(f"there is a teacher {name!r} already: remove it or choose another name.")
        if source is None:
            if not self._holds_weights():
                left = "only NaN or what an interrupted swap left"
                raise InvalidInputError(f"the model holds nothing to add, {left}: pass a source.")
            return self._add_held(name)
        before = self._snapshot()
        self._resident, self._partially_written = None, True
        try:
            if callable(source):
                source(self.model)
            else:
                from .checkpoints.load import load_inference_checkpoint

                load_inference_checkpoint(self.model, source, exact=True)
            self._add_held(name)
        finally:
            if before is not None:
                self._write(before)

    def remove(self, name: str) -> None:
        """Drop a teacher and its host memory. If the model holds its weights they stay, as no teacher's."""
        copy = self._teacher(name)
        if name in self._in_use:
            raise InvalidInputError(f"teacher {name!r} is in use: remove it outside of `use({name!r})`.")
        del self._teachers[name]
        self._heads.pop(copy, None)
        if self._resident is copy:
            self._resident = None

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """Yield the model with the weights of a teacher; not a collective: each rank swaps its own shard."""
        copy = self._teacher(name)
        before, outer = self._snapshot(), self._in_use
        try:
            self._in_use = (*outer, name)
            if copy is not before:
                self._write(copy)
            yield self.model
        finally:
            self._in_use = outer
            is_to_be_put_back = outer or before not in self._teachers.values()
            if before is not None and is_to_be_put_back and before is not self._resident_copy():
                self._write(before)

    def head(self, name: str, device: torch.device | str | None = None) -> OutputHead | None:
        """Return a copy of a teacher's output layer, which stays when another teacher takes the model.

        Call it each time before the head is used: it writes again what the device has dropped meanwhile.

        Args:
            device: where it is kept from the first call on; by default that of the model. From ``"cpu"`` a
                loss copies one tile after the other to the device, where there are at most two.

        Returns:
            This rank's part, ``V / tp * h`` numbers; ``None`` on pipeline stages other than the last.

        Raises:
            InvalidInputError: there is no such teacher, or the output layer is not Megatron's own.
        """
        copy = self._teacher(name)
        head, summed = self._heads.get(copy, (None, None))
        is_damaged = head is not None and summed is not None and checksum(head.tensors) != summed
        if copy not in self._heads or is_damaged:
            from .scoring.forward import output_head

            with self.use(name) as model, torch.no_grad():
                own = output_head(model)
                if own is not None and head is not None:
                    for mine, tensor in zip(head.tensors, own.tensors, strict=True):
                        mine.copy_(tensor)
                elif own is not None:
                    head = own.copied_to(device or own.weight.device)
                    summed = checksum(head.tensors) if head.weight.device == own.weight.device else None
                self._heads[copy] = head, summed
        return head

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights of all teachers, in host memory."""
        return sum(copy.nbytes for copy in self._teachers.values())

    @property
    def head_bytes(self) -> int:
        """Bytes of the output layers that :meth:`head` has copied."""
        return sum(head.nbytes for head, _ in self._heads.values() if head is not None)

    def _teacher(self, name: str) -> HostCopy:
        if name not in self._teachers:
            known = ", ".join(map(repr, self._teachers)) or "none"
            raise InvalidInputError(f"there is no teacher {name!r}. Added so far: {known}.")
        return self._teachers[name]

    def _storages(self) -> list[torch.Tensor]:
        """Return where the weights are now; the model must be as it was when the pool was made."""
        weights, storages = _layout_of(self._chunks)
        difference = describe(differences(weights, self._expected, "the changed model"))
        if not difference and [*map(len, storages)] != self._sizes:
            difference = "other weights share memory"
        if difference:
            raise InvalidInputError(f"the model is no longer the one the pool was made for: {difference}.")
        return storages

    def _holds_weights(self) -> bool:
        """Return whether there are weights that would be lost: neither a mix nor NaN throughout."""
        return not self._partially_written and not all(
            parameter.is_floating_point() and parameter.element_size() > 1 and bool(parameter.isnan().all())
            for chunk in self._chunks
            for parameter in chunk.parameters()
        )

    def _resident_copy(self) -> HostCopy | None:
        """Return the teacher's copy that the model holds, unless its weights have been changed since."""
        # Version counters would not see what is written by way of ``.data``, which many loaders do.
        if self._resident is not None and checksum(self._storages()) != self._resident.checksum:
            self._resident = None
        return self._resident

    def _snapshot(self) -> HostCopy | None:
        """Return a host copy of the current weights; ``None`` if they are all NaN or partially written."""
        resident = self._resident_copy()
        if resident is None and self._holds_weights():
            return HostCopy(self._storages())
        return resident

    def _add_held(self, name: str) -> None:
        self._teachers[name] = self._resident = HostCopy(self._storages())
        self._partially_written = False

    def _write(self, copy: HostCopy) -> None:
        storages = self._storages()
        # Ctrl-C, for one, can end a copy early.
        self._resident, self._partially_written = None, True
        copy.copy_to(storages)
        self._resident = copy if copy in self._teachers.values() else None
        self._partially_written = False


# --- weights as bytes, on the device and in host memory


def _layout_of(chunks: Sequence[torch.nn.Module]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the weights of a model by name, and each storage once, as uint8 ``[bytes]``.

    Weights that an optimizer overwrites, and those without plain memory, are refused.
    """
    weights = dict(named_weights(chunks))
    storages: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        reason = "requires grad" if weight.requires_grad else ""
        remedy = "Freeze it (requires_grad_(False))"
        if hasattr(weight, "main_param"):
            reason = "has a main parameter"
            remedy = "If its optimizer is gone, delete that attribute, main_param"
        if reason:
            raise InferenceOnlyError(
                f"{name} {reason}: a pool overwrites the weights of its model, which must be one that "
                f"does not train. {remedy}, or pass a model of its own."
            )
        if weight.numel() == 0:
            continue
        try:
            address = weight.untyped_storage().data_ptr()
        except RuntimeError:  # tensor classes that wrap others
            address = 0
        if address == 0:
            raise InvalidInputError(
                f"{name} ({type(weight).__name__} on {weight.device}) has no plain memory to copy: a pool "
                "takes models on real devices, without quantized weights."
            )
        if address not in storages:
            empty = torch.empty(0, dtype=torch.uint8, device=weight.device)
            storages[address] = empty.set_(weight.untyped_storage())
    return weights, [*storages.values()]


class HostCopy:
    """A copy of a model's weights in host memory; it does not change."""

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        gpus = {storage.device for storage in storages if storage.is_cuda}
        self.nbytes = sum(map(len, storages))
        self.checksum = checksum(storages)
        sizes = [min(_BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, _BLOCK_BYTES)]
        how: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": bool(gpus)}
        self._blocks = [torch.empty(size, **how) for size in sizes]
        for storage, block in _aligned(storages, self._blocks):
            block.copy_(storage, non_blocking=True)
        for gpu in gpus:  # when this returns the copy is complete
            torch.cuda.current_stream(gpu).synchronize()

    def copy_to(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy back, asynchronously on CUDA, into storages as large as those that were copied."""
        for storage, block in _aligned(storages, self._blocks):
            storage.copy_(block, non_blocking=True)


def _aligned(
    storages: Iterable[torch.Tensor], blocks: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same bytes of both, in pieces that end where a storage or a block ends."""
    remaining = iter(blocks)
    block = torch.empty(0, dtype=torch.uint8)
    for storage in storages:
        while len(storage):
            block = block if len(block) else next(remaining)
            size = min(len(storage), len(block))
            yield storage[:size], block[:size]
            storage, block = storage[size:], block[size:]
