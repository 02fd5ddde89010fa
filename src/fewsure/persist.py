"""Run folders: JSON and safetensors, written whole or not at all, and nothing that loading could execute."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

import fewsure
from fewsure.errors import FewsureError
from fewsure.methods import build
from fewsure.task import Method

FORMAT = 1
CONFIG, MODEL, LOG, RULES, RESULTS, FRONTIER = (
    "config.json",
    "model.safetensors",
    "train.jsonl",
    "rules.json",
    "results.json",
    "frontier.json",
)


def writable_folder(folder: str | Path) -> Path:
    """Make a folder and prove that it can be written, before hours of work depend on it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / ".probe", b"probe")
        (folder / ".probe").unlink()
    except OSError as error:
        raise FewsureError(f"cannot write to {folder} ({error.strerror}): give another --out") from error
    return folder


def target_folder(folder: str | Path, out: str | Path | None, *names: str) -> Path:
    """Where a verb that goes on from a run writes: the run's folder, or `out` with the named files of the run."""
    target = writable_folder(folder if out is None else out)
    if target.resolve() != Path(folder).resolve():
        for name in names:
            if (Path(folder) / name).exists():
                write_bytes(target / name, (Path(folder) / name).read_bytes())
    return target


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file by way of a temporary one beside it, so that a full disk or a kill leaves the old one whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FewsureError(f"cannot write {path} ({error.strerror}): nothing was changed") from error


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_rows(path: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Result rows as JSON, a line a row, so that a change of one value is a change of one line."""
    lines = ",\n".join(map(json.dumps, rows))
    write_bytes(path, f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n'.encode())


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file: what was made from it can say so."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise FewsureError(f"cannot read {path} ({error.strerror})") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise FewsureError(f"cannot read {path} ({error.strerror}): is its folder a run folder of fewsure?") from error
    except ValueError as error:
        raise FewsureError(f"{path} is not JSON ({error}): it was cut short or is not ours") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, safetensors.torch.save(contiguous, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise FewsureError(
            f"cannot read {path} as safetensors ({error}): it is missing, cut short or not ours"
        ) from error


def save(method: Method, folder: str | Path, *, train: dict[str, Any] | None = None) -> None:
    """Save a method built by `build`: `config.json` and `model.safetensors`."""
    folder = writable_folder(folder)
    if not hasattr(method, "spec"):
        raise FewsureError("only a method made by fewsure.build can be saved: it knows its own configuration")
    write_tensors(folder / MODEL, method.state_dict())
    config = {"format": FORMAT, "fewsure": fewsure.__version__, "model": method.spec, "train": train or {}}
    write_json(folder / CONFIG, config)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a run folder, its format checked."""
    config = read_json(Path(folder) / CONFIG)
    written = config.get("format") if isinstance(config, dict) else None
    if not isinstance(written, int) or "model" not in config:
        raise FewsureError(f"{Path(folder) / CONFIG} is not a configuration of fewsure")
    if written > FORMAT:
        raise FewsureError(
            f"{folder} has format {written}, newer than {FORMAT}, the newest this version reads: update fewsure"
        )
    return config


def read_run(folder: str | Path) -> dict[str, Any]:
    """The configuration of a run folder that says how its method was trained, as one that `fewsure train` left does."""
    config = read_config(folder)
    if "dataset" not in config.get("train", {}):
        raise FewsureError(f"{folder} does not say what its method was trained on: make it with `fewsure train`")
    return config


def load(folder: str | Path) -> Method:
    """Load a method from a run folder, ready to predict (in evaluation mode)."""
    config = read_config(folder)
    try:
        spec = dict(config["model"])
        options = spec.pop("options", {})
        spec["shape"] = tuple(spec["shape"])
        method = build(spec.pop("method"), **spec, **options)
    except (KeyError, TypeError) as error:
        raise FewsureError(f"{Path(folder) / CONFIG} does not describe a method ({error!r})") from error
    tensors, _ = read_tensors(Path(folder) / MODEL)
    try:
        method.load_state_dict(tensors)
    except RuntimeError as error:
        raise FewsureError(f"{Path(folder) / MODEL} does not fit its configuration: {error}") from error
    return method.eval()
