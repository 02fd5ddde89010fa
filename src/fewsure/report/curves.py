"""Line figures of single methods: reliability diagrams, the choice of T, and training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray as Array

from fewsure.report.drawing import COLOURS, INK, rule_style, svg
from fewsure.report.parts import Key, Panel, Panels, Part, Section, Table
from fewsure.report.runs import EvaluatedRun, Group
from fewsure.rules import RULES, LogitNormal
from fewsure.tables import label

CONDITIONS = {"id": "own classes (ID)", "ood": "strangers (OOD)"}
SEARCHED = {"search-std": "h as deviation", "search-var": "h as variance"}
#: Settings of the logit-normal rule beside the search, as a table heads them.
SETTINGS = {"paper-ece": "T at the paper's ID ECE", "strangers": "T fitted on strangers"}


def rule_legend() -> list[Key]:
    """The sign and colour of every rule."""
    return [Key(rule_style(rule).glyph, rule, rule_style(rule).colour) for rule in RULES]


def reliability_section(groups: Sequence[Group]) -> Section:
    """Accuracy against confidence, with the share of queries at each confidence, summed over seeds."""
    parts = []
    for group in groups:
        panels = [
            Panel(_reliability(runs, f"{group.dataset}, {label(*model)}"), label(*model))
            for model, runs in group.models.items()
        ]
        parts.append(Part(group.title, images=[Panels("", panels)]))
    lead = (
        "Above, accuracy in each bin of confidence: on the diagonal, confidence is right; below it, the rule is "
        "overconfident. Strangers have random labels, so their accuracy is chance at every confidence. Below, the "
        "share of queries in each bin: that of strangers should stand at the left, near 1/N, which no reliability "
        "curve can show. Where the share is next to nothing, the accuracy above it is noise. Queries of all seeds are "
        "counted together.",
    )
    return Section("reliability", "Reliability", lead, parts, rule_legend())


def temperature_section(groups: Sequence[Group]) -> Section | None:
    """How the logit-normal rule's T was chosen on the calibration tasks."""
    parts = []
    for group in groups:
        with_curve = {model: runs for model, runs in group.models.items() if any(run.curve for run in runs)}
        if with_curve:
            panels = [
                Panel(_temperature(runs, f"{group.dataset}, {label(*model)}"), label(*model))
                for model, runs in with_curve.items()
            ]
            rows = [[label(*model), *_searched(runs)] for model, runs in with_curve.items()]
            head = ["method", *(f"searched T, {how}" for how in SEARCHED.values()), *SETTINGS.values()]
            table = Table(f"{group.title}: T of each seed, in order", head, rows)
            parts.append(Part(group.title, tables=[table], images=[Panels("", panels)]))
    lead = (
        "The paper raises T from 1 until the sampled NLL on validation tasks is no worse than the deterministic NLL "
        "(dashed). A small T spreads the logits much and costs NLL; a large one gives the softmax back. Each line is "
        "a seed; a triangle marks the T that its search took. “(cap)” says that the search ended because it may go "
        "no further: the criterion was not met there, or only just.",
    )
    return Section("temperature", "How T was chosen", lead, parts) if parts else None


def training_panels(group: Group) -> Panels:
    """Validation NLL and training loss of every seed."""
    panels = [
        Panel(_training(runs, f"{group.dataset}, {label(*model)}"), label(*model))
        for model, runs in group.models.items()
    ]
    return Panels(f"{group.title}: validation NLL (line) and training loss (dots)", panels, "small")


def pooled_bins(tables: Sequence[dict[str, Any]]) -> tuple[Array, Array, Array]:
    """Count, confidence and accuracy of each bin over several runs; NaN where no run has a query."""
    count, confidence, accuracy = (
        np.array([[np.nan if x is None else x for x in table[key]] for table in tables], dtype=float)
        for key in ("count", "confidence", "accuracy")
    )
    total = count.sum(0)
    with np.errstate(invalid="ignore"):
        return total, np.nansum(count * confidence, 0) / total, np.nansum(count * accuracy, 0) / total


def _reliability(runs: Sequence[EvaluatedRun], name: str) -> str:
    figure = Figure(figsize=(3.5, 2.6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1.2))
    told = []
    for (condition, title), (axes, shares) in zip(CONDITIONS.items(), grid.T, strict=True):
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.6, alpha=0.6)
        axes.set(title=title, ylim=(-0.03, 1.03), xlim=(0, 1))
        shares.set(xlabel="confidence", ylim=(0, 1))
        for rule in RULES:
            tables = [t[condition] for run in runs for t in run.reliability if t["rule"] == rule and condition in t]
            if not tables:
                continue
            count, confidence, accuracy = pooled_bins(tables)
            full, style = count > 0, rule_style(rule)
            line = {"color": style.colour, "linestyle": style.dashes}
            axes.plot(confidence[full], accuracy[full], marker=style.marker, markersize=3, **line)
            share = count / count.sum()
            shares.stairs(share, np.linspace(0, 1, len(count) + 1), **line)
            told.append(f"{rule} on {title}: mean confidence {np.nansum(share * confidence):.2f}")
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("share")
    return svg(figure, f"Reliability of {name}. {'; '.join(told)}")


def _searched(runs: Sequence[EvaluatedRun]) -> list[str]:
    """The temperatures of each setting, one for every seed."""
    columns = []
    for setting in (*SEARCHED, *SETTINGS):
        found = [fitted for run in runs if (fitted := run.setting(setting)) and isinstance(fitted.rule, LogitNormal)]
        columns.append(
            ", ".join(
                f"{fitted.rule.params()['temperature']:.3g}{' (cap)' * bool(fitted.report.get('reached_cap'))}"
                for fitted in found
            )
            or "–"
        )
    return columns


def _temperature(runs: Sequence[EvaluatedRun], name: str) -> str:
    figure = Figure(figsize=(3.5, 1.75), layout="constrained")
    nll, ece = figure.subplots(1, 2)
    told = []
    for index, run in enumerate(run for run in runs if run.curve):
        colour = COLOURS[index % len(COLOURS)]
        log_t = [math.log(point["T"]) for point in run.curve]
        nll.axhline(run.curve[0]["deterministic_nll"], color=colour, linewidth=0.8, linestyle="--")
        chosen = run.setting("search-std")
        for axes, key in ((nll, "nll"), (ece, "ece")):
            values = [point[key] for point in run.curve]
            axes.plot([point["T"] for point in run.curve], values, color=colour)
            if chosen is not None and isinstance(chosen.rule, LogitNormal):
                t = chosen.rule.temperature
                axes.plot([t], [np.interp(math.log(t), log_t, values)], "v", color=colour, markersize=6)
        if chosen is not None:
            told.append(f"seed {run.seed} took T = {chosen.rule.params()['temperature']:.3g}")
    for axes, title in ((nll, "NLL"), (ece, "ID ECE")):
        axes.set_xscale("log")
        axes.set(title=title, xlabel="T", xticks=[1, 10, 100], xticklabels=["1", "10", "100"])
    return svg(figure, f"NLL and ID ECE over T on the calibration tasks, {name}. {'; '.join(told)}")


def _training(runs: Sequence[EvaluatedRun], name: str) -> str:
    figure = Figure(figsize=(2.3, 1.5), layout="constrained")
    axes = figure.add_subplot(xlabel="thousand tasks")
    best = []
    for index, run in enumerate(run for run in runs if run.log):
        colour = COLOURS[index % len(COLOURS)]
        tasks = [row["tasks"] / 1000 for row in run.log]
        axes.plot(tasks, [row["loss"] for row in run.log], ".", color=colour, markersize=2, alpha=0.5)
        alone = "o" if len(tasks) == 1 else ""
        axes.plot(tasks, [row["validation_nll"] for row in run.log], color=colour, marker=alone, markersize=3)
        best.append(min(row["validation_nll"] for row in run.log))
    axes.set(ylim=(0, None))
    axes.locator_params(nbins=4)
    least = f"; best validation NLL {min(best):.3f}" if best else ""
    return svg(figure, f"Training of {name}{least}")
