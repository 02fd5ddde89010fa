"""Draw the README's picture, `docs/entropy.png`, from a study's runs: `python docs/entropy.py results/toy`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import fewsure
from fewsure.data.toys import GRID_EXTENT, GRID_SIDE, grid
from fewsure.report.surfaces import entropy

PANELS = (
    ("protonet-sn", "softmax", "Protonet-SN, softmax"),
    ("protomahalanobis-4", "logit-normal", "ProtoMahalanobis, logit-normal"),
    ("protonet-sn", "open-set", "Protonet-SN, open-set"),
    ("protomahalanobis-4", "open-set", "ProtoMahalanobis, open-set"),
)


def main(study: str) -> None:
    episode = fewsure.source("moons").draw(1, fewsure.generator(0, "moons", "picture"))
    figure = Figure(figsize=(10.4, 3.0), layout="constrained")
    for axes, (model, rule, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        run = Path(study) / "runs" / "moons" / model / "seed0"
        method = fewsure.load(run)
        with torch.no_grad():
            prediction = method.adapt(method.embed(episode.support))(method.embed(grid()[None]))
        surface = entropy(prediction, fewsure.load_rule(run, rule))[0].view(GRID_SIDE, GRID_SIDE)
        extent = (-GRID_EXTENT, GRID_EXTENT, -GRID_EXTENT, GRID_EXTENT)
        axes.imshow(surface, origin="lower", extent=extent, cmap="cividis", vmin=0, vmax=1)
        for points, colour, marker in zip(episode.support[0], ("#1E88C8", "#D55E00"), ("o", "s"), strict=True):
            axes.scatter(*points.T, c=colour, marker=marker, edgecolors="white", s=36)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(Path(__file__).with_name("entropy.png"), dpi=110, facecolor="white")


if __name__ == "__main__":
    main(sys.argv[1])
