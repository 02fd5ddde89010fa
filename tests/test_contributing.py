"""CONTRIBUTING.md holds: its example is a method, and its map shows every room."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_example_is_one_file_and_one_row_and_keeps_the_contract(tmp_path: Path) -> None:
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file, row = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "src/fewsure/methods/kernel.py").write_text(file)
    table = tmp_path / "src/fewsure/methods/__init__.py"
    before = table.read_text()
    after = before.replace("METHODS = {\n", f"METHODS = {{\n{row}")
    assert after != before
    table.write_text(after)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "tests/contracts", "-k", "kernel"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 20, done.stdout


def test_the_map_shows_every_room() -> None:
    named = set(re.findall(r"`(\w+(?:\.py|/))`", PAGE))
    rooms = (
        path for path in (ROOT / "src/fewsure").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    )
    assert {path.name if path.suffix else f"{path.name}/" for path in rooms} <= named
