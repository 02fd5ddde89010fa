"""The package as its users get it: built, and installed where there is nothing but its base dependencies."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import fewsure

ROOT = Path(__file__).parent.parent
PACKAGE = Path(fewsure.__file__).parent

#: Run in the clean environment: every module imports, and a method predicts.
CLEAN = """
import importlib, pathlib, pkgutil, sys
import fewsure
assert pathlib.Path(fewsure.__file__).is_relative_to(sys.prefix), fewsure.__file__
for module in pkgutil.walk_packages(fewsure.__path__, "fewsure."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
method = fewsure.build("protomahalanobis", rank=1).eval()
prediction = method.predict(fewsure.source("moons").draw(2, fewsure.generator(0, "packaging")))
assert prediction.logits.isfinite().all()
assert fewsure.Softmax()(prediction).shape == (2, 100, 3)
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints; if it fails, what it printed is the failure."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, so that this too is proved to hold what it must."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {path.relative_to(PACKAGE.parent).as_posix() for path in files} <= held
    assert {"fewsure/py.typed", "fewsure/paper/toys.json"} <= held
    assert any(name.startswith("fewsure/report/") and ".html" in name for name in held), "no template of the report"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    outside = {name.split("/")[0] for name in held}
    assert outside == {"fewsure", f"fewsure-{fewsure.__version__}.dist-info"}


def test_wheel_works_with_base_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "clean", with_pip=True)
    bin = tmp_path / "clean" / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (bin / "python", "-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "install", "--prefer-binary", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    run(*pip, "check")
    # The package's own modules must not warn; what others import on their way is theirs.
    run(bin / "python", "-W", "error:::fewsure", "-c", CLEAN, cwd=tmp_path)
    assert run(bin / "fewsure", "--version", cwd=tmp_path).split()[-1] == fewsure.__version__
