"""Episodes, where they come from, and the seeds that draw them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fewsure.errors import unknown_name


@dataclass(frozen=True, eq=False)
class Episodes:
    """A batch of few-shot tasks. A query labelled -1 is a stranger: it belongs to no class of its task."""

    support: Tensor  # [e n k ...]: inputs, or embeddings once mapped
    mask: Bool[Tensor, "e n k"]
    query: Tensor  # [e q ...]
    labels: Int[Tensor, "e q"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | Tensor) -> Episodes:
        return Episodes(self.support[index], self.mask[index], self.query[index], self.labels[index])

    def chunks(self, size: int) -> Iterator[Episodes]:
        """The same episodes, at most `size` at a time."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def map(self, f: Callable[[Tensor], Tensor]) -> Episodes:
        """The same episodes with `f` applied to every input: a backbone, or a look-up in a table of embeddings."""
        return replace(self, support=f(self.support), query=f(self.query))

    def to(self, device: torch.device | str) -> Episodes:
        return Episodes(*(t.to(device, non_blocking=True) for t in (self.support, self.mask, self.query, self.labels)))


class Source(ABC):
    """Where episodes come from."""

    name: str
    split: str  # train, select (stopping and choices), calibrate (rules) or test
    way: int
    shot: int
    shape: tuple[int, ...]  # of one input
    calibration_strangers: str  # the kind of strangers that rules are fitted on ...
    test_strangers: str  # ... and the kind they are judged on
    strangers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def draw(self, episodes: int, generator: torch.Generator, strangers: str | None = None) -> Episodes:
        """Draw episodes on the generator's device; with a kind of `strangers`, these follow the known queries."""

    def gather(self, drawn: Tensor) -> Tensor:
        """What was drawn, as a method's input. A source that draws indices of a fixed set looks its items up here."""
        return drawn

    def embedder(self, embed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What was drawn, embedded. A source of a fixed set embeds each item once and then looks embeddings up."""
        return lambda drawn: embed(self.gather(drawn))

    def check_strangers(self, strangers: str | None) -> None:
        if strangers is not None and strangers not in self.strangers:
            raise unknown_name(f"kind of strangers for {self.name!r}", strangers, self.strangers)


class Pool(Source):
    """A finite pool of tasks, drawn once, from which every training step takes some (with replacement)."""

    def __init__(self, source: Source, tasks: int, generator: torch.Generator) -> None:
        self.name, self.split, self.shape = source.name, source.split, source.shape
        self.way, self.shot = source.way, source.shot
        self.calibration_strangers, self.test_strangers = source.calibration_strangers, source.test_strangers
        self.gather = source.gather
        self.tasks = source.draw(tasks, generator)

    def draw(self, episodes: int, generator: torch.Generator, strangers: str | None = None) -> Episodes:
        self.check_strangers(strangers)
        device = self.tasks.labels.device
        return self.tasks[torch.randint(len(self.tasks), (episodes,), generator=generator, device=device)]


def derive_seed(*parts: object) -> int:
    """One seed for one purpose, the same on every machine: `derive_seed(3, "moons", "test")`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator for one purpose. Evaluation draws on the CPU, the same on every device."""
    return torch.Generator(device).manual_seed(derive_seed(*parts))
