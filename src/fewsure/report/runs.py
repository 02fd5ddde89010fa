"""Find evaluated runs, read them, and group those that a table may put side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fewsure import persist
from fewsure.calibrate import FittedRule, read_rules
from fewsure.data import DATASETS
from fewsure.data import source as build_source
from fewsure.episodes import Episodes, Source, generator
from fewsure.errors import FewsureError
from fewsure.methods import METHODS
from fewsure.rules import Rule
from fewsure.tables import label
from fewsure.task import Method

Model = tuple[str, int | None]
SAMPLES = 4  # random tasks shown of each family
#: The columns of a row that must agree before two runs are compared.
PROTOCOL = ("dataset", "way", "shot", "backbone", "train_way", "train_shot", "train_tasks", "pool")


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """What one run folder says."""

    folder: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    reliability: list[dict[str, Any]]
    points: list[dict[str, Any]]  # of its frontier
    rules: list[FittedRule]
    curve: list[dict[str, Any]]  # NLL and ID ECE over T on the calibration tasks
    log: list[dict[str, Any]]

    @property
    def model(self) -> Model:
        return self.rows[0]["method"], self.rows[0]["rank"]

    @property
    def seed(self) -> int:
        return self.rows[0]["seed"]

    @property
    def protocol(self) -> tuple[Any, ...]:
        return *(self.rows[0][key] for key in PROTOCOL), self.bins, self.settings

    @property
    def settings(self) -> str:
        """Everything else that the run was told, in one line, but for what a table is there to compare."""
        told = {verb: dict(self.about[verb]) for verb in ("train", "calibrate", "evaluate")}
        for config in told.values():
            for key in ("seed", "device", "method", "rank"):
                config.pop(key, None)
        return json.dumps(told, sort_keys=True)

    @property
    def bins(self) -> int:
        return self.about["evaluate"]["bins"]

    @property
    def headline(self) -> dict[str, Rule]:
        return {fitted.rule.name: fitted.rule for fitted in self.rules if fitted.headline}

    def setting(self, name: str) -> FittedRule | None:
        return next((fitted for fitted in self.rules if fitted.setting == name), None)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs under one protocol: one table, one row of figures."""

    title: str
    runs: Sequence[EvaluatedRun]

    @property
    def dataset(self) -> str:
        return self.runs[0].rows[0]["dataset"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for run in self.runs for row in run.rows]

    @cached_property
    def models(self) -> dict[Model, list[EvaluatedRun]]:
        """The runs of every model, by rising seed."""
        found: dict[Model, list[EvaluatedRun]] = {}
        for run in self.runs:
            found.setdefault(run.model, []).append(run)
        return found

    @cached_property
    def source(self) -> Source:
        first = self.runs[0].rows[0]
        return build_source(first["dataset"], way=first["way"], shot=first["shot"])

    def samples(self, seed: int) -> Episodes:
        """A few random tasks to show: the same ones in every figure."""
        return self.source.draw(SAMPLES, generator(seed, self.dataset, "report"))

    @cached_property
    def methods(self) -> dict[Model, Method]:
        """The trained method of every model's lowest seed: the one that figures show."""
        return {model: persist.load(runs[0].folder) for model, runs in self.models.items()}


def find(folders: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """The evaluated run folders in `folders`, at any depth, and those that are not evaluated yet."""
    done: dict[Path, Path] = {}
    pending: dict[Path, Path] = {}
    for folder in map(Path, folders):
        configs = sorted(folder.rglob(persist.CONFIG))
        evaluated = [path.parent for path in configs if (path.parent / persist.RESULTS).exists()]
        if not evaluated:
            what = "holds no evaluated run" if folder.is_dir() else "is not a folder"
            raise FewsureError(
                f"{folder} {what}: expected a run folder ({persist.CONFIG} beside {persist.RESULTS}), or a folder "
                "of such; `fewsure evaluate RUN` makes one of a calibrated run"
            )
        done |= {run.resolve(): run for run in evaluated}
        pending |= {path.parent.resolve(): path.parent for path in configs if path.parent not in evaluated}
    return list(done.values()), list(pending.values())


def read(folder: Path) -> EvaluatedRun:
    """Read an evaluated run folder."""
    results = persist.read_json(folder / persist.RESULTS)
    frontier = persist.read_json(folder / persist.FRONTIER)
    if not isinstance(results, dict) or not {"about", "rows", "reliability"} <= results.keys() or not results["rows"]:
        raise FewsureError(f"{folder / persist.RESULTS} is not a run's results: run `fewsure evaluate {folder}` again")
    if results["about"].get("rules") != persist.fingerprint(folder / persist.RULES):
        raise FewsureError(f"{folder} was calibrated again after it was evaluated: run `fewsure evaluate {folder}`")
    log = folder / persist.LOG  # a run copied without it loses its training curve, and nothing else
    lines = log.read_text().splitlines() if log.exists() else []
    return EvaluatedRun(
        folder=folder,
        about=results["about"],
        rows=results["rows"],
        reliability=results["reliability"],
        points=frontier["points"],
        rules=read_rules(folder),
        curve=persist.read_json(folder / persist.RULES)["curve"],
        log=[json.loads(line) for line in lines if line.endswith("}")],
    )


def group(runs: Iterable[EvaluatedRun]) -> list[Group]:
    """Runs by protocol, in the order of our tables of data sets and methods, then by rank and seed."""
    ordered = sorted(runs, key=_order)
    protocols: dict[tuple[Any, ...], list[EvaluatedRun]] = {}
    for run in ordered:
        same = protocols.setdefault(run.protocol, [])
        twin = next((other for other in same if (other.model, other.seed) == (run.model, run.seed)), None)
        if twin is not None:
            raise FewsureError(
                f"{twin.folder} and {run.folder} are both {label(*run.model)} of seed {run.seed}: "
                "report one of them, or the mean over seeds would count it twice"
            )
        same.append(run)
    datasets = [protocol[0] for protocol in protocols]
    groups = []
    for protocol, members in protocols.items():
        title = protocol[0] if datasets.count(protocol[0]) == 1 else f"{protocol[0]}, {describe(members[0])}"
        groups.append(Group(title, members))
    return groups


def describe(run: EvaluatedRun) -> str:
    """A run's protocol in words."""
    row = run.rows[0]
    trained = f"trained on {row['train_tasks']:,} tasks"
    if row["train_way"] or row["train_shot"]:
        source = build_source(row["dataset"], way=row["train_way"], shot=row["train_shot"])
        trained += f" ({source.way}-way {source.shot}-shot)"
    if row["pool"]:
        trained += f" from a pool of {row['pool']:,}"
    return f"{row['way']}-way {row['shot']}-shot, {trained}, backbone {row['backbone']}, ECE in {run.bins} bins"


def place(model: Model) -> tuple[int, int]:
    """Where a model stands in every table: as our table of methods has it, then by rank."""
    method, rank = model
    return _index(method, METHODS), -1 if rank is None else rank


def _order(run: EvaluatedRun) -> tuple[Any, ...]:
    protocol = tuple(value if isinstance(value, str) else (value is not None, value) for value in run.protocol[1:])
    return _index(run.protocol[0], DATASETS), protocol, place(run.model), run.seed


def _index(name: str, table: Iterable[str]) -> int:
    names = list(table)
    return names.index(name) if name in names else len(names)
