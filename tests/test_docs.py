"""Every example in a docstring runs, and says what it says."""

import doctest
import inspect
import pkgutil
from importlib import import_module

import pytest

import fewsure

MODULES = [
    "fewsure",
    *(m.name for m in pkgutil.walk_packages(fewsure.__path__, "fewsure.") if "__main__" not in m.name),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted == inspect.getsource(module).count(">>> ")  # none was overlooked


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert import_module(name).__doc__.strip()


@pytest.mark.parametrize(
    "name", ["fewsure", "fewsure.data", "fewsure.methods", "fewsure.rules", "fewsure.rules.openset", "fewsure.metrics"]
)
def test_what_a_newcomer_meets_first_has_an_example(name: str) -> None:
    assert ">>> " in inspect.getsource(import_module(name))
