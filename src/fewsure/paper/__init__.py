"""The paper's published values, kept as cited data, to stand beside ours."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def toy_table() -> dict[str, Any]:
    """The appendix tables of the toy experiments, by family; each value with the paper's printed plus-minus."""
    return json.loads(files("fewsure.paper").joinpath("toys.json").read_text())


def published(
    dataset: str, method: str, rank: int | None, condition: str, metric: str, *, way: int, shot: int
) -> tuple[float, float] | None:
    """The paper's value and its plus-minus, where it printed one for this way and shot.

    >>> published("moons", "protomahalanobis", 4, "id", "accuracy", way=2, shot=5)
    (96.9, 1.15)
    """
    table = toy_table().get(dataset)
    if not isinstance(table, dict) or (table["way"], table["shot"]) != (way, shot):
        return None
    for row in table["rows"]:
        if row["method"] == method and row["rank"] == rank and f"{condition}/{metric}" in row:
            value, spread = row[f"{condition}/{metric}"]
            return value, spread
    return None


def id_ece(dataset: str, *, way: int, shot: int) -> float | None:
    """The ID ECE that the paper's method had on a data set (rank 4 stands for all): the target of the second T."""
    value = published(dataset, "protomahalanobis", 4, "id", "ece", way=way, shot=shot)
    return None if value is None else value[0]
