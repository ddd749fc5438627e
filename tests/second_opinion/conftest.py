"""Fixtures of the comparisons with TRL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.hf import model as hf_model
from tests.tiny_llama import model_config


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small llama as an HF folder."""
    path = tmp_path_factory.mktemp("second_opinion") / "model"
    hf_model.save(hf_model.load(model_config(), None, 42), path)
    return path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products of this size gain nothing from a second thread, and lose much where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
