"""The one idea: a method turns a labelled support set into a task, a task turns queries into a prediction.

Everything else in the package supplies or consumes these three types. Shapes: `e` episodes, `n` classes (way), `k`
examples a class (shot), `q` queries, `d` features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fewsure.episodes import Episodes
from fewsure.errors import FewsureError

AnyTask = TypeVar("AnyTask", bound="Task")


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a task says of its queries, before any rule makes probabilities of it.

    `strangeness` ranks queries from ordinary to unknown, and every ranking metric uses it; `energy` is the paper's
    E = -log sum_c exp(-d2_c) over squared distances, present only where the method has distances.
    """

    logits: Float[Tensor, "e q n"]
    strangeness: Float[Tensor, "e q"]
    energy: Float[Tensor, "e q"] | None = None

    @classmethod
    def of(
        cls,
        logits: Float[Tensor, "e q n"],
        *,
        energy: Float[Tensor, "e q"] | None = None,
        background: Float[Tensor, "e q"] | None = None,
    ) -> Prediction:
        """A prediction whose strangeness is log background - log mean_c exp(logit_c).

        A mean, not a sum, so that it depends less on the number of classes. Without a background (a flat one) it ranks
        exactly as the paper's score, log sum_c exp(logit_c), turned round.
        """
        strangeness = math.log(logits.shape[-1]) - logits.logsumexp(-1)
        return cls(logits, strangeness if background is None else strangeness + background, energy)

    @property
    def way(self) -> int:
        return self.logits.shape[-1]

    def map(self, f: Callable[[Tensor], Tensor]) -> Prediction:
        """The same prediction with `f` applied to every tensor (indexing, moving, detaching)."""
        return Prediction(f(self.logits), f(self.strangeness), None if self.energy is None else f(self.energy))

    @staticmethod
    def cat(parts: Sequence[Prediction]) -> Prediction:
        """Predictions for more episodes, one after the other."""
        energies = [p.energy for p in parts if p.energy is not None]
        return Prediction(
            torch.cat([p.logits for p in parts]),
            torch.cat([p.strangeness for p in parts]),
            torch.cat(energies) if len(energies) == len(parts) else None,
        )


@dataclass(frozen=True, eq=False)
class Task(ABC):
    """Everything a support set taught: named tensors (the dataclass's tensor fields) and a static specification.

    It can be saved, moved and served without the method that made it; nothing about a task is stored on the method.
    """

    @abstractmethod
    def __call__(self, query: Tensor) -> Prediction:
        """Predict embedded queries `[e, q, ...]`."""

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def spec(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if not isinstance(v := getattr(self, f.name), Tensor)}

    def to(self: AnyTask, device: torch.device | str) -> AnyTask:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})


class Method(nn.Module, ABC):
    """Something that learns to make tasks. A subclass writes `embed` and `task`; the rest has sensible defaults."""

    any_way: ClassVar[bool] = True  # may be trained at one number of classes and used at another
    equivariant: ClassVar[bool] = True  # permuting the classes permutes the logits
    bounded: ClassVar[bool] = True  # its backbone carries the spectral bound
    ranked: ClassVar[bool] = False  # it takes a rank
    spec: dict[str, Any]  # how `build` made it: enough to make it again

    @abstractmethod
    def embed(self, x: Float[Tensor, "e *items"]) -> Float[Tensor, "e *features"]:
        """Inputs to features, over any leading dimensions, the first of them the episodes."""

    @abstractmethod
    def task(self, support: Float[Tensor, "e n k *features"], mask: Bool[Tensor, "e n k"]) -> Task:
        """Make a task of a checked support set, whose masked-out places hold zeros."""

    def adapt(self, support: Float[Tensor, "e n k *features"], mask: Bool[Tensor, "e n k"] | None = None) -> Task:
        """An embedded support set to a task. Unequal shots are a mask; what lies behind it is never read."""
        if mask is None:
            mask = torch.ones(support.shape[:3], dtype=torch.bool, device=support.device)
        if support.ndim < 4 or mask.shape != support.shape[:3]:
            raise FewsureError(
                f"support of shape {tuple(support.shape)} with mask {tuple(mask.shape)}: expected support "
                "[episodes, classes, shots, features] and mask [episodes, classes, shots]"
            )
        if mask.dtype != torch.bool or not support.is_floating_point():
            raise FewsureError(f"support of {support.dtype}, mask of {mask.dtype}: expected floating point and bool")
        # where, not multiplication: NaN behind the mask must not leak.
        support = torch.where(mask.reshape(*mask.shape, *[1] * (support.ndim - 3)), support, 0)
        if not self.training:  # reading values waits for the device, which the training loop must not
            _check_values(support, mask)
        return self.task(support, mask)

    def predict(self, episodes: Episodes) -> Prediction:
        """Embed, adapt and predict, support and queries in one pass through the backbone."""
        if episodes.support.shape[3:] != episodes.query.shape[2:]:
            raise FewsureError(
                f"support examples of shape {tuple(episodes.support.shape[3:])} and queries of shape "
                f"{tuple(episodes.query.shape[2:])}: expected the same features in both"
            )
        _, n, k = episodes.mask.shape
        items = torch.cat([episodes.support.flatten(1, 2), episodes.query], dim=1)
        features = self.embed(items)
        task = self.adapt(features[:, : n * k].unflatten(1, (n, k)), episodes.mask)
        return task(features[:, n * k :])

    def loss(self, episodes: Episodes) -> Float[Tensor, ""]:
        """What training minimises: by default the cross-entropy of the query logits (the paper's Algorithm 1, which
        trains on the mean logits, without sampling). Strangers (label -1) do not count."""
        logits = self.predict(episodes).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), episodes.labels.flatten(), ignore_index=-1)

    def fit(self, embeddings: Float[Tensor, "items d"], labels: Tensor) -> None:
        """A closed-form stage after, or in place of, training. Most methods have none."""


def _check_values(support: Tensor, mask: Tensor) -> None:
    if not mask.any(-1).all():
        episode, label = (~mask.any(-1)).nonzero()[0].tolist()
        raise FewsureError(
            f"class {label} of episode {episode} has no support example: give at least one, or leave the class out"
        )
    if not support.isfinite().all():
        episode, label, shot = (~support.isfinite().flatten(3).all(-1)).nonzero()[0].tolist()
        raise FewsureError(
            f"support example {shot} of class {label} (episode {episode}) holds NaN or infinity: "
            "remove it, or mask it out"
        )
