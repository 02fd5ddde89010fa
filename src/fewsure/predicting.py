"""Episodes to predictions: the one path that calibration and evaluation share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from fewsure.episodes import Episodes, Source
from fewsure.task import Method, Prediction

CHUNK_QUERIES = 20_000  # queries predicted at once


def predict_all(
    method: Method, source: Source, *batches: Episodes, device: torch.device | str = "cpu"
) -> Iterator[tuple[Prediction, Int[Tensor, "e q"]]]:
    """Predict episodes a few at a time, as the method was trained or loaded; results come back to the CPU.

    Under `no_grad`, not `inference_mode`: some methods' `adapt` needs gradients of its own.
    """
    method = method.to(device).eval()
    embed = source.embedder(lambda x: method.embed(x.to(device)))
    with torch.no_grad():
        for episodes in batches:
            for part in episodes.chunks(max(1, CHUNK_QUERIES // episodes.labels.shape[1])):
                embedded = part.map(embed)
                task = method.adapt(embedded.support, part.mask.to(device))
                yield task(embedded.query).map(lambda t: t.cpu()), part.labels.cpu()
