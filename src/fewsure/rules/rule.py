"""What a rule is, and what the rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewsure.errors import FewsureError
from fewsure.task import Prediction


@dataclass(frozen=True)
class Rule(ABC):
    """A frozen bundle of numbers that turns predictions into log-probabilities. It owns its formula and its fit."""

    name: ClassVar[str]
    needs_energy: ClassVar[bool] = False
    needs_strangers: ClassVar[bool] = False  # to be fitted

    def __call__(self, prediction: Prediction) -> Float[Tensor, "e q classes"]:
        """Log-probabilities of the N classes and, last, of "unknown" (minus infinity for a rule without one)."""
        if self.needs_energy and prediction.energy is None:
            raise FewsureError(
                f"rule {self.name!r} needs an energy and this prediction has none: its method has no distances; "
                "use 'softmax' or 'open-set'"
            )
        return self.log_probs(prediction)

    @abstractmethod
    def log_probs(self, prediction: Prediction) -> Float[Tensor, "e q classes"]:
        """The formula, for a prediction that has what the rule needs."""

    @classmethod
    @abstractmethod
    def fit(cls, prediction: Prediction, labels: Int[Tensor, "e q"], **options: Any) -> Rule:
        """The rule fitted on predictions for calibration episodes; strangers are labelled -1."""

    def at_prior(self, pi: float) -> Rule:
        """The same rule for another expected share of strangers; nothing changes for a rule without an unknown."""
        return self

    def params(self) -> dict[str, Any]:
        return asdict(self)


def fold_unknown(log_probs: Float[Tensor, "e q classes"]) -> Float[Tensor, "e q n"]:
    """Spread the unknown mass evenly over the N labels: for the paper's tables, which have no "unknown".

    >>> fold_unknown(torch.tensor([[[0.6, 0.2, 0.2]]]).log()).exp()
    tensor([[[0.7000, 0.3000]]])
    """
    classes, unknown = log_probs[..., :-1], log_probs[..., -1:]
    way = torch.tensor(float(classes.shape[-1]), device=log_probs.device)
    return torch.logaddexp(classes, unknown - way.log())


def split_unknown(
    log_probs: Float[Tensor, "e q classes"],
) -> tuple[Float[Tensor, "e q n"], Float[Tensor, "e q"]]:
    """Log-probability of each class *given that the query is known*, and that it is unknown: two things, apart.

    >>> given_known, unknown = split_unknown(torch.tensor([[[0.6, 0.2, 0.2]]]).log())
    >>> given_known.exp(), unknown.exp()
    (tensor([[[0.7500, 0.2500]]]), tensor([[0.2000]]))
    """
    return log_probs[..., :-1].log_softmax(-1), log_probs[..., -1]


def without_unknown(log_probs: Float[Tensor, "e q n"]) -> Float[Tensor, "e q classes"]:
    """Append an unknown of probability zero."""
    return torch.cat([log_probs, torch.full_like(log_probs[..., :1], -torch.inf)], -1)


def only(prediction: Prediction, keep: Bool[Tensor, "e q"]) -> Prediction:
    """Some of the queries, as one episode of their own."""
    return prediction.map(lambda t: t[keep].unsqueeze(0))


def draw_some(places: Int[Tensor, " n"], count: int) -> Int[Tensor, " some"]:
    """At most `count` of some places, always the same ones. Drawn at random: a stride would fall in step with the rows
    of a grid, or with the order in which a source lists its queries."""
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    return places[order[:count].sort().values.to(places.device)]


def known_logits(prediction: Prediction, labels: Int[Tensor, "e q"]) -> tuple[Float[Tensor, "k n"], Int[Tensor, " k"]]:
    """Logits and labels of the known queries, in float64 for fitting."""
    known = labels >= 0
    if not known.any():
        raise FewsureError("no known query to fit a rule on: calibration episodes need queries of their own classes")
    return prediction.logits[known].double(), labels[known]


def minimise(f: Callable[[Tensor], Tensor], start: list[float], *, iterations: int = 200) -> list[float]:
    """Minimise a smooth function of a few numbers by L-BFGS with a line search."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [x], max_iter=iterations, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = f(x)
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(closure)
    return x.detach().tolist()
