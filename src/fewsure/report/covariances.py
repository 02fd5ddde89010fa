"""What covariance each method gives a class: heat maps, and the distribution of the precision's eigenvalues.

The paper's figures of the same names, `covariance-compare` and `eigenvalue-distribution`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from fewsure.episodes import Episodes, generator
from fewsure.gaussian import GaussianTask
from fewsure.report.drawing import INK, class_style, image, png, scale, svg
from fewsure.report.parts import Panel, Panels, Part, Section, Table
from fewsure.report.runs import Group, Model
from fewsure.tables import label
from fewsure.task import Task

TASKS = 50  # of at most FEATURES features; fewer of more, since eigenvalues cost the cube
FEATURES = 64
CLASSES_SHOWN = 2
COLOURS = "RdBu_r"
CLIP = 0.98  # beyond the diagonal's share: a scale that the diagonal sets would show nothing else
LN10 = math.log(10)


@dataclass(frozen=True, eq=False)
class Spectra:
    """The covariances of one method: of the task that the figures show, and eigenvalues of many tasks.

    Eigenvalues are the precision's, ascending, as natural logarithms.
    """

    covariance: Float[Tensor, "n f f"]  # n is 1 where all classes share it
    precision: Float[Tensor, "n f f"]
    shown: Float[Tensor, "n d"]
    logs: Float[Tensor, "tasks n d"]

    @property
    def shared(self) -> bool:
        return self.logs.shape[1] == 1

    @property
    def between(self) -> float:
        """Standard deviation over the classes of a task, at the same rank of the spectrum; the mean over the rest."""
        return 0.0 if self.shared else self.logs.std(1).mean().item()

    @property
    def within(self) -> float:
        """Standard deviation over the spectrum of one class: zero for a sphere."""
        return self.logs.std(-1).mean().item()


def section(groups: Sequence[Group], seed: int, device: str) -> Section | None:
    """Heat maps and spectra, or None where every method's covariance is fixed."""
    ends = Panel(scale(COLOURS), "from minus to plus the number under each heat map")
    parts = [Part(images=[Panels("", [ends], "scale")])]
    for group in groups:
        spectra = {model: found for model in group.models if (found := _spectra(group, model, seed, device))}
        if spectra:
            parts.append(_part(group, spectra))
    lead = (
        "Only methods whose covariance depends on the support are here. In the heat maps blue is negative, red "
        "positive and white zero; each pair of classes shares one scale, whose end is written beneath, and colours "
        "saturate there: it is set so that what is off the diagonal can be seen. Weight off the diagonal means that "
        "features are judged together; different maps for the two classes mean that the covariance is the class's own.",
        "In the spectra, grey is the share of all eigenvalues of the precision over many random tasks; lines are the "
        "classes of the heat maps' task, task 1 of the samples. A single spike is a sphere. Lines on top of each other "
        "are one covariance for all classes, which the paper found where its set encoder keeps the residual query.",
    )
    return Section("covariances", "Class covariances and their eigenvalues", lead, parts) if len(parts) > 1 else None


def _part(group: Group, spectra: dict[Model, Spectra]) -> Part:
    count = max(len(found.logs) for found in spectra.values())
    rows = [
        [label(*model), f"{found.between:.3f}", f"{found.within:.3f}", "one for all" if found.shared else "one a class"]
        for model, found in spectra.items()
    ]
    head = ["method", "between classes", "within a class", "covariances"]
    table = Table(
        f"{group.title}: standard deviation of the log eigenvalues of the precision, over {count} tasks", head, rows
    )
    low, high = _range(spectra.values())
    histograms = [
        Panel(_histogram(found, low, high, f"{group.dataset}, {label(*model)}"), label(*model))
        for model, found in spectra.items()
    ]
    maps = [Panels(label(*model), list(_heat_maps(found, label(*model))), "two") for model, found in spectra.items()]
    return Part(group.title, tables=[table], images=[Panels("Eigenvalues of the precision", histograms), *maps])


def _spectra(group: Group, model: Model, seed: int, device: str) -> Spectra | None:
    method, source = group.methods[model].to(device).eval(), group.source

    def adapt(episodes: Episodes) -> Task:
        embed = source.embedder(lambda x: method.embed(x.to(device)))
        with torch.no_grad():
            return method.adapt(embed(episodes.support), episodes.mask.to(device)).to("cpu")

    task = adapt(group.samples(seed)[:1])
    if not isinstance(task, GaussianTask) or (task.factors.shape[-1] == 0 and task.diag.std() == 0):
        return None
    many = max(1, TASKS * FEATURES // max(task.diag.shape[-1], FEATURES))
    tasks = adapt(source.draw(many, generator(seed, group.dataset, "report covariances")))
    assert isinstance(tasks, GaussianTask)
    covariance, precision = task.classes.covariance()[0], task.classes.precision()[0]
    shown, logs = (-found.classes.eigenvalues().log().flip(-1) for found in (task, tasks))
    return Spectra(covariance[:, :FEATURES, :FEATURES], precision[:, :FEATURES, :FEATURES], shown[0], logs)


def _heat_maps(spectra: Spectra, name: str) -> Iterator[Panel]:
    for what, matrices in (("covariance", spectra.covariance), ("precision", spectra.precision)):
        shown = matrices[:CLASSES_SHOWN]
        end = shown.abs().flatten().quantile(CLIP).item() or shown.abs().max().item()
        for index, matrix in enumerate(shown):
            who = "all classes" if spectra.shared else f"class {index + 1}"
            uri = png(matrix.numpy(), COLOURS, -end, end)
            alt = f"{what} of {who}, {name}, {len(matrix)} features, between −{end:.3g} and {end:.3g}"
            caption = f"{what}, {who} (±{end:.3g})"
            yield Panel(image(uri, alt), caption)


def _range(spectra: Collection[Spectra]) -> tuple[float, float]:
    values = torch.cat([values.flatten() for found in spectra for values in (found.logs, found.shown)]) / LN10
    low, high = values.min().item(), values.max().item()
    return low - 0.05, high + 0.05


def _histogram(spectra: Spectra, low: float, high: float, name: str) -> str:
    figure = Figure(figsize=(3.4, 2.0), layout="constrained")
    axes = figure.add_subplot(xlabel="log₁₀ eigenvalue", ylabel="share")
    logs, shown = ((values / LN10).numpy() for values in (spectra.logs, spectra.shown))
    bins = torch.linspace(low, high, 41).tolist()
    d = logs.shape[-1]
    axes.hist(logs.ravel(), bins, weights=[1 / logs.size] * logs.size, color=INK, alpha=0.2)
    for index, values in enumerate(shown):
        colour, _ = class_style(index)
        axes.hist(values, bins, weights=[1 / d] * d, histtype="step", color=colour, linewidth=1.1)
    axes.set(xlim=(low, high), yscale="log", ylim=(5e-4, 1.5))  # a class of 64 features has few large ones
    axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    return svg(
        figure,
        f"Eigenvalues of the precision, {name}: standard deviation of their logarithm {spectra.between:.3f} between "
        f"classes, {spectra.within:.3f} within a class",
    )
