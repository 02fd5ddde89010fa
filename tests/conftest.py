"""While the tests run, every function of the package is checked against its annotations, shapes included."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings

jaxtyping.install_import_hook("fewsure", "beartype.beartype")  # before anything imports fewsure
torch.set_num_threads(1)
settings.register_profile("fewsure", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("fewsure")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations go unchecked, as they do for users: for tests of what the package itself says of bad input."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, hardly trained, calibrated and evaluated. Tests that write to it take a copy."""
    from fewsure.calibrate import calibrate
    from fewsure.config import CalibrateConfig, EvaluateConfig, TrainConfig
    from fewsure.evaluate import evaluate
    from fewsure.train import train

    folder = tmp_path_factory.mktemp("tiny") / "run"
    train(TrainConfig(train_tasks=160, tasks_per_step=8, validate_every=10, validation_tasks=8), folder)
    calibrate(folder, CalibrateConfig(episodes=6))
    evaluate(folder, EvaluateConfig(episodes=4, stranger_episodes=1))
    return folder
