"""Softmax with temperature (Guo et al. 2017): the baselines' rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewsure.errors import FewsureError, unknown_name
from fewsure.rules.rule import Rule, known_logits, minimise, without_unknown
from fewsure.task import Prediction


@dataclass(frozen=True)
class Softmax(Rule):
    """softmax(logits / temperature).

    `fit(how="converged")` minimises the NLL of the known queries to convergence. `how="paper"` takes the paper's 50
    L-BFGS iterations at learning rate 0.001 from Guo's start of 1.5, which hardly move it.
    """

    temperature: float = 1.0

    name = "softmax"

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FewsureError(f"temperature {self.temperature}: expected a number above 0")

    def log_probs(self, prediction: Prediction) -> Float[Tensor, "e q classes"]:
        return without_unknown((prediction.logits / self.temperature).log_softmax(-1))

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        labels: Int[Tensor, "e q"],
        *,
        how: Literal["converged", "paper"] = "converged",
        **options: Any,
    ) -> Softmax:
        if how not in ("converged", "paper"):
            raise unknown_name("way to fit 'softmax'", how, ("converged", "paper"))
        logits, targets = known_logits(prediction, labels)

        def nll(temperature: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(logits / temperature, targets)

        if how == "converged":
            (log_temperature,) = minimise(lambda x: nll(x.exp()), [0.0])
            return cls(math.exp(log_temperature), **options)
        temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([temperature], lr=0.001, max_iter=50)

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = nll(temperature)
            value.backward()
            return value

        with torch.enable_grad():
            optimiser.step(closure)
        return cls(temperature.item(), **options)
