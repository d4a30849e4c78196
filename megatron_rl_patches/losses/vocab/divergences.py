"""Divergences of a student's distribution from a teacher's: what a column adds, and its derivative.

A column is an id of the vocabulary, or one of the k + 1 buckets of a top-k, whose last one is the tail. To
add a divergence, write a class here, and its name into :data:`DivergenceName`. With the probabilities ``p``
of the student, ``q`` of the teacher, ``p_old`` of the policy that sampled, and ``m = beta q + (1 - beta) p``:

==================================  ==========================================  ================
``reverse_kl``                      sum p (log p - log q)                       arXiv 2601.19897
``forward_kl``                      sum q (log q - log p)                       arXiv 1503.02531
``jensen_shannon``                  beta KL(q, m) + (1 - beta) KL(p, m)         arXiv 2306.13649
``skewed_forward_kl``               sum q (log q - log m)                       arXiv 2402.03898
``skewed_reverse_kl``               sum p (log p - log m)                       arXiv 2402.03898
``generalized_kl``                  sum p (log p - log q) - p + q, no tail      arXiv 2606.30406
``importance_weighted_reverse_kl``  sum p (log p_old - log q)                   slime#2033
==================================  ==========================================  ================

Each column adds ``p log(p / q) - p + q``, which is never negative, and zero where both have the same bits;
the added terms cancel in the sum. It is computed from the difference of the logits, so that a divergence has
correct digits where student and teacher are nearly the same. The gradient there is a small difference of
log-probabilities. The rounding of the normalizers is not small next to it, but moves all columns of a row
alike. So the sum over the row, which the gradient subtracts, is that of the same rounded numbers: the second
value of :meth:`Divergence.terms`. It also tells :meth:`Divergence.without_rounding` what the rounding added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .arguments import is_number
from .softmax import LOG2_E, sum_of_columns

DivergenceName = Literal[
    "reverse_kl",
    "forward_kl",
    "jensen_shannon",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "generalized_kl",
    "importance_weighted_reverse_kl",
]

DIVERGENCES: dict[str, type[Divergence]] = {}
#: A log-probability below so many nats, such as -inf, counts as so many.
RULED_OUT = -1e4
# Below this gap, log(p / q) + q / p - 1 is a sum of powers; its relative error is then 1e-7.
_SMALL_GAP = 0.25
_MINUS_INF = float("-inf")
_STRETCH = 256  # columns of a row that plain operators sum up in float32


class Normalizer(NamedTuple):
    """The normalizer of ``x``, which is that of ``x / scale`` times the scale, in the dtype of ``x``.

    To subtract ``rounded`` and ``remainder`` one after the other leaves an error relative to the result.
    """

    rounded: Tensor
    remainder: Tensor  # what is lost by rounding
    least: Tensor  # the least x that is not ruled out

    @classmethod
    def of(cls, exact: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Normalizer:
        """Return values ``[..., 1]`` from the normalizer of ``x / scale``, ``[...]`` in float64."""
        exact = exact.where(exact != _MINUS_INF, 0.0)[..., None]
        exact, least = (exact, RULED_OUT) if scale is None else (exact * scale, RULED_OUT * scale)
        rounded = exact.to(dtype)
        return cls(rounded, (exact - rounded).to(dtype), (exact + least).to(dtype))


class Compared:
    """The student and the teacher at some columns; all tensors are ``[..., w]``.

    ``gap`` is ``log p - log q``, exactly zero where both have the same bits, and ``old_gap`` is the same of
    the old policy, if there is one.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        normalizers: Iterable[Normalizer],
        log_weights: Sequence[Tensor | float] = (0.0,),
        scale: Tensor | None = None,
    ) -> None:
        """Compare the student, which comes first, with a mixture of teachers; the old policy may follow.

        It is ``log p = (x - normalizer) / scale``, where ``None`` stands for 1. To divide ``x`` itself would
        add a rounding error, next to which a gap may be small.
        """
        self._scale = scale
        self._p: Tensor | None = None
        self._q: Tensor | None = None
        bounded = [(torch.maximum(x, z.least), z) for x, z in zip(xs, normalizers, strict=True)]
        teachers, old = bounded[1 : 1 + len(log_weights)], bounded[1 + len(log_weights) :]
        self._student, self._teacher = bounded[0], teachers[0]
        if len(teachers) > 1:
            pairs = zip(teachers, log_weights, strict=True)
            log_q = reduce(torch.logaddexp, [self._scaled_(_shifted(*x)) + weight for x, weight in pairs])
            zero = torch.zeros_like(self._student[1].rounded)
            self._teacher = log_q if scale is None else log_q * scale, Normalizer(zero, zero, zero)
        self.gap, *old_gaps = [self._minus_teacher(*side) for side in (self._student, *old)]
        self.old_gap = old_gaps[0] if old_gaps else None

    def _minus_teacher(self, x: Tensor, normalizer: Normalizer) -> Tensor:
        teacher_x, teachers = self._teacher
        # Rounding the difference of the normalizers moves all columns of a row alike, as said above.
        rounded, remainder = normalizer.rounded - teachers.rounded, normalizer.remainder - teachers.remainder
        return self._scaled_((x - teacher_x).sub_(rounded).sub_(remainder))

    def _scaled_(self, difference: Tensor) -> Tensor:
        return difference if self._scale is None else difference.div_(self._scale)

    @property
    def are_ruled_out(self) -> Tensor:
        """Whether the student's log-probability is a constant, :data:`RULED_OUT`."""
        x, normalizer = self._student
        return x == normalizer.least

    # The compiler does not know functools.cached_property, which has a lock.
    @property
    def p(self) -> Tensor:
        """The student's probabilities."""
        self._p = _exp(_shifted(*self._student), self._scale) if self._p is None else self._p
        return self._p

    @property
    def q(self) -> Tensor:
        """The teacher's probabilities, which most gradients do not need."""
        self._q = _exp(_shifted(*self._teacher), self._scale) if self._q is None else self._q
        return self._q

    def middle(self, beta: Tensor | float) -> Tensor:
        """Return ``m = beta q + (1 - beta) p``."""
        return self.p + beta * (self.q - self.p)

    def gaps_to_middle(self, beta: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return ``log p - log m`` and ``log q - log m``."""
        # log m is log p + log1p(beta (q / p - 1)), and log q + log1p((1 - beta) (p / q - 1)).
        by_q = _is_positive(-1.0 - self.gap)
        ratio_minus_1 = _expm1_(self.gap * (2.0 * by_q - 1.0))
        to_middle = (ratio_minus_1 * (by_q * (1.0 - 2.0 * beta) + beta)).log1p_()
        return (self.gap * by_q).sub_(to_middle), (self.gap * (by_q - 1.0)).sub_(to_middle)


@dataclass(eq=False)
class Divergence:
    """A divergence; a class for each name, with :meth:`terms`, and :meth:`slope` or :meth:`derivative`."""

    needs_old: ClassVar[bool] = False  # it compares with the policy that sampled, too
    needs_normalizers: ClassVar[bool] = False  # parts do not add up to it, so a first pass finds masses
    covers_mass: ClassVar[bool] = False  # at p = 0 its derivative is not zero; its second term is p - q
    counts_tail: ClassVar[bool] = True  # the bucket of all other ids adds to it; False: it is over k ids only
    beta: Tensor | float  # weight of the teacher in m; a tensor without dimensions for a compiled function

    def __init_subclass__(cls, name: str | None = None) -> None:
        if name is not None:
            DIVERGENCES[name] = cls

    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        """Return what each column adds to the divergence, and ``p * slope``, see :meth:`derivative`."""
        raise NotImplementedError

    def slope(self, compared: Compared) -> Tensor:
        """Return the derivative by ``p``, up to a constant of the row; it is finite for gaps of up to 1e4."""
        raise NotImplementedError

    def derivative(self, compared: Compared, expected: Tensor | float) -> Tensor:
        """Return the derivative of the divergence by the student's ``x``, ``[b, w]``.

        ``expected`` ``[b, 1]``, the sum of the second value of :meth:`terms` over all columns, lets the
        derivatives of a row add up to zero; it is 0 for the derivative by log-probabilities.
        """
        return compared.p * (self.slope(compared) - expected)

    def weights(self, compared: Compared) -> Tensor:
        """Return the weight of each part; their weighted sum and the terms of masses are the divergence."""
        return compared.p

    def without_rounding(self, value: Tensor, expected: Tensor) -> Tensor:
        """Return the sum of the first terms without what the rounding of normalizers has added."""
        return value


class ReverseKL(Divergence, name="reverse_kl"):
    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        return _relative_entropy(compared.p, compared.q, compared.gap)

    def slope(self, compared: Compared) -> Tensor:
        return compared.gap

    def without_rounding(self, value: Tensor, expected: Tensor) -> Tensor:
        return _without_square(value, expected - value)  # the sum of p - q


class GeneralizedKL(ReverseKL, name="generalized_kl"):
    counts_tail = False


class ForwardKL(Divergence, name="forward_kl"):
    covers_mass = True

    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        value, negative = _relative_entropy(compared.q, compared.p, -compared.gap)
        return value, value - negative  # q (exp(gap) - 1), which is p - q

    def derivative(self, compared: Compared, expected: Tensor | float) -> Tensor:
        p, gap = compared.p, compared.gap
        near = -p * _expm1_((-gap).clamp_(max=1.0))  # p - q, with correct digits where the gap is small
        return near.lerp_(p - compared.q, _is_positive(gap.abs().sub_(_SMALL_GAP))).sub_(p * expected)

    def weights(self, compared: Compared) -> Tensor:
        return compared.q

    def without_rounding(self, value: Tensor, expected: Tensor) -> Tensor:
        return _without_square(value, expected)


class JensenShannon(Divergence, name="jensen_shannon"):
    needs_normalizers = True

    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        gap, teacher_gap = compared.gaps_to_middle(self.beta)
        middle = compared.middle(self.beta)
        teacher_part, _ = _relative_entropy(compared.q, middle, teacher_gap)
        student_part, expected = _relative_entropy(compared.p, middle, gap)
        return student_part.lerp_(teacher_part, self.beta), (1.0 - self.beta) * expected

    def slope(self, compared: Compared) -> Tensor:
        return (1.0 - self.beta) * compared.gaps_to_middle(self.beta)[0]


class _Skewed(Divergence):
    needs_normalizers = True
    side: ClassVar[int]  # which of student and teacher is compared with the middle

    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        gap = compared.gaps_to_middle(self.beta)[self.side]
        value, _ = _relative_entropy((compared.p, compared.q)[self.side], compared.middle(self.beta), gap)
        return value, compared.p * self._slope(gap)

    def slope(self, compared: Compared) -> Tensor:
        return self._slope(compared.gaps_to_middle(self.beta)[self.side])

    def _slope(self, gap: Tensor) -> Tensor:
        raise NotImplementedError


class SkewedForwardKL(_Skewed, name="skewed_forward_kl"):
    side = 1

    def _slope(self, gap: Tensor) -> Tensor:
        return (self.beta - 1.0) * _expm1_(gap)  # (1 - beta) (1 - q / m)


class SkewedReverseKL(_Skewed, name="skewed_reverse_kl"):
    side = 0

    def _slope(self, gap: Tensor) -> Tensor:
        return gap - (1.0 - self.beta) * _expm1_(gap.clone())  # log (p / m) - (1 - beta) (p / m - 1)


class ImportanceWeightedReverseKL(Divergence, name="importance_weighted_reverse_kl"):
    needs_old = True

    def terms(self, compared: Compared) -> tuple[Tensor, Tensor]:
        value = compared.p * self.slope(compared)
        return value, value

    def slope(self, compared: Compared) -> Tensor:
        assert compared.old_gap is not None
        return compared.old_gap


def divergence_named(name: str, beta: float = 0.5) -> Divergence:
    """Return a divergence.

    Raises:
        InvalidInputError: there is none of this name, or ``beta`` is not between 0 and 1.
    """
    if not isinstance(name, str) or name not in DIVERGENCES:
        raise InvalidInputError(f"divergence must be one of {tuple(DIVERGENCES)}, not {name!r}")
    if not (is_number(beta) and 0 < beta < 1):
        raise InvalidInputError(
            f"beta is {beta}, expected a number between 0 and 1; at the ends the divergence is zero: use "
            "forward_kl for 0, reverse_kl for 1"
        )
    return DIVERGENCES[name](float(beta))


def _relative_entropy(p: Tensor, q: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``p gap - p + q``, with correct digits near zero too, and ``p gap``, where gap is log(p / q)."""
    terms = 11 if p.dtype == torch.float64 else 6
    small = gap.clamp(-_SMALL_GAP, _SMALL_GAP)
    # gap + exp(-gap) - 1 = gap^2 / 2 - gap^3 / 6 + gap^4 / 24 - ...
    series = torch.full_like(gap, (-1.0) ** (terms - 1) / math.factorial(terms + 1))
    for k in range(terms - 2, -1, -1):
        series = series.mul_(small).add_((-1.0) ** k / math.factorial(k + 2))
    near = series.mul_(small).mul_(small).mul_(p)
    weighted = p * gap
    return near.lerp_(weighted + (q - p), _is_positive(gap.abs().sub_(_SMALL_GAP))), weighted


def _expm1_(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1``, with correct digits near zero too; ``x`` is overwritten."""
    if not torch.compiler.is_compiling():
        return x.expm1_()
    # On a CPU the compiler replaces expm1(x) by exp(x) - 1, which has no correct digits near zero.
    half = 0.5 * x.clamp(min=-80.0)
    return 2.0 * _exp(half) * half.sinh()


def _shifted(x: Tensor, normalizer: Normalizer) -> Tensor:
    return (x - normalizer.rounded).sub_(normalizer.remainder)


def _exp(z: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return ``exp(z / scale)``, as :func:`.softmax.exp` computes it."""
    return (z * (LOG2_E if scale is None else LOG2_E / scale)).exp2_()


def _without_square(value: Tensor, off: Tensor) -> Tensor:
    """Subtract what normalizers that are off by ``off`` together add to a Kullback-Leibler divergence."""
    return (value - 0.5 * off**2).clamp(min=0.0)


def _is_positive(x: Tensor) -> Tensor:
    """Return 1 where ``x`` is positive, and 0 elsewhere; ``x`` is overwritten.

    Numbers choose between two tensors in a tenth of the time of ``torch.where`` on a CPU.
    """
    return x.sign_().clamp_(min=0.0)


# --- sums over columns


def sum_of_rows(x: Tensor) -> Tensor:
    """Return sums over rows ``[b, w]`` or stretches ``[b, stretches, columns]``, in float64."""
    if x.dim() == 3:
        return sum_of_columns(x).double()
    count = x.shape[1] // _STRETCH
    stretch_sums = x[:, : count * _STRETCH].unflatten(1, (count, _STRETCH)).sum(-1)  # type: ignore[no-untyped-call]
    rest = x[:, count * _STRETCH :].sum(1, keepdim=True)
    return torch.cat([stretch_sums, rest], 1).sum(1, dtype=torch.float64)


def log_sum_exp(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``log(sum(exp(x / scale)))`` of rows or stretches, float64."""
    largest = x.amax(-1)
    reference = largest.where(largest != _MINUS_INF, 0.0)
    log_sum = sum_of_rows(_exp(x - reference[..., None], scale)).log()
    return (reference.double() if scale is None else reference.double() / scale) + log_sum
