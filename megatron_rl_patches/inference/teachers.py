"""Several teachers in the device memory of one: weights wait in host memory and are swapped in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import InferenceOnlyError, InvalidInputError
from ._weights import Image, Layout, all_nan, described, difference, layout_of, named_weights, prefixes

Model = torch.nn.Module | Sequence[torch.nn.Module]
StateDict = Mapping[str, Any]
#: Where a teacher's weights come from; see :meth:`TeacherPool.add`.
Source = str | os.PathLike[str] | StateDict | Sequence[StateDict] | Callable[[Any], Any]


class TeacherPool:
    """Homogeneous teachers that share one inference-only model.

    Device memory is the model's, however many teachers there are; each teacher takes its bytes in host memory
    (pinned if the model is on a GPU). Parameters keep their storages: CUDA graphs stay valid. ::

        pool = TeacherPool(build_inference_model(model_provider, config, dtype="bf16"))
        pool.add("math", "checkpoints/math")
        pool.add("code", "checkpoints/code")
        with pool.use("code") as model:
            scores = forward_log_probs(model, microbatches)

    **Inside** :meth:`use` the model holds the teacher that was asked for; an inner ``use`` puts back, bit for
    bit, what the outer one had. **Outside**, the last teacher stays until another one is asked for, so that
    taking turns costs one copy a turn. Weights that are no teacher's are not lost to that: the outermost
    ``use`` saves them in host memory and puts them back, every time. Give them a name, and it need not. A
    model that is NaN throughout, as it is from ``build_inference_model``, has nothing to lose.

    Swapped are parameters and persistent buffers, not TransformerEngine's ``_extra_state``. A pool serves one
    thread. Change the model's weights by in-place torch functions, as loaders do: the pool takes notice of
    them, and of changes through ``.data`` it does not. Copies are queued on the current CUDA stream, after
    what was computed with the former weights and before what comes next; the host does not wait for them.

    Args:
        model: model chunk, or list of chunks, frozen.

    Raises:
        InferenceOnlyError: a parameter requires grad; also later, if it does by then.
        InvalidInputError: a parameter has no plain memory (meta device, quantized tensor classes).
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._teachers: dict[str, Image] = {}
        self._in_use: tuple[str, ...] = ()
        # What the model held when its tensors had these versions; None: weights of no teacher.
        self._held: Image | None = None
        self._versions: list[int] = []
        # A copy into the model began and did not end: what it holds is worth nothing.
        self._torn = False
        self._described: tuple[dict[str, str], list[int]] | None = None
        self._survey()

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
        held = self._holding()
        return next((name for name, image in self._teachers.items() if image is held), None)

    @property
    def host_bytes(self) -> int:
        """Host memory of all teachers together, on this rank."""
        return sum(image.nbytes for image in set(self._teachers.values()))

    def add(self, name: str, source: Source | None = None) -> None:
        """Add a teacher. Afterwards, also when this raises, the model holds the same weights as before.

        A model that held nothing but NaN keeps the new teacher.

        Args:
            name: how to ask for it.
            source: its weights:

                * ``None``: those that the model holds now;
                * a path: a checkpoint, read by
                  :func:`~megatron_rl_patches.inference.load_inference_checkpoint` with ``exact`` on all ranks
                  together;
                * a state dict of the chunk, as ``chunk.state_dict()`` returns it, or one per chunk;
                * a function that is given the model and loads weights into it, converting what it likes.

        Raises:
            InvalidInputError: the name is taken; weights differ in name, shape or dtype; the model holds
                none that could be added.
            CheckpointError: the checkpoint cannot be loaded, or is of other names, shapes or dtypes.
        """
        if name in self._teachers:
            raise InvalidInputError(
                f"there is a teacher {name!r} already: remove it first, or choose another name."
            )
        if source is None:
            image = self._worth_keeping()
            if image is None:
                raise InvalidInputError(
                    "the model holds nothing to add, only NaN or what an interrupted swap left: load weights."
                )
            self._teachers[name] = image
            self._hold(image)
            return
        load = self._loader(source)
        before = self._worth_keeping()
        self._held, self._torn = None, True
        try:
            load(self.model)
            self._teachers[name] = image = Image(self._survey().storages)
            self._hold(image)
        finally:
            if before is not None:
                self._swap(before)

    def remove(self, name: str) -> None:
        """Drop a teacher and its host memory. If the model holds its weights they stay, as no teacher's.

        Raises:
            InvalidInputError: there is no such teacher, or it is in use.
        """
        image = self._teacher(name)
        if name in self._in_use:
            raise InvalidInputError(f"teacher {name!r} is in use: remove it outside of `use({name!r})`.")
        del self._teachers[name]
        if image not in self._teachers.values() and self._held is image:
            self._held = None

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """The model with the weights of a teacher; nothing is copied if it holds them already.

        Not a collective: each rank swaps its own shard.

        Raises:
            InvalidInputError: there is no such teacher.
        """
        image = self._teacher(name)
        before = self._worth_keeping()
        outer = self._in_use
        try:
            self._in_use = (*outer, name)
            self._swap(image)
            yield self.model
        finally:
            self._in_use = outer
            if before is not None and (outer or before not in self._teachers.values()):
                self._swap(before)

    def _teacher(self, name: str) -> Image:
        if name not in self._teachers:
            known = ", ".join(map(repr, self._teachers)) or "none"
            raise InvalidInputError(f"there is no teacher {name!r}. Added so far: {known}.")
        return self._teachers[name]

    def _survey(self) -> Layout:
        """The model as it is now, which must be frozen, and as it was when the pool was made."""
        for name, weight in named_weights(self._chunks):
            if weight.requires_grad:
                raise InferenceOnlyError(
                    f"{name} requires grad: a pool overwrites the weights of its model, which must be one "
                    "that does not train. Freeze it (requires_grad_(False)), or give the pool its own."
                )
        layout = layout_of(self._chunks)
        sizes = [len(storage) for storage in layout.storages]
        self._described = self._described or (layout.description, sizes)
        if (layout.description, sizes) != self._described:
            found = difference(layout.description, self._described[0]) or "other weights share memory"
            raise InvalidInputError(f"the model is no longer the one that this pool was made for: {found}.")
        return layout

    def _holding(self) -> Image | None:
        """The image that the model holds, unless somebody has changed its weights since."""
        if self._held is not None and self._survey().versions != self._versions:
            self._held = None
        return self._held

    def _worth_keeping(self) -> Image | None:
        """What the model holds, saved for now if it is no teacher's; ``None`` if it is worth nothing."""
        held = self._holding()
        if held is None and not self._torn and not all_nan(self._chunks):
            return Image(self._survey().storages)
        return held

    def _hold(self, image: Image) -> None:
        self._held = image if image in self._teachers.values() else None
        self._versions = self._survey().versions
        self._torn = False

    def _swap(self, image: Image) -> None:
        if self._holding() is image:
            return
        storages = self._survey().storages
        # Ctrl-C, for one, can end a copy early.
        self._held, self._torn = None, True
        image.copy_to(storages)
        self._hold(image)

    def _loader(self, source: Source) -> Callable[[Any], Any]:
        if isinstance(source, (str, os.PathLike)):
            from .checkpoint import load_inference_checkpoint

            path = source
            return lambda model: load_inference_checkpoint(model, path, exact=True)
        if callable(source):
            return source
        states = [source] if isinstance(source, Mapping) else list(source)
        if len(states) != len(self._chunks):
            raise InvalidInputError(
                f"{len(states)} state dicts for {len(self._chunks)} model chunks: give one each."
            )
        weights = {
            prefix + name: weight
            for prefix, state in zip(prefixes(len(states)), states, strict=True)
            for name, weight in state.items()
            if isinstance(weight, torch.Tensor) and not name.endswith("_extra_state")
        }
        if found := difference(described(weights.items()), self._survey().description):
            raise InvalidInputError(f"the state dict is of another model: {found}.")

        def load(model: Any) -> None:
            with torch.no_grad():
                for name, weight in named_weights(self._chunks):
                    weight.copy_(weights[name])

        return load
