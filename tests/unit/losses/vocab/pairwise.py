"""Tables of test cases in which every pair of values of any two options occurs."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return a few dozen choices of one value per option, the same in every run."""
    choose = random.Random(0)
    uncovered = {
        (a, i, b, j)
        for a, b in combinations(options, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    cases = []
    while uncovered:
        candidates = [
            {name: choose.randrange(len(values)) for name, values in options.items()} for _ in range(60)
        ]
        best = max(candidates, key=lambda case: len(_pairs(case) & uncovered))
        if _pairs(best) & uncovered:
            uncovered -= _pairs(best)
            cases.append({name: options[name][i] for name, i in best.items()})
    return cases


def _pairs(case: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}
