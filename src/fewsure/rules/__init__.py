"""The table of rules: a rule turns a prediction into log-probabilities of N classes and of "unknown".

A new rule is one file beside this one and one row here; the contract tests pick it up.
"""

from __future__ import annotations

from typing import Any

from fewsure.errors import FewsureError, unknown_name
from fewsure.rules.logitnormal import LogitNormal
from fewsure.rules.openset import OpenSet
from fewsure.rules.rule import Rule, fold_unknown, split_unknown
from fewsure.rules.softmax import Softmax

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Softmax, LogitNormal, OpenSet)}

__all__ = ["RULES", "LogitNormal", "OpenSet", "Rule", "Softmax", "build_rule", "fold_unknown", "split_unknown"]


def build_rule(name: str, **params: Any) -> Rule:
    """A rule of the table from its parameters.

    >>> build_rule("softmax", temperature=2.0)
    Softmax(temperature=2.0)
    """
    if name not in RULES:
        raise unknown_name("rule", name, RULES)
    try:
        return RULES[name](**params)
    except TypeError as error:
        raise FewsureError(f"rule {name!r} does not take these parameters ({error})") from error
