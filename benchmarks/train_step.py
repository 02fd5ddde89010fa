"""A training step on toy tasks against the bare backbone's forward and backward on the same points.

A step is the training loop's own: draw the tasks, loss, gradients, Adam, and one power step of every spectral bound.
The bare backbone is the same residual network without the bound, in training mode.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from timing import arguments, ratios, show

import fewsure
from fewsure.backbones import build_backbone
from fewsure.config import TrainConfig
from fewsure.train import Loop

METHODS: tuple[tuple[str, int | None], ...] = (
    ("protonet-sn", None),
    ("protoddu", None),
    ("protosngp", None),
    ("protomahalanobis", 1),
    ("protomahalanobis", 16),
)
DATASET = "moons"


def loop(name: str, rank: int | None, folder: Path) -> Loop:
    source = fewsure.source(DATASET)
    config = TrainConfig(dataset=DATASET, method=name, rank=rank, train_tasks=10**9)
    validation = source.draw(1, fewsure.generator(0, "validation"))
    return Loop(fewsure.build(name, rank=rank), source, validation, config, folder, torch.device("cpu"))


def main() -> None:
    told = arguments("A toy training step against the bare backbone's forward and backward.", repeats=31)
    torch.manual_seed(0)
    source, tasks = fewsure.source(DATASET), TrainConfig().tasks_per_step
    episodes = source.draw(tasks, fewsure.generator(0, "points"))
    points = torch.cat([episodes.support.flatten(1, 2), episodes.query], 1)
    backbone = build_backbone("fc", source.shape, c=None).train()
    upstream = torch.randn_like(backbone(points))

    def bare() -> None:
        backbone.zero_grad()
        backbone(points).backward(upstream)

    with tempfile.TemporaryDirectory() as folder:
        loops = {(name, rank): loop(name, rank, Path(folder)) for name, rank in METHODS}
        steps = {str(key): lambda loop=value: loop.advance(1, lambda: None) for key, value in loops.items()}
        found = ratios({"bare": bare, **steps}, to="bare", repeats=told.repeats)
    rows = [
        {"method": name, "rank": "" if rank is None else rank, "step / bare backbone": found[str((name, rank))]}
        for name, rank in METHODS
    ]
    show(f"A training step of {tasks} {DATASET} tasks ({points.shape[1]} points each)", rows, told.out)


if __name__ == "__main__":
    main()
