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


def source(name: str, **options: Any) -> Source:
    """The source of a data set's episodes.

    >>> source("gaussians").way
    10
    """
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    module, cls = DATASETS[name].split(":")
    return getattr(import_module(f"fewsure.data.{module}"), cls)(**options)
