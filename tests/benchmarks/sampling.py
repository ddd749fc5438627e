"""The sampler against `transformers.generate`: same weights, same prompts, temperature 1, a real stop token.

The shape of the spelling recipe: 0.25M parameters, 64 prompts, 8 samples each, at most 12 new tokens. The model is
first taught for a few seconds to answer with a word of 3 to 7 letters and to stop, so that response lengths are those
of real use. `generate` gets one left-padded batch with its default cache and returns ids only; ours also returns
logprobs. Tokens count up to the stop token, for both.
"""

from __future__ import annotations

import random
import statistics
import string
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from engines.hf.sampler import HfSampler
from engines.text import Tokenizer, build_tokenizer, encode_example, encode_prompt
from tests.benchmarks import workload
from tests.benchmarks.pairs import median_ratio

NUM_PROMPTS, SAMPLES, MAX_NEW_TOKENS = 64, 8, 12
LESSONS, LESSON_ROWS, LESSON_RATE = 120, 64, 3e-3
NUM_THREADS = 1
"""The matrices are too small to gain from more."""
PAIRS = 15


def sampler_vs_generate() -> dict[str, float]:
    """Tokens per second of both, in turns."""
    torch.set_num_threads(NUM_THREADS)
    set_seed(workload.SEED)
    words = random.Random(workload.SEED)
    tokenizer: Any = build_tokenizer(workload.TOKENIZER)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**workload.SMALL, **special))
    _teach(model, tokenizer, words)
    prompts = [encode_prompt(tokenizer, _question(_word(words))) for _ in range(NUM_PROMPTS)]
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    sampler = HfSampler(
        model,
        stop_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        max_model_len=workload.SMALL["max_position_embeddings"],
    )
    seeds = count()

    def ours() -> float:
        groups = sampler.generate(prompts, n=SAMPLES, max_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=next(seeds))
        return float(sum(len(completion.tokens) for group in groups for completion in group))

    def theirs() -> float:
        return _num_tokens(_generate(model, padded)[:, padded["input_ids"].shape[1] :], tokenizer.eos_token_id)

    for warm_up in (ours, theirs):
        warm_up()
    rates = [(_rate(theirs), _rate(ours)) for _ in range(PAIRS)]
    generate, sampled = ([pair[side][0] for pair in rates] for side in (0, 1))
    return {
        "sampler_vs_generate": median_ratio(sampled, generate),
        "sampler_generate_tokens_per_s": statistics.median(generate),
        "sampler_ours_tokens_per_s": statistics.median(sampled),
        "sampler_generate_mean_tokens": statistics.mean(pair[0][1] for pair in rates) / (NUM_PROMPTS * SAMPLES),
        "sampler_ours_mean_tokens": statistics.mean(pair[1][1] for pair in rates) / (NUM_PROMPTS * SAMPLES),
    }


def _rate(generate: Callable[[], float]) -> tuple[float, float]:
    """(tokens per second, tokens) of one call."""
    start = time.perf_counter()
    num_tokens = generate()
    return num_tokens / (time.perf_counter() - start), num_tokens


@torch.inference_mode()
def _generate(model: Any, padded: Any) -> Tensor:
    model.eval()
    return model.generate(
        **padded,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=SAMPLES,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def _num_tokens(responses: Tensor, stop: int) -> float:
    """Tokens of [B, T] up to and with the first stop token of each row."""
    stops = responses == stop
    before = (stops.cumsum(1) == 0).sum(1)
    return float((before + stops.any(1)).sum())


def _teach(model: Any, tokenizer: Tokenizer, words: random.Random) -> None:
    """Next-token training on words spelt backward; the model learns the form long before it learns the task."""
    optimizer = torch.optim.AdamW(model.parameters(), LESSON_RATE)
    for _ in range(LESSONS):
        examples = [encode_example(tokenizer, _question(word), word[::-1])[0] for word in _some_words(words)]
        batch = tokenizer.pad({"input_ids": examples}, padding_side="right", return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _some_words(words: random.Random) -> list[str]:
    return [_word(words) for _ in range(LESSON_ROWS)]


def _word(words: random.Random) -> str:
    return "".join(words.choices(string.ascii_lowercase, k=words.randint(3, 7)))


def _question(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": workload.TOKENIZER.phrases[0] + word}]
