"""The Gaussian head against torch's low-rank Gaussian and the paper's recursion: 5 classes, 75 queries, no gradients.

`whole` starts from mean, diagonal and factors; `query` has a task (or a distribution) at hand and only asks it. Before
anything is timed, all three must give the same differences between the logits of the classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from fewsure import reference
from fewsure.gaussian import GaussianTask
from timing import arguments, ratios, show

CLASSES, QUERIES = 5, 75
SIZES = ((1, 64), (32, 64), (1, 1600))  # episodes at once, features
RANKS = (1, 8)
TOLERANCE = 1e-4  # of a difference of logits, relative to the largest logit


def check(logits: dict[str, Tensor]) -> None:
    """The competitors agree, up to what all classes of a query share."""
    names = list(logits)
    first, *others = (value - value[..., :1] for value in logits.values())
    scale = max(value.abs().max() for value in logits.values())
    for name, other in zip(names[1:], others, strict=True):
        error = ((first - other).abs().max() / scale).item()
        if not error < TOLERANCE:
            raise SystemExit(f"{name} differs from {names[0]} by {error:.2g} of the largest logit")


@torch.no_grad()
def row(episodes: int, d: int, rank: int, repeats: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(d + rank)
    mean = torch.randn(episodes, CLASSES, d, generator=generator)
    diag = 0.1 + 0.9 * torch.rand(episodes, CLASSES, d, generator=generator)
    factors = torch.randn(episodes, CLASSES, d, rank, generator=generator)
    noise = torch.randn(episodes, QUERIES, d, generator=generator)
    query = mean.repeat_interleave(QUERIES // CLASSES, 1) + noise

    def torch_logits(distribution: LowRankMultivariateNormal) -> Tensor:
        return distribution.log_prob(query.unsqueeze(2))

    def low_rank() -> LowRankMultivariateNormal:
        # One batch of classes for every query; without torch's checks, which would cost it time.
        return LowRankMultivariateNormal(*(t.unsqueeze(1) for t in (mean, factors, diag)), validate_args=False)

    ready_task, ready_low_rank = GaussianTask(mean, diag, factors), low_rank()
    whole = {
        "head": lambda: GaussianTask(mean, diag, factors)(query).logits,
        "LowRankMultivariateNormal": lambda: torch_logits(low_rank()),
        "recursion": lambda: reference.logits_and_energy(query, mean, diag, factors)[0],
    }
    ready = {"head": lambda: ready_task(query).logits, "torch": lambda: torch_logits(ready_low_rank)}
    check({name: f() for name, f in whole.items()})
    of_whole, of_query = ratios(whole, to="head", repeats=repeats), ratios(ready, to="head", repeats=repeats)
    return {
        "episodes": episodes,
        "d": d,
        "rank": rank,
        "LowRankMultivariateNormal / head, whole": of_whole["LowRankMultivariateNormal"],
        "LowRankMultivariateNormal / head, query": of_query["torch"],
        "recursion / head, whole": of_whole["recursion"],
    }


def main() -> None:
    told = arguments("The Gaussian head against LowRankMultivariateNormal and the paper's recursion.", repeats=15)
    rows = [row(episodes, d, rank, told.repeats) for episodes, d in SIZES for rank in RANKS]
    show("How many times as long as the Gaussian head: median (quartiles)", rows, told.out)


if __name__ == "__main__":
    main()
