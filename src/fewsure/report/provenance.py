"""Where the numbers come from: what all runs share, where they differ, and how they trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fewsure
from fewsure.paper import toy_table
from fewsure.report.curves import training_panels
from fewsure.report.parts import Part, Section, Table
from fewsure.report.runs import EvaluatedRun, Group


def section(groups: Sequence[Group], left_out: Sequence[Path], seed: int) -> Section:
    """The last section of the page; everything in it is folded away."""
    runs = [run for group in groups for run in group.runs]
    told = [_flat(run) for run in runs]
    keys = list(dict.fromkeys(key for flat in told for key in flat))
    shared = [key for key in keys if len({flat.get(key, "") for flat in told}) == 1]
    differing = [key for key in keys if key not in shared]
    common = Table("The same for all runs", ["what", "value"], [[key, told[0][key]] for key in shared])
    root = os.path.commonpath([run.folder.resolve().parent for run in runs])
    each = Table(
        "Each run",
        ["folder", *differing],
        [
            [os.path.relpath(run.folder.resolve(), root), *(flat.get(key, "–") for key in differing)]
            for run, flat in zip(runs, told, strict=True)
        ],
    )
    parts = [
        Part(tables=[common], summary="What all runs share"),
        Part(tables=[each], summary=f"The {len(runs)} runs in {root}, and where they differ"),
        Part(images=[training_panels(group) for group in groups], summary="Training curves"),
    ]
    if left_out:
        names = ", ".join(str(folder) for folder in left_out)
        parts.append(Part(text=[names], summary=f"{len(left_out)} runs left out, as they are not evaluated"))
    lead = (
        f"Written by fewsure {fewsure.__version__}; the tasks in the figures are drawn from seed {seed}. "
        "A revision that ends in “-dirty” is a commit with changes on top.",
        f"Published values: {toy_table()['source']}",
    )
    return Section("provenance", "Configuration and provenance", lead, parts)


def _flat(run: EvaluatedRun) -> dict[str, str]:
    """Everything that a run's results say about it, one level deep."""
    flat: dict[str, Any] = {}
    for key, value in run.about.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return {key: "–" if value is None else str(value) for key, value in flat.items()}
