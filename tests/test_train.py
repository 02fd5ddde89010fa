"""The training loop: what it leaves, how it resumes, when it stops, and what it refuses."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fewsure
from fewsure import persist
from fewsure.config import TrainConfig
from fewsure.data import source
from fewsure.episodes import Pool, generator
from fewsure.errors import FewsureError
from fewsure.methods.classgaussians import ClassGaussians
from fewsure.spectral import WARM_UP, SoftBound
from fewsure.task import Method
from fewsure.train import CHECKPOINT, SCHEDULES, Loop, train

TINY = TrainConfig(rank=1, train_tasks=60, tasks_per_step=2, validate_every=7, validation_tasks=4, schedule="cosine")


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / persist.LOG).read_text().splitlines()]


def weights(folder: Path) -> dict[str, Tensor]:
    return persist.read_tensors(folder / persist.MODEL)[0]


def assert_same_run(actual: Path, expected: Path) -> None:
    """The same weights, log and checkpoint, bit for bit."""
    assert log(actual) == log(expected)
    for file in (persist.MODEL, CHECKPOINT):
        (a, told), (b, wanted) = persist.read_tensors(actual / file), persist.read_tensors(expected / file)
        assert told == wanted
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            assert torch.equal(tensor, b[name]), f"{file}: {name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(TINY, folder)
    return folder


def killed_at(step: int, config: TrainConfig, folder: Path) -> None:
    """Train until the loss is asked for in a step, and no further."""
    calls = 0

    def loss(self: Method, episodes: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == step:
            raise KeyboardInterrupt
        return Method.loss(self, episodes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassGaussians, "loss", loss, raising=False)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder)


def test_a_run_leaves_its_configuration_weights_log_and_checkpoint(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {persist.CONFIG, persist.MODEL, CHECKPOINT, persist.LOG}
    assert persist.read_config(whole)["train"] == asdict(TINY)
    rows = log(whole)
    assert [row["step"] for row in rows] == [7, 14, 21, 28, 30]
    assert [row["tasks"] for row in rows] == [14, 28, 42, 56, 60]
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["validation_nll"]) for row in rows)


def test_training_lowers_the_validation_nll(tmp_path: Path) -> None:
    config = TrainConfig(method="protonet", train_tasks=800, tasks_per_step=8, validate_every=20, learning_rate=1e-3)
    method = train(config, tmp_path)
    nll = [row["validation_nll"] for row in log(tmp_path)]
    assert min(nll) < 0.8 * nll[0]
    assert not method.training


@pytest.mark.parametrize("step", [1, 3, 8, 15, 22, 30])
def test_a_run_killed_at_any_step_ends_the_same_when_resumed(step: int, whole: Path, tmp_path: Path) -> None:
    killed_at(step, TINY, tmp_path)
    assert not (tmp_path / persist.MODEL).exists()
    train(TINY, tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_run_killed_again_and_again_ends_the_same(whole: Path, tmp_path: Path) -> None:
    for step in (9, 2, 8, 10, 3):
        killed_at(step, TINY, tmp_path)
    train(TINY, tmp_path)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("changes", [{"pool": 5, "keep": "last"}, {"method": "protonet", "rank": None, "patience": 3}])
def test_every_option_resumes(changes: dict, tmp_path: Path) -> None:
    config = replace(TINY, **changes)
    train(config, tmp_path / "whole")
    killed_at(20, config, tmp_path / "killed")
    train(config, tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_process_that_is_killed_resumes(tmp_path: Path) -> None:
    config = replace(TINY, train_tasks=200, tasks_per_step=1)
    flags = [f"--{key}={value}" for key, value in asdict(config).items() if value is not None]
    command = [sys.executable, "-m", "fewsure", "train", *flags, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not (tmp_path / "killed" / CHECKPOINT).exists():
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL  # it did not get to its end
    assert not (tmp_path / "killed" / persist.MODEL).exists()
    train(config, tmp_path / "killed")
    train(config, tmp_path / "whole")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_log_ahead_of_its_checkpoint_or_cut_short_is_put_right(whole: Path, tmp_path: Path) -> None:
    killed_at(16, TINY, tmp_path)
    with open(tmp_path / persist.LOG, "a") as file:
        file.write(json.dumps({"step": 21, "tasks": 42, "loss": 0.0, "validation_nll": 0.0}) + '\n{"step": 2')
    train(TINY, tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_lost_log_does_not_stop_a_run(whole: Path, tmp_path: Path) -> None:
    killed_at(16, TINY, tmp_path)
    (tmp_path / persist.LOG).unlink()
    train(TINY, tmp_path)
    assert log(tmp_path) == log(whole)[2:]
    assert weights(tmp_path).keys() == weights(whole).keys()


def test_a_finished_run_is_not_trained_again(whole: Path, tmp_path: Path) -> None:
    train(TINY, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "advance", lambda *_: pytest.fail("trained again"))
        train(TINY, tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_new_run_does_not_go_on_with_an_old_log(whole: Path, tmp_path: Path) -> None:
    (tmp_path / persist.LOG).write_text('{"step": 999}\n')
    train(TINY, tmp_path)
    assert log(tmp_path) == log(whole)


@pytest.mark.parametrize("change", [{"seed": 1}, {"rank": 2}, {"train_tasks": 62}, {"learning_rate": 2e-3}])
def test_a_folder_of_another_configuration_is_refused(change: dict, tmp_path: Path) -> None:
    killed_at(16, TINY, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ((key, new),) = change.items()
    message = f"another configuration \\({key} {getattr(TINY, key)} there, {new} here\\): give another --out"
    with pytest.raises(FewsureError, match=message):
        train(replace(TINY, **change), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole: Path, tmp_path: Path) -> None:
    train(TINY, tmp_path / "same")
    assert_same_run(tmp_path / "same", whole)
    train(replace(TINY, seed=1), tmp_path / "other")
    name = "backbone.0.weight"
    assert not torch.equal(weights(tmp_path / "other")[name], weights(whole)[name])


def test_training_moves_no_global_seed(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(replace(TINY, train_tasks=4), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_seed_moves_no_training(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    train(TINY, tmp_path)
    assert_same_run(tmp_path, whole)


def fake_validation(monkeypatch: pytest.MonkeyPatch, nlls: list[float]) -> None:
    """Validations give these NLLs, one after the other; training itself is real."""
    remaining = iter(nlls)
    monkeypatch.setattr(Loop, "validation_nll", lambda self: next(remaining))


def test_patience_stops_after_so_many_validations_without_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_validation(monkeypatch, [3.0, 2.0, 2.5, 1.5, 1.5, 1.6, 0.1])
    train(replace(TINY, validate_every=2, patience=2), tmp_path)
    assert [row["step"] for row in log(tmp_path)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_weights_kept_are_those_of_the_best_validation_or_the_last(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_validation(monkeypatch, [3.0, 1.0, 2.0, 2.0])
    config = replace(TINY, train_tasks=16, validate_every=2, keep=keep)
    seen = []
    real = Loop.validate

    def validate(self: Loop, loss: Tensor) -> None:
        real(self, loss)
        seen.append({name: tensor.clone() for name, tensor in self.method.state_dict().items()})

    monkeypatch.setattr(Loop, "validate", validate)
    train(config, tmp_path)
    expected, other = (seen[1], seen[3]) if keep == "best" else (seen[3], seen[1])
    kept = weights(tmp_path)
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(kept[name], tensor) for name, tensor in other.items())


def test_a_finite_pool_is_all_that_training_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = Method.loss

    def loss(self: Method, episodes) -> Tensor:
        if self.training:
            seen.update(float(first) for first in episodes.support[:, 0, 0, 0])
        return real(self, episodes)

    monkeypatch.setattr(Method, "loss", loss)
    train(replace(TINY, pool=6), tmp_path / "pool")
    assert len(seen) == 6
    seen.clear()
    train(TINY, tmp_path / "endless")
    assert len(seen) == TINY.train_tasks


def test_a_pool_draws_its_own_tasks_with_replacement() -> None:
    pool = Pool(source("moons"), 4, generator(0, "pool"))
    drawn = pool.draw(50, generator(0, "draw"))
    of_pool = {float(task[0, 0, 0]) for task in pool.tasks.support}
    assert {float(task[0, 0, 0]) for task in drawn.support} == of_pool
    assert (pool.name, pool.way, pool.shot) == ("moons", 2, 5)
    with pytest.raises(FewsureError, match="unknown kind of strangers for 'moons' 'grid'"):
        pool.draw(1, generator(0), "grid")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("halving", [1, 0.5, 0.25, 0.125, 0.125]),
        ("cosine", [1, 0.8536, 0.5, 0.1464, 0.0062]),
    ],
)
def test_schedules(schedule: str, rates: list[float]) -> None:
    done = [0, 0.25, 0.5, 0.75, 0.95]
    assert [SCHEDULES[schedule](share) for share in done] == pytest.approx(rates, abs=1e-4)


def test_the_schedule_sets_the_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    real = torch.optim.Adam.step

    def step(self: torch.optim.Adam) -> None:
        rates.append(self.param_groups[0]["lr"])
        real(self)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    train(replace(TINY, train_tasks=16, schedule="halving", learning_rate=0.008), tmp_path)
    assert rates == [0.008, 0.008, 0.004, 0.004, 0.002, 0.002, 0.001, 0.001]


def test_every_bound_takes_a_power_step_each_optimiser_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    real = SoftBound.power_step

    def power_step(self: SoftBound, weight: Tensor) -> None:
        nonlocal steps
        steps += 1
        real(self, weight)

    monkeypatch.setattr(SoftBound, "power_step", power_step)
    method = train(replace(TINY, train_tasks=20), tmp_path)
    bounds = [module for module in method.modules() if isinstance(module, SoftBound)]
    assert steps == len(bounds) * (WARM_UP + 10)


def test_diverged_training_says_so(tmp_path: Path) -> None:
    with pytest.raises(FewsureError, match=r"training diverged; try a smaller learning_rate than 1e\+30"):
        train(replace(TINY, learning_rate=1e30), tmp_path)
    assert not (tmp_path / persist.MODEL).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_tasks": 0}, "train_tasks is 0: expected a number above 0"),
        ({"tasks_per_step": -1}, "tasks_per_step is -1"),
        ({"validate_every": 0}, "validate_every is 0"),
        ({"validation_tasks": 0}, "validation_tasks is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"pool": 0}, "pool is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"rank": -1}, "rank -1 is negative"),
        ({"method": "protonet"}, "has no rank, but was given 1"),
        ({"method": "proto"}, "unknown method 'proto'"),
        ({"dataset": "moon"}, "unknown dataset 'moon'"),
        ({"backbone": "conv"}, "unknown backbone 'conv'"),
        ({"train_way": 3}, "moons with 3 classes"),
        ({"train_way": 0}, "moons with 0 classes"),
        ({"train_shot": 0}, "classes of 0 examples"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here .*: try 'cpu'"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here .*: try 'cpu'"),
    ],
)
def test_a_bad_configuration_is_named_before_anything_is_written(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(FewsureError, match=message):
        train(replace(TINY, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_a_checkpoint_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    killed_at(10, TINY, tmp_path)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FewsureError, match=f"cannot read .*{CHECKPOINT} as safetensors .*cut short or not ours"):
        train(TINY, tmp_path)


def test_a_checkpoint_of_something_else_is_named(tmp_path: Path) -> None:
    persist.write_tensors(tmp_path / CHECKPOINT, {"x": torch.zeros(1)})
    with pytest.raises(FewsureError, match="is not a checkpoint of fewsure: give another --out, or delete it"):
        train(TINY, tmp_path)


def test_a_checkpoint_of_other_weights_is_named(tmp_path: Path) -> None:
    killed_at(10, TINY, tmp_path)
    tensors, metadata = persist.read_tensors(tmp_path / CHECKPOINT)
    tensors["method.backbone.0.weight"] = torch.zeros(3, 3)
    persist.write_tensors(tmp_path / CHECKPOINT, tensors, metadata)
    with pytest.raises(FewsureError, match="holds weights of another shape, perhaps of another version"):
        train(TINY, tmp_path)


def full_disk(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_halves_and_the_last_checkpoint_whole(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(10, TINY, tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    real, synced = os.fsync, []

    def soon_full(fd: int) -> None:
        synced.append(fd)
        return real(fd) if len(synced) <= 2 else full_disk(fd)  # the probe, and the log put right

    monkeypatch.setattr(os, "fsync", soon_full)
    with pytest.raises(FewsureError, match=r"cannot write .*checkpoint.safetensors \(No space left on device\)"):
        train(TINY, tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {CHECKPOINT, persist.LOG}
    monkeypatch.setattr(os, "fsync", real)
    train(TINY, tmp_path)  # when there is room again
    assert_same_run(tmp_path, whole)


def test_a_full_disk_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(FewsureError, match=r"cannot write .* \(No space left on device\)"):
        train(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_when_asked_for_and_only_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(replace(TINY, train_tasks=4), tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    train(replace(TINY, train_tasks=4), tmp_path / "loud", progress=True)
    assert "moons: protomahalanobis rank 1" in capsys.readouterr().err


def test_what_training_returns_is_what_loading_gives(tmp_path: Path) -> None:
    returned, loaded = train(TINY, tmp_path), fewsure.load(tmp_path)
    episodes = source("moons").draw(3, generator(0, "returned"))
    assert torch.equal(returned.predict(episodes).logits, loaded.predict(episodes).logits)
