"""The frontier: what each rule pays on the task's own classes for less confidence on strangers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewsure.report.drawing import GLYPHS, MARKERS, log_axis, rule_style, svg
from fewsure.report.parts import Key, Panel, Panels, Part, Section, Table
from fewsure.report.runs import EvaluatedRun, Group, place
from fewsure.rules import RULES
from fewsure.tables import label

#: A rule's own parameter, along which its curve runs, and how a table writes it.
PARAMETER = {"softmax": ("temperature", "T"), "logit-normal": ("temperature", "T"), "open-set": ("pi", "π")}
AXES = {"id_ece": "ID ECE", "id_nll": "ID NLL"}
METRICS = {"id_nll": 3, "id_ece": 2, "id_ece_episode": 2, "ood_ece": 1, "ood_open_score": 3}


@dataclass(frozen=True)
class Point:
    """A setting of a rule, averaged over seeds."""

    rule: str
    setting: str
    headline: bool
    fitted_on: str | None
    parameters: tuple[float, ...]  # of each seed
    values: dict[str, float]  # NaN where a metric is undefined

    @property
    def described(self) -> str:
        """The parameter, or its range over the seeds."""
        low, high = f"{min(self.parameters):.3g}", f"{max(self.parameters):.3g}"
        return f"{PARAMETER[self.rule][1]} = {low if low == high else f'{low} to {high}'}"


def section(groups: Sequence[Group]) -> Section:
    """Both frontiers of every group, and the numbers of every fitted setting."""
    models = sorted({model for group in groups for model in group.models}, key=place)
    signs = {model: index % len(MARKERS) for index, model in enumerate(models)}
    parts = []
    for group in groups:
        found = {model: mean_points(runs) for model, runs in group.models.items()}
        panels = []
        for key, name in AXES.items():
            figure = Figure(figsize=(4.4, 3.4), layout="constrained")
            axes = figure.add_subplot(xlabel=name, ylabel="OOD ECE")
            for model, points in found.items():
                _draw(axes, points, key, MARKERS[signs[model]])
            axes.set(xscale="log", ylim=(0, None))
            log_axis(axes.xaxis)
            told = f"{name} against OOD ECE of every rule and method on {group.dataset}; its numbers are in the table"
            panels.append(Panel(svg(figure, told), f"{name} against OOD ECE"))
        parts.append(Part(group.title, images=[Panels("", panels, "large")]))
        parts.append(Part(tables=[_table(group, found)], summary=f"{group.title}: the numbers of every fitted setting"))
    lead = (
        "Down and to the left is better. Lines follow a rule's own parameter: T of the logit-normal rule, the prior "
        "share of strangers π of the open-set rule. Signs are fitted settings, filled where the setting is the rule's "
        "headline; all are means over seeds. Lines of one colour lying together say that the rule decides; lines "
        "of one colour lying apart say that the method does.",
        "OOD ECE here is read on a subset of each task's strangers, as many rules are asked, so it may differ slightly "
        "from the tables'. A low OOD ECE at a given ID ECE alone can be had by a hard threshold, which pays for it in "
        "NLL: read both figures.",
    )
    rules = [Key(2 * rule_style(rule).line_glyph, rule, rule_style(rule).colour) for rule in RULES]
    legend = [*rules, *(Key(GLYPHS[sign], label(*model)) for model, sign in signs.items())]
    return Section("frontier", "The frontier", lead, parts, legend)


def mean_points(runs: Sequence[EvaluatedRun]) -> list[Point]:
    """The points of several seeds, averaged where rule and setting agree (and, on a curve, the parameter)."""
    headlines = {(fitted.rule.name, fitted.setting) for run in runs for fitted in run.rules if fitted.headline}
    same: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for point in run.points:
            place = _parameter(point) if point["setting"] == "curve" else None
            same.setdefault((point["rule"], point["setting"], place), []).append(point)
    return [
        Point(
            rule,
            setting,
            (rule, setting) in headlines,
            points[0]["fitted_on"],
            tuple(_parameter(point) for point in points),
            {key: _mean([point[key] for point in points]) for key in METRICS},
        )
        for (rule, setting, _), points in same.items()
    ]


def _parameter(point: dict[str, Any]) -> float:
    name, _ = PARAMETER[point["rule"]]
    return point["rule_params"][name]


def _mean(values: Sequence[float | None]) -> float:
    return fmean(math.nan if value is None else value for value in values)


def _draw(axes: Axes, points: Sequence[Point], key: str, marker: str) -> None:
    for rule in RULES:
        style = rule_style(rule)
        curve = sorted((p for p in points if p.rule == rule and p.setting == "curve"), key=lambda p: p.parameters)
        if curve:
            axes.plot(
                [p.values[key] for p in curve], [p.values["ood_ece"] for p in curve],
                style.dashes, color=style.colour, linewidth=1, alpha=0.8,
            )  # fmt: skip
        for point in points:
            if point.rule == rule and point.setting != "curve":
                face = style.colour if point.headline else "none"
                axes.plot([point.values[key]], [point.values["ood_ece"]], marker, color=style.colour, mfc=face, ms=5)


def _table(group: Group, found: dict[Any, list[Point]]) -> Table:
    head = ["method", "rule", "setting", "strangers seen", "parameter", "ID NLL", "ID ECE", "ID ECE, per episode"]
    rows = [
        [label(*model), point.rule, point.setting, point.fitted_on or "none", point.described]
        + ["–" if math.isnan(value := point.values[key]) else f"{value:.{digits}f}" for key, digits in METRICS.items()]
        for model, points in found.items()
        for point in points
        if point.setting != "curve"
    ]
    return Table(f"{group.title}: fitted settings, means over seeds", [*head, "OOD ECE", "open score"], rows)
