"""The paper's rule: the mean softmax of normal logits whose spread is the scaled energy (Eqs. 10 to 12)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewsure.errors import FewsureError, unknown_name
from fewsure.metrics import expected_calibration_error
from fewsure.rules.rule import Rule, draw_some, known_logits, only, without_unknown
from fewsure.task import Prediction

SEED = 20220425
CHUNK = 1 << 18  # numbers held at once: what a cache holds
FIT_QUERIES = 4_000  # at most, of the known and of the strangers: a fit of one number asks the rule many times


@dataclass(frozen=True)
class LogitNormal(Rule):
    """`E[softmax(w + h eps)]`, eps standard normal, `h = max(floor, E / T)`.

    The paper calls h both the deviation and the variance of the logits. `scale="std"`, the default, lands on its toy
    figures at T = 1; `scale="var"` is the other reading. `sampler="sobol"` integrates over fixed quasi-random nodes,
    shared by all queries and assigned to classes in the order of their logits, so that the answer is deterministic and
    does not depend on the order of the classes; `sampler="monte-carlo"` draws anew for every query, as the paper does.

    `fit(how="search")` is the paper's search: T = 1, 2, ... until the sampled NLL is no worse than the deterministic
    one, or `cap`. `how="ece"` takes the T whose ID ECE is nearest `target_ece` (in points). `how="strangers"`
    minimises, over known queries and strangers equally, the NLL of the label and the cross-entropy to the uniform.
    """

    temperature: float = 1.0
    scale: Literal["std", "var"] = "std"
    sampler: Literal["sobol", "monte-carlo"] = "sobol"
    nodes: int = 256
    floor: float = 1e-6

    name = "logit-normal"
    needs_energy = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FewsureError(f"temperature {self.temperature}: expected a number above 0")
        if self.scale not in ("std", "var") or self.sampler not in ("sobol", "monte-carlo"):
            raise FewsureError(
                f"scale {self.scale!r}, sampler {self.sampler!r}: expected 'std' or 'var', 'sobol' or 'monte-carlo'"
            )
        if self.nodes < 1:
            raise FewsureError(f"{self.nodes} nodes: expected 1 or more")

    def deviation(self, energy: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """h(E) of the paper, as a standard deviation of the logits."""
        h = (energy / self.temperature).clamp_min(self.floor)
        return h if self.scale == "std" else h.sqrt()

    def log_probs(self, prediction: Prediction) -> Float[Tensor, "e q classes"]:
        assert prediction.energy is not None
        way = prediction.way
        logits, order = prediction.logits.flatten(0, 1).sort(-1, descending=True)
        deviation = self.deviation(prediction.energy.flatten())
        noise = _sobol_nodes(way, self.nodes).to(logits)
        generator = torch.Generator(logits.device).manual_seed(SEED)
        parts = []
        size = max(1, CHUNK // (self.nodes * way))
        for w, h in zip(logits.split(size), deviation.split(size), strict=True):
            if self.sampler == "monte-carlo":
                shape = (len(w), way, self.nodes)
                noise = torch.randn(shape, generator=generator, device=w.device, dtype=w.dtype)
            # Nodes last: reductions over the few classes then run along contiguous memory, several times faster.
            sampled = torch.addcmul(w[:, :, None], h[:, None, None], noise).log_softmax(1)
            parts.append(sampled.logsumexp(-1))
        sorted_log_probs = torch.cat(parts)
        # Divided by its own sum rather than by the number of nodes: the same, without the rounding.
        log_probs = torch.empty_like(sorted_log_probs).scatter_(-1, order, sorted_log_probs.log_softmax(-1))
        return without_unknown(log_probs.unflatten(0, prediction.logits.shape[:2]))

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        labels: Int[Tensor, "e q"],
        *,
        how: Literal["search", "ece", "strangers"] = "search",
        cap: int = 20,
        target_ece: float | None = None,
        **options: Any,
    ) -> LogitNormal:
        if how not in ("search", "ece", "strangers"):
            raise unknown_name("way to fit 'logit-normal'", how, ("search", "ece", "strangers"))
        start = cls(**options)
        prediction, labels = thinned(prediction, labels)
        if how == "search":
            return start._search(prediction, labels, cap)
        if how == "ece" and target_ece is None:
            raise FewsureError("how='ece' needs target_ece, the ID ECE to come near, in points")
        if how == "strangers" and not (labels < 0).any():
            raise FewsureError("how='strangers' needs strangers: draw calibration episodes with some")

        def cost(rule: LogitNormal) -> float:
            if target_ece is not None and how == "ece":
                return abs(rule.id_ece(prediction, labels) - target_ece)
            return rule._mixed(prediction, labels)

        # One dimension: a coarse grid over log10 T, then a fine one about its best.
        centre = 0.5
        for reach, count in ((2.5, 21), (0.25, 11)):
            grid = torch.linspace(centre - reach, centre + reach, count, dtype=torch.float64).tolist()
            centre = min(grid, key=lambda x: cost(replace(start, temperature=10**x)))
        return replace(start, temperature=10**centre)

    def _search(self, prediction: Prediction, labels: Int[Tensor, "e q"], cap: int) -> LogitNormal:
        rules = (replace(self, temperature=float(temperature)) for temperature in range(1, cap + 1))
        at_cap = replace(self, temperature=float(cap))
        return next((rule for rule in rules if rule.no_worse_than_softmax(prediction, labels)), at_cap)

    def no_worse_than_softmax(self, prediction: Prediction, labels: Int[Tensor, "e q"]) -> bool:
        """The criterion of the paper's search: the sampled NLL is no worse than that of the deterministic logits."""
        logits, targets = known_logits(prediction, labels)
        return self.id_nll(prediction, labels) <= torch.nn.functional.cross_entropy(logits, targets).item()

    def id_nll(self, prediction: Prediction, labels: Int[Tensor, "e q"]) -> float:
        """NLL of the known queries."""
        known = labels >= 0
        log_probs = self(only(prediction, known))[0]
        return torch.nn.functional.nll_loss(log_probs, labels[known]).item()

    def id_ece(self, prediction: Prediction, labels: Int[Tensor, "e q"]) -> float:
        """Pooled 15-bin ECE of the known queries, in points."""
        known = labels >= 0
        confidence, guess = self(only(prediction, known))[0].exp().max(-1)
        return expected_calibration_error(confidence.cpu().numpy(), (guess == labels[known]).cpu().numpy())

    def _mixed(self, prediction: Prediction, labels: Int[Tensor, "e q"]) -> float:
        strangers = self(only(prediction, labels < 0))[..., :-1]
        return (self.id_nll(prediction, labels) - strangers.mean().item()) / 2


def thinned(prediction: Prediction, labels: Int[Tensor, "e q"]) -> tuple[Prediction, Int[Tensor, "1 kept"]]:
    """At most FIT_QUERIES of the known queries and of the strangers, drawn evenly, as one episode."""
    keep = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
    for kind in (labels >= 0, labels < 0):
        keep[draw_some(kind.flatten().nonzero().squeeze(-1), FIT_QUERIES)] = True
    keep = keep.view_as(labels)
    return only(prediction, keep), labels[keep].unsqueeze(0)


@lru_cache(maxsize=64)
def _sobol_nodes(way: int, nodes: int) -> Float[Tensor, "way nodes"]:
    uniform = torch.quasirandom.SobolEngine(way, scramble=True, seed=SEED).draw(nodes, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9)).float().T.contiguous()
