"""Result rows to tables: a cell is a mean over seeds with its interval, beside the paper's value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fewsure.paper import published

Row = dict[str, Any]
Column = tuple[str, str, str, str, int]
#: Quantiles of Student's t at 97.5 %, for 1, 2, ... degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: The toy table's columns: heading, rule ("paper": the method's rule in the paper), condition, metric, digits.
COLUMNS: tuple[Column, ...] = (
    ("accuracy", "paper", "id", "accuracy", 2),
    ("NLL", "paper", "id", "nll", 3),
    ("ID ECE", "paper", "id", "ece", 2),
    ("ID ECE, per episode", "paper", "id", "ece_episode", 2),
    ("OOD ECE", "paper", "ood", "ece", 1),
    ("AUROC", "paper", "ood", "auroc", 3),
    ("open-set: NLL", "open-set", "id", "nll", 3),
    ("open-set: ID ECE", "open-set", "id", "ece", 2),
    ("open-set: OOD ECE", "open-set", "ood", "ece", 1),
    ("OpenAUC", "open-set", "ood", "openauc", 3),
    ("open score", "open-set", "ood", "open_score", 3),
)


@dataclass(frozen=True)
class Cell:
    """A mean over seeds; the interval is Student's t over seeds, or, of a single seed, over its episodes."""

    value: float
    low: float
    high: float
    seeds: int
    paper: tuple[float, float] | None = None  # the published value and the plus-minus printed with it

    def text(self, digits: int) -> str:
        shown = f"{self.value:.{digits}f} ± {(self.high - self.low) / 2:.{digits}f}"
        return shown if self.paper is None else f"{shown} ({self.paper[0]:.{digits}f} ± {self.paper[1]:.{digits}f})"


def student_t(degrees: int) -> float:
    """The quantile of Student's t at 97.5 %: of the table, or by the expansion of Cornish and Fisher.

    >>> round(student_t(2), 3), round(student_t(30), 3)
    (4.303, 2.042)
    """
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def paper_rule(method: str) -> str:
    """The rule that the paper gives a method: ours the logit-normal, the baselines softmax with temperature."""
    return "logit-normal" if method == "protomahalanobis" else "softmax"


def label(method: str, rank: int | None) -> str:
    """A method as a table names it.

    >>> label("protomahalanobis", 0), label("protonet", None)
    ('protomahalanobis diag', 'protonet')
    """
    return method if rank is None else f"{method} {'diag' if rank == 0 else f'rank {rank}'}"


def models(rows: Iterable[Row]) -> list[tuple[str, int | None]]:
    """The methods in the rows, with their ranks, in order of appearance."""
    return list(dict.fromkeys((row["method"], row["rank"]) for row in rows))


def cell(
    rows: Sequence[Row], dataset: str, model: tuple[str, int | None], rule: str, condition: str, metric: str
) -> Cell | None:
    """One cell, or None where no run has the value."""
    method, rank = model
    asked = paper_rule(method) if rule == "paper" else rule
    wanted = {
        "dataset": dataset,
        "method": method,
        "rank": rank,
        "rule": asked,
        "condition": condition,
        "metric": metric,
    }
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        return None
    # The paper does not say how it pools its ECE: its one figure stands beside both of ours.
    printed = "ece" if metric == "ece_episode" else metric
    protocol = {key: found[0][key] for key in ("way", "shot")}
    paper = published(dataset, method, rank, condition, printed, **protocol) if rule == "paper" else None
    if len(found) == 1:
        return Cell(found[0]["value"], found[0]["low"], found[0]["high"], 1, paper)
    mean, low, high = over_seeds([row["value"] for row in found])
    return Cell(mean, low, high, len(found), paper)


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of several seeds' values, and Student's 95 % interval."""
    mean = statistics.fmean(values)
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def markdown(rows: Sequence[Row], dataset: str, columns: Sequence[Column] = COLUMNS) -> str:
    """A data set's table: ours, and in brackets the paper's."""
    lines = ["| | " + " | ".join(name for name, *_ in columns) + " |", "|---|" + "---|" * len(columns)]
    for model in models(row for row in rows if row["dataset"] == dataset):
        cells = (cell(rows, dataset, model, *column[1:4]) for column in columns)
        texts = ("" if c is None else c.text(column[4]) for c, column in zip(cells, columns, strict=True))
        lines.append(f"| {label(*model)} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
