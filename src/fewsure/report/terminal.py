"""The result table in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fewsure.tables import COLUMNS, cell, label, models, paper_rule


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Every data set's table; in brackets the paper's values."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a log file has no width of its own
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        seeds = len({row["seed"] for row in rows if row["dataset"] == dataset})
        table = Table(title=f"{dataset}, {seeds} seed{'s' * (seeds > 1)} (the paper's in brackets)")
        table.add_column("method, rule in the paper")
        for name, *_ in COLUMNS:
            table.add_column(name, justify="right")
        for model in models(row for row in rows if row["dataset"] == dataset):
            cells = (cell(rows, dataset, model, *column[1:4]) for column in COLUMNS)
            texts = ["" if c is None else c.text(column[4]) for c, column in zip(cells, COLUMNS, strict=True)]
            table.add_row(f"{label(*model)}, {paper_rule(model[0])}", *texts)
        console.print(table)
