"""Pictures of two-dimensional tasks: samples of every family, and what every method makes of one (Figure 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewsure.data.toys import GRID_EXTENT, GRID_SIDE, grid
from fewsure.episodes import Episodes
from fewsure.predicting import predict_all
from fewsure.report.drawing import INK, bare, class_style, png, scale, svg
from fewsure.report.parts import Panel, Panels, Part, Section
from fewsure.report.runs import EvaluatedRun, Group, Model
from fewsure.rules import LogitNormal, OpenSet, Rule, Softmax, fold_unknown
from fewsure.tables import label, paper_rule
from fewsure.task import Prediction

COLOURS = "cividis"
HOW = {"softmax": "by distance (softmax)", "logit-normal": "by sampled softmax (logit-normal)", "open-set": "open-set"}


def planar(groups: Sequence[Group]) -> list[Group]:
    """The groups whose inputs are points of a plane."""
    return [group for group in groups if group.source.shape == (2,)]


def samples_section(groups: Sequence[Group], seed: int) -> Section:
    """Random tasks of each family, as in the paper's appendix."""
    shown: dict[tuple[str, int, int], Part] = {}
    for group in groups:
        key = group.dataset, group.source.way, group.source.shot
        if key not in shown:
            episodes = group.samples(seed)
            panels = [
                Panel(_task_panel(episodes[i : i + 1], f"{group.dataset}: task {i + 1}"), f"task {i + 1}")
                for i in range(len(episodes))
            ]
            caption = f"{group.source.way} classes, {group.source.shot} examples of each"
            shown[key] = Part(group.dataset, images=[Panels(caption, panels, "small")])
    lead = (
        "Filled signs are the support examples that a method is shown, faint ones the queries; colour and shape both "
        "name the class. Every support comes from one half of its class, so the shape of the rest must be known from "
        "other tasks. Each square is [−3, 3]² in the coordinates that the methods see.",
    )
    return Section("tasks", "Random tasks", lead, list(shown.values()))


def surfaces_section(groups: Sequence[Group], seed: int, device: str) -> Section:
    """Entropy surfaces of every method under its rules, as in Figure 1 of the paper."""
    ends = Panel(scale(COLOURS), "from 0, certain, to 1, undecided between all classes")
    parts = [Part(images=[Panels("", [ends], "scale")])]
    for group in groups:
        episode = group.samples(seed)[:1]
        images = [
            Panels(label(*model), list(_surface_panels(group, model, runs[0], episode, device)), "three")
            for model, runs in group.models.items()
        ]
        parts.append(Part(group.title, ["Task 1 of the samples above."], images=images))
    lead = (
        "The entropy of the prediction at each point of [−3, 3]², divided by log N: dark is certain (0), light is "
        "undecided between all classes (1). A method that knows what it was not shown is dark only near the support. "
        "Under each surface stand its mean over the square and over the support. An asterisk marks the rule that "
        "the paper gives the method.",
        "“By distance” is the softmax of the logits at the fitted temperature, “by sampled softmax” the logit-normal "
        "rule at the T of the paper's search; for open-set the probability of “unknown” is spread evenly over the "
        "classes. Each method's run of the lowest seed is shown.",
    )
    return Section("surfaces", "Entropy surfaces (paper, Figure 1)", lead, parts)


def entropy(prediction: Prediction, rule: Rule) -> Tensor:
    """Entropy over the N classes, unknown mass spread evenly, divided by log N: [e, q], 0 to 1."""
    probs = fold_unknown(rule(prediction)).exp()
    return torch.special.entr(probs).sum(-1) / torch.tensor(float(prediction.way)).log().clamp_min(1e-12)


def _task_panel(episode: Episodes, name: str) -> str:
    figure, axes = bare(1.9, GRID_EXTENT)
    size = 26 if episode.support[0].numel() <= 2 * 20 else 12
    for index in range(episode.support.shape[1]):
        colour, marker = class_style(index)
        query, support = episode.query[0, episode.labels[0] == index], episode.support[0, index]
        axes.scatter(*query.T.numpy(), c=colour, marker=marker, s=size / 3, alpha=0.35, linewidths=0, rasterized=True)
        axes.scatter(*support.T.numpy(), c=colour, marker=marker, s=size, edgecolors=INK, linewidths=size / 50)
    return svg(figure, f"{name}: support and queries of {episode.support.shape[1]} classes")


def _surface_panels(group: Group, model: Model, run: EvaluatedRun, episode: Episodes, device: str) -> Iterator[Panel]:
    support = episode.support.flatten(1, 2)
    query = torch.cat([grid().unsqueeze(0), support], 1)
    asked = replace(episode, query=query, labels=torch.full(query.shape[:2], -1))
    ((prediction, _),) = predict_all(group.methods[model], group.source, asked, device=device)
    for name, rule in run.headline.items():
        if rule.needs_energy and prediction.energy is None:
            continue
        values = entropy(prediction, rule)[0]
        surface, at_support = values[: GRID_SIDE**2].unflatten(0, (GRID_SIDE, GRID_SIDE)), values[GRID_SIDE**2 :]
        means = f"mean\u00a0{surface.mean():.2f}, support\u00a0{at_support.mean():.2f}"
        figure, axes = bare(1.6, GRID_EXTENT)
        for index, points in enumerate(episode.support[0]):
            colour, marker = class_style(index)
            axes.scatter(*points.T.numpy(), c=colour, marker=marker, s=15, edgecolors="white", linewidths=0.6)
        backdrop = png(surface.flip(0).numpy(), COLOURS, 0.0, 1.0)
        described = f"Entropy surface of {label(*model)} on a task of {group.dataset}, {HOW.get(name, name)}: {means}"
        star = "*" if name == paper_rule(model[0]) else ""
        yield Panel(svg(figure, described, backdrop), f"{HOW.get(name, name)}{star}, {_setting(rule)}: {means}")


def _setting(rule: Rule) -> str:
    match rule:
        case Softmax() | LogitNormal():
            return f"T\u00a0=\u00a0{rule.temperature:.3g}"
        case OpenSet():
            return f"π\u00a0=\u00a0{rule.pi:.3g}"
        case _:
            return ", ".join(f"{key} = {value}" for key, value in rule.params().items())
