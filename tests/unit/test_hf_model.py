"""Building, loading, checking and exporting models; logprobs of packed rows against the model's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.config import TokenizerConfig
from engines.errors import ConfigError, EngineError
from engines.hf import model as hf_model
from engines.hf.batch import micro_batches
from engines.hf.model import LoadedModel, Policy
from engines.rows import Row
from tests.tiny_llama import VOCABULARY, model_config

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "mistral": SMALL | {"num_key_value_heads": 2, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi": SMALL | {"partial_rotary_factor": 0.5},
}


def build(family: str, **changes: Any) -> LoadedModel:
    architecture = {"model_type": family} | FAMILIES[family] | changes
    config = model_config().model_copy(update={"architecture": architecture})
    return hf_model.load(config, None, seed=1)


def random_rows(count: int = 7, longest: int = 20) -> list[Row]:
    random = np.random.default_rng(3)
    lengths = random.integers(2, longest, count)
    return [Row(random.integers(0, VOCABULARY, length), np.arange(1, length)) for length in lengths]


def reference_logprobs(loaded: LoadedModel, row: Row, temperature: float) -> torch.Tensor:
    """From the full logits of the row alone."""
    ids = torch.from_numpy(row.tokens)
    logits = loaded.model(input_ids=ids[None]).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[1:, None]).squeeze(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "rows"])
@torch.no_grad()
def test_logprobs_do_not_depend_on_padding_or_packing(family: str, layout: Any) -> None:
    """Absolute and rotary positions, grouped queries, partial rotary with a bias in the head, a window of 4 tokens."""
    loaded, rows = build(family), random_rows()
    expected = [reference_logprobs(loaded, row, 0.8) for row in rows]
    policy = Policy(loaded.model, 0.8, torch.float32)
    assert policy.layout == "packed"
    if layout == "rows":
        loaded.model.set_attn_implementation("sdpa")
    for batch in micro_batches(rows, 64, layout):
        logprobs, _ = policy.logprobs(batch)
        ours = logprobs.split([len(rows[index].actions) for index in batch.rows])
        for index, values in zip(batch.rows, ours, strict=True):
            torch.testing.assert_close(values, expected[index], rtol=1e-5, atol=1e-5)


def test_model_whose_head_is_not_one_product_is_refused() -> None:
    config = model_config().model_copy(
        update={"architecture": SMALL | {"model_type": "granite", "num_key_value_heads": 2, "logits_scaling": 8.0}}
    )
    loaded = hf_model.load(config, None, seed=0)
    with torch.no_grad():  # at initialisation logits are near 0, and scaling them shows little
        loaded.model.get_input_embeddings().weight.mul_(50)  # type: ignore[operator,union-attr]
    with pytest.raises(EngineError, match=r"GraniteForCausalLM is not supported.*soft cap, scaling"):
        Policy(loaded.model, 1.0, torch.float32)


def test_equal_seeds_build_equal_weights_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (hf_model.load(model_config(), None, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_exported_folder_gives_equal_logits_to_the_bit(tied: bool, tmp_path: Path) -> None:
    loaded = build("llama", tie_word_embeddings=tied, attention_dropout=0.1)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = loaded.model(input_ids=ids).logits
    Policy(loaded.model, 1.0, torch.float32)
    hf_model.save(loaded, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(read(input_ids=ids).logits, expected)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attention_dropout"] == 0.1
    assert (read.lm_head.weight.data_ptr() == read.model.embed_tokens.weight.data_ptr()) == tied
    assert "trinity" not in (tmp_path / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("abc") == loaded.tokenizer.encode("abc")


def test_a_folder_in_bfloat16_is_trained_in_float32(tmp_path: Path) -> None:
    loaded = build("llama")
    hf_model.save(loaded, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    read = hf_model.load(model_config(), tmp_path, seed=0)
    assert {parameter.dtype for parameter in read.model.parameters()} == {torch.float32}


def test_stop_tokens_are_those_of_the_tokenizer_and_the_generation_config() -> None:
    loaded = build("llama")
    assert loaded.stop_token_ids == (loaded.tokenizer.eos_token_id,)
    assert loaded.pad_token_id == loaded.tokenizer.pad_token_id


def test_twin_is_equal_and_shares_no_memory() -> None:
    loaded = build("llama")
    twin = hf_model.twin(loaded)
    for (name, one), (_, two) in zip(loaded.model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.data_ptr() != two.data_ptr(), name
    assert twin.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"model_type": "lamma"}, ["model_type = 'lamma'", "did you mean llama"]),
        ({"model_type": "llama", "hiden_size": 8}, ["architecture.hiden_size", "llama", "did you mean hidden_size"]),
        ({"model_type": "llama"} | SMALL | {"num_attention_heads": 5}, ["cannot be built", "32"]),
    ],
)
def test_bad_architectures_are_named(architecture: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        hf_model.load(model_config().model_copy(update={"architecture": architecture}), None, seed=0)
    for word in words:
        assert word in str(error.value)


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len = 300 is more than the 128 positions"):
        hf_model.load(model_config(max_model_len=300), None, seed=0)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    hf_model.save(build("llama"), tmp_path)
    larger = TokenizerConfig(kind="byte")
    from engines.text import build_tokenizer

    build_tokenizer(larger).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"ids up to 260, the embedding only {VOCABULARY} rows.*another model"):
        hf_model.load(model_config(), tmp_path, seed=0)


def test_folder_errors_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*model\.model_path"):
        hf_model.load(model_config(), tmp_path / "nowhere", seed=0)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf_model.load(model_config(), tmp_path, seed=0)
    whole = tmp_path / "whole"
    hf_model.save(build("llama"), whole)
    for name, error, words in [
        ("tokenizer.json", ConfigError, "no tokenizer that can be read"),
        ("model.safetensors", EngineError, "cannot be loaded"),
    ]:
        broken = tmp_path / f"without_{name}"
        shutil.copytree(whole, broken)
        (broken / name).unlink()
        with pytest.raises(error, match=words):
            hf_model.load(model_config(), broken, seed=0)


def test_cut_weights_are_refused(tmp_path: Path) -> None:
    hf_model.save(build("llama"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EngineError, match="cannot be loaded"):
        hf_model.load(model_config(), tmp_path, seed=0)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    hf_model.save(build("llama", num_hidden_layers=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(EngineError, match="lacks 9 tensors of its model"):
        hf_model.load(model_config(), tmp_path, seed=0)
