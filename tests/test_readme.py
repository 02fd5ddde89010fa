"""The README and the docs tell the truth: their example runs, and their tables are those of the committed results."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILL = runpy.run_path(str(ROOT / "docs" / "fill.py"))


@pytest.mark.parametrize("page", FILL["pages"](), ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    assert FILL["filled"](page.read_text()) == page.read_text(), "out of date: run `python docs/fill.py`"


def test_the_example_runs(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    demo = re.search(r'run = "(.*?)"', example)
    assert demo is not None
    exec(example.replace(demo[1], str(tiny_run)), {})
    printed = capsys.readouterr().out
    assert printed.count("tensor") == 2
    assert len(re.findall(r"\d\.\d+", printed)) == 3 * 3  # for three queries two classes and the unknown


def test_the_example_is_of_fifteen_lines() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
