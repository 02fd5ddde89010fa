"""Ratios of times, measured in one run.

What is timed is CPU time on one thread, so that waiting for a core does not count. Every repeat times all competitors
one after the other, and a ratio is taken within a repeat: whatever slows the machine down slows both sides. No absolute
time is reported, for none would hold elsewhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

MIN_SECONDS = 0.05  # of one measurement: a quick function is called many times


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles, over repeats, of one time divided by another of the same repeat."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def ratios(functions: dict[str, Callable[[], object]], *, to: str, repeats: int) -> dict[str, Ratio]:
    """How many times as long as `functions[to]` each of the others takes."""
    torch.set_num_threads(1)
    calls = {name: _calls(f) for name, f in functions.items()}
    found: dict[str, list[float]] = {name: [] for name in functions if name != to}
    for repeat in range(repeats):
        order = sorted(functions) if repeat % 2 else sorted(functions, reverse=True)
        seconds = {name: _seconds(functions[name], calls[name]) for name in order}
        for name, values in found.items():
            values.append(seconds[name] / seconds[to])
    return {name: _ratio(values) for name, values in found.items()}


def _ratio(values: list[float]) -> Ratio:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


def _seconds(f: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        f()
    return (time.process_time() - start) / calls


def _calls(f: Callable[[], object]) -> int:
    """How many calls make one measurement; warms up on the way."""
    f()
    calls = 1
    while _seconds(f, calls) * calls < MIN_SECONDS:
        calls *= 2
    return calls


def machine() -> dict[str, str | int]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": 1,
    }


def arguments(description: str, repeats: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="measurements of each ratio (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="also write the ratios to this JSON file")
    told = parser.parse_args()
    if told.repeats < 2:
        parser.error(f"--repeats {told.repeats}: a spread needs 2 or more")
    return told


def show(title: str, rows: Sequence[dict[str, object]], out: Path | None) -> None:
    """Print the rows as a Markdown table, and keep them as JSON."""
    about = machine()
    print(f"{title}\n\n{', '.join(f'{key} {value}' for key, value in about.items())}\n")
    heads = list(rows[0])
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(str(row[head]) for head in heads)} |")
    print()
    if out is not None:
        plain = [{k: asdict(v) if isinstance(v, Ratio) else v for k, v in row.items()} for row in rows]
        out.write_text(json.dumps({"title": title, "machine": about, "rows": plain}, indent=1) + "\n")
