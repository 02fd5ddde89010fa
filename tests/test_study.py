"""A study: which runs it has, what of them is left to do, and that they run side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from fewsure import persist, study
from fewsure.config import CalibrateConfig, EvaluateConfig, ReproduceConfig, TrainConfig
from fewsure.errors import FewsureError
from fewsure.study import Run, run_all, toy_runs

TRAIN = TrainConfig(method="protonet", train_tasks=4, tasks_per_step=2, validation_tasks=2)


def tiny(folder: Path, seed: int = 0) -> Run:
    evaluation = EvaluateConfig(episodes=2, stranger_episodes=0, seed=seed)
    return Run(folder, replace(TRAIN, seed=seed), CalibrateConfig(episodes=2, seed=seed), evaluation)


def test_the_papers_study_has_every_method_family_rank_and_seed(tmp_path: Path) -> None:
    runs = toy_runs(ReproduceConfig(), tmp_path)
    assert len(runs) == 3 * (4 + 5) * 3
    assert len({run.folder for run in runs}) == len(runs)
    assert {run.train.dataset for run in runs} == {"moons", "circles", "gaussians"}
    assert {run.train.rank for run in runs} == {None, 0, 1, 4, 16, 64}
    assert {run.train.seed for run in runs} == {0, 1, 2}
    for run in runs:
        assert run.train.train_tasks == ReproduceConfig().steps * run.train.tasks_per_step
        assert run.train.seed == run.calibrate.seed == run.evaluate.seed
        assert run.folder.is_relative_to(tmp_path)


def test_a_study_is_what_it_is_told(tmp_path: Path) -> None:
    config = ReproduceConfig(("circles",), ("protonet", "protomahalanobis"), (2,), seeds=1, steps=5, pool=7, seed=9)
    runs = toy_runs(config, tmp_path)
    assert [(r.train.method, r.train.rank, r.train.seed, r.train.pool) for r in runs] == [
        ("protonet", None, 9, 7),
        ("protomahalanobis", 2, 9, 7),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datasets": ("moons", "suns")}, "'suns'"),
        ({"methods": ("proto",)}, "unknown method 'proto'"),
        ({"ranks": (1, -3)}, "rank -3 is negative"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"jobs": 0}, "jobs is 0"),
    ],
)
def test_a_bad_study_is_named(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(FewsureError, match=message):
        toy_runs(replace(ReproduceConfig(), **change), tmp_path)


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(tmp_path / "run")
    assert not run.done
    rows = run()
    assert run.done
    assert rows == persist.read_json(tmp_path / "run" / persist.RESULTS)["rows"]
    for verb in ("train", "calibrate", "evaluate"):
        monkeypatch.setattr(study, verb, lambda *_: pytest.fail("done again"))
    assert run() == rows


def test_a_run_told_something_else_is_not_done(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    run()
    assert not replace(run, evaluate=replace(run.evaluate, bins=10)).done
    assert not replace(run, train=replace(run.train, seed=1)).done


def test_runs_go_side_by_side_and_come_back_in_order(tmp_path: Path) -> None:
    runs = [tiny(tmp_path / f"seed{seed}", seed) for seed in (0, 1)]
    said: list[str] = []
    rows = run_all(runs, 2, said.append)
    assert [row["seed"] for row in rows] == sorted(row["seed"] for row in rows)
    assert {row["seed"] for row in rows} == {0, 1}
    assert rows == [row for run in runs for row in persist.read_json(run.folder / persist.RESULTS)["rows"]]
    assert len(said) == 2
    assert all(run.done for run in runs)


def test_a_mistake_in_one_run_ends_the_study(tmp_path: Path) -> None:
    broken = replace(tiny(tmp_path / "broken"), train=replace(TRAIN, dataset="suns"))
    with pytest.raises(FewsureError, match="unknown dataset 'suns'"):
        run_all([broken], 1, lambda line: None)
