"""A study: many runs, each trained, calibrated and evaluated in a folder of its own, and what they say together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fewsure import persist
from fewsure.calibrate import calibrate
from fewsure.config import CalibrateConfig, EvaluateConfig, ReproduceConfig, TrainConfig
from fewsure.errors import FewsureError, unknown_name
from fewsure.evaluate import evaluate
from fewsure.methods import method_class
from fewsure.train import check_positive, train

#: A step of ten classes of sixty points costs as much as several of two classes. More steps of few tasks did better,
#: at the same cost, than fewer of many.
TASKS_PER_STEP = {"moons": 4, "circles": 4, "gaussians": 2}
#: The ID ECE, in points, that the open-set rule may spend on each family.
ECE_BUDGET = {"moons": 1.5, "circles": 1.5, "gaussians": 2.0}


@dataclass(frozen=True)
class Run:
    """One run of a study: where it lives, and everything it is told."""

    folder: Path
    train: TrainConfig
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    @property
    def done(self) -> bool:
        path = self.folder / persist.RESULTS
        if not path.exists():
            return False
        about = persist.read_json(path)["about"]
        told = {"train": self.train, "calibrate": self.calibrate, "evaluate": self.evaluate}
        rules = self.folder / persist.RULES
        same_rules = rules.exists() and about.get("rules") == persist.fingerprint(rules)
        return same_rules and all(about.get(verb) == asdict(config) for verb, config in told.items())

    def __call__(self) -> list[dict[str, Any]]:
        """Do what is left to do, and return the result rows."""
        if not self.done:
            train(self.train, self.folder, progress=False)
            calibrate(self.folder, self.calibrate)
            evaluate(self.folder, self.evaluate)
        return persist.read_json(self.folder / persist.RESULTS)["rows"]


def toy_runs(config: ReproduceConfig, out: str | Path) -> list[Run]:
    """The runs of the toy study."""
    check_positive(config, "seeds", "steps", "jobs")
    for name in ("datasets", "methods", "ranks"):
        told = getattr(config, name)
        if len(set(told)) < len(told):
            raise FewsureError(f"{name} {' '.join(map(str, told))}: each may be named once, or it would count twice")
    for dataset in config.datasets:
        if dataset not in TASKS_PER_STEP:
            raise unknown_name("toy family", dataset, TASKS_PER_STEP)
    models: list[tuple[str, int | None]] = []
    for method in config.methods:
        models += [(method, rank) for rank in (config.ranks if method_class(method).ranked else (None,))]
    for rank in config.ranks:
        if rank < 0:
            raise FewsureError(f"rank {rank} is negative: give 0 (a diagonal covariance) or more")
    return [
        _toy_run(config, Path(out) / "runs", dataset, method, rank, seed)
        for seed in range(config.seed, config.seed + config.seeds)  # outermost: a study cut short still compares all
        for dataset in config.datasets
        for method, rank in models
    ]


def _toy_run(config: ReproduceConfig, out: Path, dataset: str, method: str, rank: int | None, seed: int) -> Run:
    tasks_per_step = TASKS_PER_STEP[dataset]
    train = TrainConfig(
        dataset=dataset,
        method=method,
        rank=rank,
        train_tasks=config.steps * tasks_per_step,
        tasks_per_step=tasks_per_step,
        pool=config.pool,
        keep=config.keep,
        seed=seed,
        device=config.device,
    )
    return Run(
        out / dataset / (method if rank is None else f"{method}-{rank}") / f"seed{seed}",
        train,
        CalibrateConfig(ece_budget=ECE_BUDGET[dataset], seed=seed, device=config.device),
        EvaluateConfig(
            episodes=config.episodes, stranger_episodes=config.stranger_episodes, seed=seed, device=config.device
        ),
    )


def run_all(runs: Sequence[Run], jobs: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Do every run, some at a time, each on one thread; all rows, in the order of the runs."""
    rows: dict[Path, list[dict[str, Any]]] = {}
    # Fresh processes: a forked torch inherits locked thread pools.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker) as pool:
        futures = {pool.submit(run): run for run in runs}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                run = futures[future]
                rows[run.folder] = future.result()
                say(f"[{done}/{len(runs)}] {run.folder}")
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                raise FewsureError(
                    "a run's process was killed (for its memory?): give the same command again, with fewer --jobs"
                ) from error
            raise
    return [row for run in runs for row in rows[run.folder]]


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A parent that is killed outright ends nobody: two studies could then write to one folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
