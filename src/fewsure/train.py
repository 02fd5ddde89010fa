"""The one training loop, for every method and source.

Nothing in it waits for the device between validations. Everything it depends on is in the checkpoint, so that a run
killed at any step and started again ends with the same weights, bit for bit (on a CPU, with the same thread count).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from fewsure import persist, spectral
from fewsure.config import TrainConfig
from fewsure.data import source as build_source
from fewsure.episodes import Episodes, Pool, Source, derive_seed, generator
from fewsure.errors import FewsureError
from fewsure.methods import build
from fewsure.predicting import predict_all
from fewsure.task import Method

CHECKPOINT = "checkpoint.safetensors"
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "halving": lambda done: 0.5 ** int(4 * done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def train(config: TrainConfig, folder: str | Path, *, progress: bool | None = None) -> Method:
    """Train (or go on training) a method, and leave it in its run folder.

    A folder that holds a checkpoint of the same configuration is resumed; one of another configuration is refused.
    """
    device = check_device(config.device)
    check_positive(config, "train_tasks", "tasks_per_step", "validate_every", "validation_tasks", "learning_rate")
    check_positive(config, *(name for name in ("pool", "patience") if getattr(config, name) is not None))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(config.seed, "weights and dropout"))
        way_and_shot = {"way": config.train_way, "shot": config.train_shot}
        source = build_source(config.dataset, split="train", **way_and_shot)
        select = build_source(config.dataset, split="select", **way_and_shot)
        told: dict[str, Any] = {"rank": config.rank, "backbone": config.backbone}
        told |= {"shape": source.shape, "way": source.way}
        if clash := told.keys() & (config.options or {}):
            raise FewsureError(f"options hold {min(clash)!r}, which is no option of a method: give it as its own flag")
        told |= config.options or {}
        method = build(config.method, **told).to(device)
        folder = persist.writable_folder(folder)
        validation = select.draw(config.validation_tasks, generator(config.seed, select.name, select.split))
        if config.pool is not None:
            source = Pool(source, config.pool, generator(config.seed, config.dataset, "pool", device=device))
        loop = Loop(method, source, select, validation, config, folder, device)
        loop.resume()
        loop.run(sys.stderr.isatty() if progress is None else progress)
    return method.eval()


@dataclass
class Loop:
    """A training run and all of its state."""

    method: Method
    source: Source
    select: Source
    validation: Episodes
    config: TrainConfig
    folder: Path
    device: torch.device
    step: int = 0
    best_nll: float = math.inf
    since_best: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = math.ceil(self.config.train_tasks / self.config.tasks_per_step)
        self.parameters = [p for p in self.method.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(self.parameters, self.config.learning_rate, fused=True)
        self.generator = generator(self.config.seed, self.config.dataset, "train", device=self.device)
        self.bounds = list(spectral.bounded(self.method))

    def run(self, progress: bool) -> None:
        with progress_bar(progress) as bar:
            name = self.config.method if self.config.rank is None else f"{self.config.method} rank {self.config.rank}"
            shown = bar.add_task(f"{self.config.dataset}: {name}, steps", total=self.steps, completed=self.step)
            while self.step < self.steps and not self.out_of_patience:
                loss = self.advance(min(self.config.validate_every, self.steps - self.step), lambda: bar.advance(shown))
                self.validate(loss)
                self.save_checkpoint()
        if self.config.keep == "best":
            self.method.load_state_dict(self.best)
        persist.save(self.method, self.folder, train=asdict(self.config))

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.since_best >= self.config.patience

    def advance(self, steps: int, tick: Callable[[], object]) -> Tensor:
        """Take some optimiser steps; the mean loss stays on the device."""
        self.method.train()
        total = torch.zeros((), device=self.device)
        for _ in range(steps):
            rate = self.config.learning_rate * SCHEDULES[self.config.schedule](self.step / self.steps)
            self.optimiser.param_groups[0]["lr"] = rate
            episodes = self.source.draw(self.config.tasks_per_step, self.generator).map(self.source.gather)
            loss = self.method.loss(episodes)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            for bound, weight in self.bounds:
                bound.power_step(weight)
            total += loss.detach()
            self.step += 1
            tick()
        return total / steps

    def validation_nll(self) -> float:
        """NLL of the deterministic logits on the validation tasks."""
        parts = list(predict_all(self.method, self.select, self.validation, device=self.device))
        logits, labels = torch.cat([p.logits for p, _ in parts]), torch.cat([y for _, y in parts])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

    def validate(self, loss: Tensor) -> None:
        """A validation, a log line, and the best weights so far."""
        try:
            nll = self.validation_nll()
        except FewsureError:  # a method refuses embeddings that are no numbers, as those of its own support
            if loss.isfinite():
                raise
            nll = math.nan
        if not math.isfinite(nll):
            raise FewsureError(
                f"validation NLL is {nll} after {self.step} steps: training diverged; try a smaller learning_rate "
                f"than {self.config.learning_rate}"
            )
        if nll < self.best_nll:
            self.best_nll, self.since_best = nll, 0
            self.best = {name: tensor.clone() for name, tensor in self.method.state_dict().items()}
        else:
            self.since_best += 1
        tasks = self.step * self.config.tasks_per_step
        row = {"step": self.step, "tasks": tasks, "loss": loss.item(), "validation_nll": nll}
        try:
            with open(self.folder / persist.LOG, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise FewsureError(f"cannot write {self.folder / persist.LOG} ({error.strerror})") from error

    def save_checkpoint(self) -> None:
        """One file, so that no kill can leave halves of two checkpoints."""
        tensors = {f"method.{k}": v for k, v in self.method.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        tensors |= {f"adam.{i}.{k}": v for i, s in self.optimiser.state_dict()["state"].items() for k, v in s.items()}
        tensors |= {"rng.tasks": self.generator.get_state(), "rng.global": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"step": self.step, "best_nll": self.best_nll, "since_best": self.since_best}
        metadata = {"config": json.dumps(asdict(self.config)), "state": json.dumps(state)}
        persist.write_tensors(self.folder / CHECKPOINT, tensors, metadata)

    def resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists() and (self.folder / persist.CONFIG).exists():
            _check_same_config(persist.read_config(self.folder)["train"], asdict(self.config), self.folder)
        if not path.exists():
            (self.folder / persist.LOG).unlink(missing_ok=True)
            return
        tensors, metadata = persist.read_tensors(path)
        if not {"config", "state"} <= metadata.keys():
            raise FewsureError(f"{path} is not a checkpoint of fewsure: give another --out, or delete it")
        _check_same_config(json.loads(metadata["config"]), asdict(self.config), self.folder)
        state = json.loads(metadata["state"])
        self.step, self.best_nll, self.since_best = state["step"], state["best_nll"], state["since_best"]
        groups: dict[str, dict[str, Tensor]] = {"method": {}, "best": {}, "adam": {}, "rng": {}}
        for name, tensor in tensors.items():
            group, key = name.split(".", 1)
            groups[group][key] = tensor
        try:
            self.method.load_state_dict(groups["method"])
        except RuntimeError as error:
            raise FewsureError(
                f"{path} holds weights of another shape, perhaps of another version: give another --out, or delete it"
            ) from error
        self.best = {k: v.to(self.device) for k, v in groups["best"].items()}
        adam = self.optimiser.state_dict()
        for key, tensor in groups["adam"].items():
            index, name = key.split(".")
            adam["state"].setdefault(int(index), {})[name] = tensor
        self.optimiser.load_state_dict(adam)
        self.generator.set_state(groups["rng"]["tasks"])
        torch.set_rng_state(groups["rng"]["global"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(groups["rng"]["cuda"], self.device)
        log = self.folder / persist.LOG
        lines = log.read_text().splitlines() if log.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may have cut the last one short
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= self.step)
        persist.write_bytes(log, kept.encode())


def progress_bar(shown: bool) -> Progress:
    """What is done, and how long the rest will take; nothing at all where it is not shown."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), disable=not shown
    )


def _check_same_config(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    changed = [f"{key} {old.get(key)!r} there, {new[key]!r} here" for key in new if old.get(key) != new[key]]
    if changed:
        raise FewsureError(
            f"{folder} holds a run with another configuration ({'; '.join(changed)}): give another --out, "
            "or delete the folder"
        )


def check_positive(config: Any, *names: str) -> None:
    """Refuse counts and rates that are not above zero, by name."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise FewsureError(f"{name} is {value}: expected a number above 0")


def check_device(name: str) -> torch.device:
    """The device, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FewsureError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}): try 'cpu'") from error
    return device
