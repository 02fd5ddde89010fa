"""The open-set rule: an explicit "unknown", by Bayes' rule from strangeness."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewsure.errors import FewsureError
from fewsure.rules.rule import Rule, known_logits, minimise
from fewsure.task import Prediction


@dataclass(frozen=True)
class OpenSet(Rule):
    """`u = sigmoid(a (s - b) + logit(pi))`, `p(class) = (1 - u) softmax(beta w)`, `p(unknown) = u`.

    `w` are the logits, `s` the strangeness and `pi` the share of strangers the user expects: a prior, to be changed at
    prediction time without refitting (`at_prior`). The likelihood factorises: `beta` is a temperature fitted on the
    known queries; `a > 0` and `b` are a logistic regression of known against unknown at equal weights, with Platt's
    smoothed targets, so that separable data cannot send them to infinity.

    >>> rule = OpenSet(beta=1.0, a=1.0, b=0.0, pi=0.5)
    >>> rule(Prediction.of(torch.zeros(1, 1, 3))).exp()  # as near the classes as the unknown
    tensor([[[0.1667, 0.1667, 0.1667, 0.5000]]])
    """

    beta: float
    a: float
    b: float
    pi: float = 0.05

    name = "open-set"
    needs_strangers = True

    def __post_init__(self) -> None:
        if not 0 < self.pi < 1:
            raise FewsureError(f"prior share of strangers pi = {self.pi}: expected a number between 0 and 1")
        if not (self.beta > 0 and self.a > 0):
            raise FewsureError(f"open-set rule with beta = {self.beta}, a = {self.a}: expected both above 0")

    def log_probs(self, prediction: Prediction) -> Float[Tensor, "e q classes"]:
        odds = self.a * (prediction.strangeness - self.b) + math.log(self.pi / (1 - self.pi))
        classes = (self.beta * prediction.logits).log_softmax(-1)
        known = torch.nn.functional.logsigmoid(-odds).unsqueeze(-1)
        return torch.cat([classes + known, torch.nn.functional.logsigmoid(odds).unsqueeze(-1)], -1)

    def at_prior(self, pi: float) -> OpenSet:
        return replace(self, pi=pi)

    @classmethod
    def fit(cls, prediction: Prediction, labels: Int[Tensor, "e q"], *, pi: float = 0.05, **options: Any) -> OpenSet:
        logits, targets = known_logits(prediction, labels)
        beta = 1.0
        if logits.shape[-1] > 1:  # one class alone has no temperature
            (log_beta,) = minimise(lambda x: torch.nn.functional.cross_entropy(x.exp() * logits, targets), [0.0])
            beta = math.exp(log_beta)
        a, b = _fit_logistic(prediction.strangeness.double(), labels < 0)
        return cls(beta, a, b, pi, **options)


def _fit_logistic(strangeness: Float[Tensor, "e q"], unknown: Tensor) -> tuple[float, float]:
    known_s, unknown_s = strangeness[~unknown], strangeness[unknown]
    if len(unknown_s) == 0:
        raise FewsureError("the open-set rule needs strangers to be fitted on: draw calibration episodes with some")
    # Standardised by the quartiles, not by the deviation, which a few far strangers would blow up.
    ordered = strangeness.flatten().sort().values
    low, centre, high = (ordered[int(q * (len(ordered) - 1))].item() for q in (0.25, 0.5, 0.75))
    spread = max(high - low, 1e-6)
    high_target, low_target = (len(unknown_s) + 1) / (len(unknown_s) + 2), 1 / (len(known_s) + 2)

    def loss(x: Tensor) -> Tensor:
        log_a, b = x
        losses = []
        for s, target in ((known_s, low_target), (unknown_s, high_target)):
            odds = log_a.exp() * ((s - centre) / spread - b)
            losses.append(torch.nn.functional.binary_cross_entropy_with_logits(odds, torch.full_like(s, target)))
        return losses[0] + losses[1]

    log_a, b = minimise(loss, [0.0, 0.0])
    return math.exp(max(log_a, -30.0)) / spread, centre + spread * b
