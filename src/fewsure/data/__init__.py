"""The table of data sets: names to sources of episodes, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fewsure.episodes import Source
from fewsure.errors import unknown_name

DATASETS = {
    "moons": "toys:Moons",
    "circles": "toys:Circles",
    "gaussians": "toys:Gaussians",
}
SPLITS = ("train", "select", "calibrate", "test")


def source(name: str, *, split: str = "test", **options: Any) -> Source:
    """The source of the episodes of one split of a data set: train, select, calibrate or test.

    >>> source("gaussians").way
    10
    """
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    module, cls = DATASETS[name].split(":")
    return getattr(import_module(f"fewsure.data.{module}"), cls)(split=split, **options)
