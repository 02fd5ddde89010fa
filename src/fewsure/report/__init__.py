"""The HTML report of evaluated runs: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(runs: Sequence[Path], out: str | Path, *, seed: int = 0, device: str = "cpu") -> Path:
    """Write `out/report.html`, the report of run folders or of folders that hold some; the path written.

    `seed` draws the tasks that the figures show, `device` runs the models on them.
    """
    from fewsure.report.page import write_page  # the command line's table needs neither torch nor matplotlib

    return write_page(runs, out, seed=seed, device=device)
