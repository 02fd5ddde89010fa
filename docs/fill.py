"""Write the tables of README.md and docs/*.md from the committed results: `python docs/fill.py`.

A table stands between `<!-- table: FILE DATASET COLUMNS -->` and `<!-- end -->`. A test fails when one is out of date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from fewsure.tables import COLUMNS, markdown

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: (\S+) (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BRIEF = ("accuracy", "ID ECE", "OOD ECE", "AUROC", "open-set: ID ECE", "open-set: OOD ECE")


def filled(page: str) -> str:
    """A page with its tables as the results have them."""

    def table(match: re.Match[str]) -> str:
        start, file, dataset, columns, end = match.groups()
        rows = json.loads((ROOT / file).read_text())["rows"]
        shown = [column for column in COLUMNS if columns == "all" or column[0] in BRIEF]
        return start + markdown(rows, dataset, shown) + end

    return BLOCK.sub(table, page)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(filled(path.read_text()))
