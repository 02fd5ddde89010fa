"""A training step on toy tasks against the bare backbone's forward and backward on the same points.

A step is the training loop's own: draw the tasks, loss, gradients, Adam, and one power step of every spectral bound.
The bare backbone is the same residual network without the bound, in training mode.
"""

from __future__ import annotations

from pathlib import Path

import torch

import fewsure
from fewsure.backbones import build_backbone
from fewsure.config import TrainConfig
from fewsure.tables import label
from fewsure.train import Loop
from timing import Ratio, arguments, ratios, show

METHODS: tuple[tuple[str, int | None], ...] = (
    ("protonet-sn", None),
    ("protoddu", None),
    ("protosngp", None),
    ("protomahalanobis", 1),
    ("protomahalanobis", 16),
)
DATASETS = ("moons", "gaussians")
TASKS = TrainConfig().tasks_per_step


def loop(dataset: str, name: str, rank: int | None) -> Loop:
    source = fewsure.source(dataset)
    config = TrainConfig(dataset=dataset, method=name, rank=rank, train_tasks=10**9)
    validation = source.draw(1, fewsure.generator(0, "validation"))
    # Only `advance` is called: nothing is validated, and nothing written.
    return Loop(fewsure.build(name, rank=rank), source, validation, config, Path("unused"), torch.device("cpu"))


def against_bare(dataset: str, repeats: int) -> dict[str, Ratio]:
    source = fewsure.source(dataset)
    episodes = source.draw(TASKS, fewsure.generator(0, "points"))
    points = torch.cat([episodes.support.flatten(1, 2), episodes.query], 1)
    backbone = build_backbone("fc", source.shape, c=None).train()
    upstream = torch.randn_like(backbone(points))

    def bare() -> None:
        backbone.zero_grad()
        backbone(points).backward(upstream)

    loops = {label(name, rank): loop(dataset, name, rank) for name, rank in METHODS}
    steps = {name: lambda loop=value: loop.advance(1, lambda: None) for name, value in loops.items()}
    return ratios({"bare": bare, **steps}, to="bare", repeats=repeats)


def main() -> None:
    told = arguments("A toy training step against the bare backbone's forward and backward.", repeats=31)
    torch.manual_seed(0)
    found = {dataset: against_bare(dataset, told.repeats) for dataset in DATASETS}
    rows = [
        {"method": name, **{dataset: found[dataset][name] for dataset in DATASETS}}
        for name in (label(*method) for method in METHODS)
    ]
    show(f"A training step of {TASKS} tasks / the bare backbone: median (quartiles)", rows, told.out)


if __name__ == "__main__":
    main()
