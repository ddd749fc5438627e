"""The models and sequences that both sides of a comparison work on, written once to a folder.

The folder is an HF model folder (random weights, char tokenizer) with `batch.json` beside it. Importing this needs no
torch; `write_workload` does.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from engines.config import TokenizerConfig

TOKENIZER = TokenizerConfig(kind="char", phrases=("Spell this word backward (example: sun -> nus): ",))
GROUP_SIZE = 8
PROMPT_TOKENS = 16
LEARNING_RATE = 1e-6
SEED = 7


def _llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }


LARGE = _llama(hidden=512, layers=6, heads=8, inner=1408, vocabulary=32_000)
"""35.7M parameters."""
TINY = _llama(hidden=128, layers=4, heads=4, inner=384, vocabulary=102)
"""0.87M parameters."""
SMALL = _llama(hidden=96, layers=2, heads=4, inner=288, vocabulary=102)
"""0.25M parameters: the model of the spelling recipe."""


def heavy_tailed(count: int, median: float, sigma: float, shortest: int = 50, longest: int = 500) -> list[int]:
    """Lengths at the quantiles of a lognormal distribution, clipped, in a fixed shuffled order."""
    quantiles = (NormalDist().inv_cdf((index + 0.5) / count) for index in range(count))
    lengths = [min(longest, max(shortest, round(median * math.exp(sigma * z)))) for z in quantiles]
    return [int(length) for length in np.random.default_rng(SEED).permutation(lengths)]


LENGTHS_LARGE = heavy_tailed(16, median=84.8, sigma=1.0)
"""16 sequences, 2,164 tokens, 1,908 of them responses; padded to the longest, 27% of the tokens are useful."""
LENGTHS_TINY = heavy_tailed(64, median=105.1, sigma=0.9)
"""64 sequences, 9,604 tokens; padded to the longest, 30% of the tokens are useful."""
LENGTHS_UNIFORM = [135] * 16
"""16 sequences, 2,160 tokens, no padding needed."""


@dataclass(frozen=True)
class Row:
    """One stored sequence: what a sampler would have produced, and its reward."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reward: float


def write_workload(folder: Path, model: dict[str, Any], lengths: list[int]) -> None:
    """Random weights and rows of these total lengths; rows of one group share a prompt; logprobs in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from engines.text import build_tokenizer

    tokenizer = build_tokenizer(TOKENIZER)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    set_seed(SEED)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model, **special))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [asdict(row) for row in _rows(network, model["vocab_size"], lengths)]
    (folder / "batch.json").write_text(json.dumps(rows))


def read_rows(folder: Path) -> list[Row]:
    """The rows that `write_workload` wrote."""
    return [Row(**row) for row in json.loads((folder / "batch.json").read_text())]


def _rows(network: Any, vocabulary: int, lengths: list[int]) -> list[Row]:
    import torch

    random = np.random.default_rng(SEED)
    first_plain_id = 6
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        shared = random.integers(first_plain_id, vocabulary, PROMPT_TOKENS).tolist()
        prompt = rows[-1].prompt if index % GROUP_SIZE else shared
        response = random.integers(first_plain_id, vocabulary, length - PROMPT_TOKENS).tolist()
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = network(ids).logits[0, PROMPT_TOKENS - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[0, PROMPT_TOKENS:, None])[:, 0].tolist()
        rows.append(Row(prompt, response, logprobs, reward=float(random.random())))
    return rows
