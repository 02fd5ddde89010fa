"""What each verb can be told. Plain values and names of our tables, never an import path; nothing here imports torch.

The fields are the flags of the command line, and the columns of a result row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TOYS = ("moons", "circles", "gaussians")


@dataclass(frozen=True)
class TrainConfig:
    """Meta-train one method on one data set.

    Args:
        dataset: name of the data set
        method: name of the method
        rank: rank of the covariance factors, for a method that has one (default 1; 0 is diagonal)
        backbone: name of the embedding network
        options: other options of the method, for example '{"divide": false}' of protosngp
        train_way: classes in a training task (default: as the data set has it)
        train_shot: support examples a class in a training task (default: as the data set has it)
        train_tasks: how many tasks to train on in all
        tasks_per_step: tasks in one optimiser step
        pool: size of a finite pool of training tasks (default: every task is new)
        learning_rate: Adam's
        schedule: how the learning rate falls: not at all, halved three times, or along a cosine
        validate_every: steps between validations, log lines and checkpoints
        validation_tasks: validation tasks for early stopping, from their own stream
        keep: the weights that are kept: those of the best validation NLL, or the last
        patience: stop after so many validations without a better NLL (default: never)
        seed: seed of initial weights, tasks and dropout
        device: cpu, cuda or another torch device
    """

    dataset: str = "moons"
    method: str = "protomahalanobis"
    rank: int | None = None
    backbone: str = "fc"
    options: dict[str, bool | int | float] | None = None
    train_way: int | None = None
    train_shot: int | None = None
    train_tasks: int = 16_000
    tasks_per_step: int = 4
    pool: int | None = None
    learning_rate: float = 1e-3
    schedule: Literal["constant", "halving", "cosine"] = "constant"
    validate_every: int = 100
    validation_tasks: int = 64
    keep: Literal["best", "last"] = "best"
    patience: int | None = None
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class CalibrateConfig:
    """Fit every rule on calibration tasks, half of whose queries are strangers.

    Args:
        way: classes in a task (default: as the data set has it)
        shot: support examples a class (default: as the data set has it)
        episodes: calibration tasks
        pi: expected share of strangers of the headline open-set rule
        ece_budget: the ID ECE, in points, that the open-set rule with the largest allowed pi may reach
        temperature_cap: where the paper's search for T stops
        target_ece: ID ECE, in points, that the second setting of T comes near (default: the paper's own, where known)
        seed: seed of the calibration tasks
        device: cpu, cuda or another torch device
    """

    way: int | None = None
    shot: int | None = None
    episodes: int = 200
    pi: float = 0.05
    ece_budget: float = 1.5
    temperature_cap: int = 20
    target_ece: float | None = None
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure a calibrated run on test tasks.

    Args:
        way: classes in a task (default: as the data set has it)
        shot: support examples a class (default: as the data set has it)
        episodes: test tasks
        stranger_episodes: how many of them are also shown strangers
        bins: bins of the calibration error
        seed: seed of the test tasks: the same seed gives every method the same tasks
        device: cpu, cuda or another torch device
    """

    way: int | None = None
    shot: int | None = None
    episodes: int = 100
    stranger_episodes: int = 50
    bins: int = 15
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class ReproduceConfig:
    """Train, calibrate, evaluate and report a whole study; what is already done is not done again.

    Args:
        datasets: toy families
        methods: methods
        ranks: ranks of the methods that have one (0 is the paper's "Diag")
        seeds: how many seeds, counted from `seed`
        steps: optimiser steps of each run
        pool: size of a finite pool of training tasks (default: every task is new)
        keep: the weights that are kept: those of the best validation NLL, or the last
        episodes: test tasks of each run
        stranger_episodes: how many of them are also shown strangers
        jobs: runs at a time, each on one thread
        seed: the first seed
        device: cpu, cuda or another torch device
    """

    datasets: tuple[str, ...] = TOYS
    methods: tuple[str, ...] = ("protonet", "protonet-sn", "protoddu", "protosngp", "protomahalanobis")
    ranks: tuple[int, ...] = (0, 1, 4, 16, 64)
    seeds: int = 3
    steps: int = 4_000
    pool: int | None = None
    keep: Literal["best", "last"] = "best"
    episodes: int = 100
    stranger_episodes: int = 50
    jobs: int = 2
    seed: int = 0
    device: str = "cpu"
