"""Fixtures of the comparisons with TRL."""

from pathlib import Path

import pytest

from engines.hf import model as hf_model
from tests.tiny_llama import model_config


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small llama as an HF folder."""
    path = tmp_path_factory.mktemp("second_opinion") / "model"
    hf_model.save(hf_model.load(model_config(), None, 42), path)
    return path
