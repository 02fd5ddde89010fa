"""Run folders: written whole or not at all, read with care."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import fewsure
from fewsure import persist
from fewsure.errors import FewsureError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fewsure.save(fewsure.build("protomahalanobis", rank=2, blocks=1), tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / persist.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_options_are_saved_with_the_method(saved: Path) -> None:
    method = fewsure.load(saved)
    assert method.spec["options"] == {"blocks": 1}
    assert len(method.encoder.blocks) == 1
    assert {path.name for path in saved.iterdir()} == {persist.CONFIG, persist.MODEL}


def test_files_are_json_and_safetensors(saved: Path) -> None:
    config = json.loads((saved / persist.CONFIG).read_text())
    assert (config["format"], config["fewsure"], config["train"]) == (1, fewsure.__version__, {})
    tensors, _ = persist.read_tensors(saved / persist.MODEL)
    assert all(torch.equal(tensors[k], v) for k, v in fewsure.load(saved).state_dict().items())


def test_saving_again_replaces(saved: Path) -> None:
    fewsure.save(fewsure.build("protonet"), saved)
    assert fewsure.load(saved).spec["method"] == "protonet"


def test_only_what_build_made_can_be_saved(tmp_path: Path) -> None:
    method = fewsure.build("protonet")
    del method.spec
    with pytest.raises(FewsureError, match=r"only a method made by fewsure\.build can be saved"):
        fewsure.save(method, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON .*cut short or is not ours"),
        (b'{"format": 1, "mod', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a configuration of fewsure"),
        (b'{"format": "one"}', "is not a configuration of fewsure"),
        (b'{"format": 1}', "is not a configuration of fewsure"),
        (b'{"format": 1, "model": {}}', "does not describe a method"),
        (b'{"format": 1, "model": []}', "does not describe a method"),
    ],
)
def test_a_configuration_that_is_none_is_named(content: bytes, message: str, saved: Path) -> None:
    (saved / persist.CONFIG).write_bytes(content)
    with pytest.raises(FewsureError, match=message):
        fewsure.load(saved)


def test_a_newer_format_is_told_to_update(saved: Path) -> None:
    rewrite(saved, format=2)
    with pytest.raises(FewsureError, match="has format 2, newer than 1, the newest this version reads: update fewsure"):
        fewsure.load(saved)


def test_an_unknown_method_or_option_in_a_configuration_is_named(saved: Path) -> None:
    model = json.loads((saved / persist.CONFIG).read_text())["model"]
    rewrite(saved, model={**model, "method": "os.system"})
    with pytest.raises(FewsureError, match=r"unknown method 'os\.system'"):
        fewsure.load(saved)
    rewrite(saved, model={**model, "options": {"nonsense": 1}})
    with pytest.raises(FewsureError, match=r"does not take these options .*'nonsense'"):
        fewsure.load(saved)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_weights_cut_short_are_named(keep: int, saved: Path) -> None:
    path = saved / persist.MODEL
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FewsureError, match=r"cannot read .*model\.safetensors as safetensors .*cut short or not ours"):
        fewsure.load(saved)


def test_missing_weights_are_named(saved: Path) -> None:
    (saved / persist.MODEL).unlink()
    with pytest.raises(FewsureError, match=r"cannot read .*model\.safetensors as safetensors .*it is missing"):
        fewsure.load(saved)


def test_weights_of_another_method_are_named(saved: Path, tmp_path: Path) -> None:
    fewsure.save(fewsure.build("protonet"), tmp_path / "other")
    (tmp_path / "other" / persist.MODEL).replace(saved / persist.MODEL)
    with pytest.raises(FewsureError, match=r"model\.safetensors does not fit its configuration"):
        fewsure.load(saved)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FewsureError, match=r"cannot read .*config\.json \(No such file or directory\): is its folder"):
        fewsure.load(tmp_path / "nowhere")


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FewsureError, match=r"cannot write .*file \(No space left on device\): nothing was changed"):
        persist.write_bytes(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({} if old is None else {"file": old})


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        persist.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FewsureError, match=r"cannot write to .*: give another --out"):
            persist.writable_folder(folder)


def test_a_writable_folder_is_left_empty(tmp_path: Path) -> None:
    assert persist.writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_tensors_and_metadata_survive(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(6).reshape(2, 3).T, "scalar": torch.tensor(1.5, dtype=torch.float64)}
    persist.write_tensors(tmp_path / "x", tensors, {"key": "value"})
    read, metadata = persist.read_tensors(tmp_path / "x")
    assert metadata == {"key": "value"}
    assert {name: (t.dtype, t.tolist()) for name, t in read.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }
