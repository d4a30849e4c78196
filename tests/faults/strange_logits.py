"""Logits as they should not be: any strides, dtypes and magnitudes, with NaN and infinities in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 31, 32, 33, 64, 257)
SCALES = (0.0, 1e-41, 1e-3, 1.0, 30.0, 6e4, 1e30)
POISONS = (math.nan, math.inf, -math.inf, 0.0, -0.0)

#: How logits of other strides are made of such that own their storage, and a view that loses nothing.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "middle of something": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "one row again and again": lambda x: x[:1].expand(len(x), -1),
}


@dataclass(frozen=True)
class Logits:
    values: Tensor
    strides: str

    def leaf_and_view(self) -> tuple[Tensor, Tensor]:
        """A leaf for the gradient, and logits of these strides made of it."""
        leaf = self.values.clone().requires_grad_()
        return leaf, STRIDES[self.strides](leaf * 1)

    @property
    def seen(self) -> Tensor:
        """What the view shows."""
        return STRIDES[self.strides](self.values)


@st.composite
def strange_logits(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    widths: tuple[int, ...] = WIDTHS,
    strides: tuple[str, ...] = tuple(STRIDES),
) -> Logits:
    rows, width = draw(st.integers(0, 6)), draw(st.sampled_from(widths))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    dtype = draw(st.sampled_from(dtypes))
    # The reference divides float64 by temperatures, which must not overflow.
    largest = min(torch.finfo(dtype).max, 1e100)
    for row in range(rows):
        values[row] *= draw(st.sampled_from(SCALES))
        for value in draw(st.lists(st.sampled_from((*POISONS, largest, -largest)), max_size=2)):
            values[row, draw(st.integers(0, width - 1))] = value
        if draw(st.integers(0, 9)) == 0:
            values[row] = draw(st.sampled_from(POISONS))
    return Logits(
        values.clamp(-largest, largest).where(values.isfinite(), values).to(dtype),
        draw(st.sampled_from(strides)),
    )


@st.composite
def selections(draw: st.DrawFn, rows: int) -> Tensor | slice | None:
    """Which rows of the logits, as the losses take them."""
    kind = draw(st.sampled_from(["all", "slice", "some"]))
    if kind == "all":
        return None
    if kind == "slice":
        return slice(*sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows)))))
    numbers = draw(st.permutations(range(rows)))[: draw(st.integers(0, rows))]
    return torch.tensor(numbers, dtype=torch.int64)


def owns_its_storage(view: Tensor) -> bool:
    """Each byte of it is that of one element."""
    places = torch.arange(len(view))[:, None] * view.stride(0) + torch.arange(view.shape[1]) * view.stride(1)
    return len(places.unique()) * view.element_size() == view.untyped_storage().nbytes()


def agree(found: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float = 1.0) -> bool:
    """NaN and infinities in the same places, everything else within the tolerance of its scale."""
    expected = expected.to(found.dtype).double()
    found = found.detach().double()
    error = torch.where(found == expected, 0.0, (found - expected).abs())
    close = error <= tolerance * (expected.abs() + scale)
    return bool((close | (found.isnan() & expected.isnan())).all())
