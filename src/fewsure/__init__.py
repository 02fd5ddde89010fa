"""fewsure: few-shot classification that is sure only when it should be.

A **method** turns a labelled support set into a **task**; a task turns queries into a **prediction**; a **rule** turns
a prediction into probabilities.

>>> import fewsure
>>> method = fewsure.build("protomahalanobis", rank=1)
>>> episodes = fewsure.source("moons").draw(2, fewsure.generator(0, "example"))
>>> prediction = method.eval().predict(episodes)
>>> prediction.logits.shape  # two tasks, 100 queries, two classes
torch.Size([2, 100, 2])
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fewsure.calibrate import load_rule as load_rule
    from fewsure.data import source as source
    from fewsure.episodes import Episodes as Episodes
    from fewsure.episodes import generator as generator
    from fewsure.errors import FewsureError as FewsureError
    from fewsure.methods import build as build
    from fewsure.persist import load as load
    from fewsure.persist import save as save
    from fewsure.rules import LogitNormal as LogitNormal
    from fewsure.rules import OpenSet as OpenSet
    from fewsure.rules import Softmax as Softmax
    from fewsure.rules import split_unknown as split_unknown
    from fewsure.task import Method as Method
    from fewsure.task import Prediction as Prediction
    from fewsure.task import Task as Task

# Lazy, so that `fewsure --help` does not wait for torch.
_PUBLIC = {
    "Episodes": "episodes",
    "FewsureError": "errors",
    "LogitNormal": "rules",
    "Method": "task",
    "OpenSet": "rules",
    "Prediction": "task",
    "Softmax": "rules",
    "Task": "task",
    "build": "methods",
    "generator": "episodes",
    "load": "persist",
    "load_rule": "calibrate",
    "save": "persist",
    "source": "data",
    "split_unknown": "rules",
}
__all__ = [
    "Episodes",
    "FewsureError",
    "LogitNormal",
    "Method",
    "OpenSet",
    "Prediction",
    "Softmax",
    "Task",
    "__version__",
    "build",
    "generator",
    "load",
    "load_rule",
    "save",
    "source",
    "split_unknown",
]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(f"fewsure.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'fewsure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
