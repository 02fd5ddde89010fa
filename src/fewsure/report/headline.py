"""The headline tables: every metric of every method, beside the paper's published value, and which ECE it printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from fewsure.report.parts import Entry, Part, Section, Table
from fewsure.report.runs import Group, Model, describe
from fewsure.tables import COLUMNS, cell, label, paper_rule

CONDITIONS = {"id": "ID ECE", "ood": "OOD ECE"}
LEAD = (
    "Each entry is the mean over seeds ± half of a 95 % interval: Student's t over the seeds where a method has "
    "several, otherwise a bootstrap over the test tasks of its one seed. In brackets beneath it, where the "
    "paper printed one, its value with its own ±, whose meaning it does not state.",
    "Columns without a prefix are under the rule that the paper gives the method: the logit-normal rule for "
    "protomahalanobis, softmax with a temperature fitted to convergence for all others. The open-set columns put our "
    "rule on the same models; it has seen strangers when it was fitted, and the paper's rules have not.",
    "Accuracy and ECE are in points, NLL and open score in nats; lower is better for NLL, ECE and open score, higher "
    "for accuracy, AUROC and OpenAUC. ID are queries of the task's own classes, OOD the strangers, whose labels are "
    "drawn at random: there, ECE measures unwarranted confidence.",
)


def section(groups: Sequence[Group]) -> Section:
    """The first section of the page."""
    parts = [Part(group.title, [_protocol(group)], [_table(group), _pooling_table(group)]) for group in groups]
    return Section("results", "Results beside the paper's", (*LEAD, *_verdict(groups)), parts)


def _protocol(group: Group) -> str:
    counts = {
        condition: sorted({row["episodes"] for row in group.rows if row["condition"] == condition})
        for condition in CONDITIONS
    }
    known, strange = (" or ".join(f"{count:,}" for count in found) for found in counts.values())
    kinds = sorted({row["strangers"] for row in group.rows if row["strangers"]})
    shown = f"; {strange} of them are also shown strangers ({', '.join(kinds)})" if strange else ""
    return f"{describe(group.runs[0])}. {known} test tasks a seed{shown}."


def _table(group: Group) -> Table:
    head = ["method", "seeds", *(name for name, *_ in COLUMNS)]
    rows = []
    for model, runs in group.models.items():
        cells = [(cell(group.rows, group.dataset, model, *column[1:4]), column[4]) for column in COLUMNS]
        entries = [
            Entry("–") if found is None else Entry(_with_half(found.value, found.low, found.high, digits),
                                                   _published(found.paper, digits))
            for found, digits in cells
        ]  # fmt: skip
        rows.append([Entry(label(*model), f"{paper_rule(model[0])} in the paper"), str(len(runs)), *entries])
    return Table(f"{group.title}: ours, and in brackets the paper's", head, rows)


def _with_half(value: float, low: float, high: float, digits: int) -> str:
    return f"{value:.{digits}f} ±\u00a0{(high - low) / 2:.{digits}f}"


def _published(paper: tuple[float, float] | None, digits: int) -> str:
    return "" if paper is None else f"({paper[0]:.{digits}f} ±\u00a0{paper[1]:.{digits}f})"


def _eces(group: Group, model: Model, condition: str) -> tuple[float | None, float | None, float | None]:
    """Our ECE pooled and by episode, and the paper's, under the paper's rule."""
    pooled = cell(group.rows, group.dataset, model, "paper", condition, "ece")
    episode = cell(group.rows, group.dataset, model, "paper", condition, "ece_episode")
    paper = None if pooled is None or pooled.paper is None else pooled.paper[0]
    return pooled and pooled.value, episode and episode.value, paper


def _pooling_table(group: Group) -> Table:
    head = ["method"]
    for name in CONDITIONS.values():
        head += [f"{name}, pooled", f"{name}, per episode", f"{name}, paper"]
    rows = []
    for model in group.models:
        eces = (ece for condition in CONDITIONS for ece in _eces(group, model, condition))
        rows.append([label(*model), *("–" if ece is None else f"{ece:.2f}" for ece in eces)])
    return Table(f"{group.title}: the two ways to pool ECE, under the paper's rule", head, rows)


def _verdict(groups: Iterable[Group]) -> list[str]:
    """Which pooling is nearer the paper's figures: computed from the cells that have all three."""
    gaps: dict[str, list[tuple[float, float]]] = {condition: [] for condition in CONDITIONS}
    for group in groups:
        for model in group.models:
            for condition in CONDITIONS:
                pooled, episode, paper = _eces(group, model, condition)
                if pooled is not None and episode is not None and paper is not None:
                    gaps[condition].append((abs(pooled - paper), abs(episode - paper)))
    both = [gap for found in gaps.values() for gap in found]
    if not both:
        return []
    parts = [f"{CONDITIONS[condition]} alone: {_compare(found)}" for condition, found in gaps.items() if found]
    return [
        "The paper does not say whether it pools its ECE over all queries of all tasks or averages the ECE of each "
        f"task. Over the {len(both)} cells with a published value, our mean absolute deviation from it is "
        f"{_compare(both)}. {'; '.join(parts)}."
    ]


def _compare(gaps: Sequence[tuple[float, float]]) -> str:
    pooled, episode = (fmean(column) for column in zip(*gaps, strict=True))
    gap = round(episode - pooled, 2)
    nearer = "per episode is nearer" if gap < 0 else "pooled is nearer" if gap > 0 else "neither is nearer"
    return f"{pooled:.2f} points pooled and {episode:.2f} per episode ({nearer})"
