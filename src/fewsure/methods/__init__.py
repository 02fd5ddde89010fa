"""The table of methods. A new method is one file beside this one and one row here; the contract tests pick it up."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fewsure.backbones import build_backbone
from fewsure.errors import FewsureError, unknown_name
from fewsure.task import Method

METHODS = {
    "protonet": "protonet:Protonet",
    "protonet-sn": "protonet:ProtonetSN",
    "protoddu": "protoddu:ProtoDDU",
    "protosngp": "protosngp:ProtoSNGP",
    "protomahalanobis": "protomahalanobis:ProtoMahalanobis",
}
BOUND = 3.0  # the paper's c


def method_class(name: str) -> type[Method]:
    """The class behind a name of the table."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    module, cls = METHODS[name].split(":")
    return getattr(import_module(f"fewsure.methods.{module}"), cls)


def build(
    name: str,
    *,
    rank: int | None = None,
    backbone: str = "fc",
    shape: tuple[int, ...] = (2,),
    way: int | None = None,
    **options: Any,
) -> Method:
    """A fresh method by name, for inputs of a shape; `way` matters only to a method that is bound to one.

    >>> build("protomahalanobis", rank=4).encoder.rank
    4
    """
    cls = method_class(name)
    bound_to: dict[str, int] = {}
    if cls.ranked:
        rank = bound_to["rank"] = 1 if rank is None else rank
    elif rank is not None:
        raise FewsureError(f"method {name!r} has no rank, but was given {rank}: leave it out")
    if cls.any_way:
        way = None
    elif way is None:
        raise FewsureError(f"method {name!r} is bound to one number of classes: give way")
    else:
        bound_to["way"] = way
    network = build_backbone(backbone, shape, c=BOUND if cls.bounded else None)
    try:
        method = cls(network, **bound_to, **options)
    except TypeError as error:
        raise FewsureError(f"method {name!r} does not take these options ({error})") from error
    except (ValueError, RuntimeError) as error:  # a width that heads do not divide, a rank beyond the memory
        asked = ", ".join(f"{key} = {value!r}" for key, value in (bound_to | options).items())
        raise FewsureError(f"method {name!r} cannot be made with {asked}: {str(error).splitlines()[0]}") from error
    told = {"rank": rank, "backbone": backbone, "shape": list(shape), "way": way, "options": options}
    method.spec = {"method": name, **told}
    return method
