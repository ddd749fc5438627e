"""The sampler: its logprobs are those of training; a row depends on the weights, its prompt and its seed alone."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engines.base import Completion
from engines.errors import DataError, EngineError
from engines.experience import EID, Experience
from engines.hf import sampler as sampler_module
from engines.hf.decoding import CachedForwardDecoder, LayeredDecoder, make_decoder
from engines.hf.engine import HfEngine
from engines.hf.sampler import HfSampler
from tests.tiny_llama import engine_config

VOCABULARY, STOP, PAD = 40, 4, 0
MAX_MODEL_LEN = 24
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that a wrong attention shows
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4, **SMALL},
    "llama, grouped queries": {"model_type": "llama", "num_key_value_heads": 2, **SMALL},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, **SMALL},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.3,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name] | changes)).eval()


def sampler_of(model: PreTrainedModel, **changes: Any) -> HfSampler:
    fields: dict[str, Any] = {"stop_token_ids": (STOP,), "pad_token_id": PAD, "max_model_len": MAX_MODEL_LEN}
    return HfSampler(model, **fields | changes)


def generate(sampler: HfSampler, prompts: list[list[int]] = PROMPTS, **changes: Any) -> list[list[Completion]]:
    arguments: dict[str, Any] = {"n": 8, "max_tokens": 10, "temperature": 1.0, "seed": 1}
    return sampler.generate(prompts, **arguments | changes)


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens.tolist() for completion in group] for group in groups]


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """From the model's own forward on this one sequence, without a cache."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(response)), response].tolist()


# -- the same numbers as the model and as training --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", list(MODELS))
def test_logprobs_are_those_of_the_model_on_each_row_alone(name: str, temperature: float) -> None:
    model = build(name)
    groups = generate(sampler_of(model), temperature=temperature)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = reference_logprobs(model, prompt, completion.tokens.tolist(), temperature)
            assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_both_decoders_give_the_same_rows() -> None:
    model = build("llama, grouped queries")
    assert isinstance(make_decoder(model), LayeredDecoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "make_decoder", CachedForwardDecoder)
        general = generate(sampler_of(model))
    assert tokens(general) == tokens(generate(sampler_of(model)))


@pytest.mark.parametrize(("temperature", "dtype"), [(1.0, "float32"), (0.7, "float32"), (1.0, "bfloat16")])
def test_at_learning_rate_0_the_first_ratio_is_1_and_nothing_is_clipped(temperature: float, dtype: str) -> None:
    config = engine_config(
        algorithm={"kl_loss_fn": "none", "repeat_times": 4, "policy_loss_fn_args": {"clip_range": 0.02}},
        optimizer={"lr": 0.0, "weight_decay": 0.0},
    )
    model = config.model.model_copy(update={"temperature": temperature, "dtype": dtype})
    config = config.model_copy(update={"model": model})

    async def one_step() -> dict[str, float]:
        engine = HfEngine(config)
        await engine.prepare()
        try:
            sampler = engine.make_sampler()
            groups = sampler.generate(PROMPTS, n=4, max_tokens=9, temperature=temperature, seed=3)
            return await engine.train_step(rows_of(groups))
        finally:
            await engine.shutdown()

    metrics = asyncio.run(one_step())
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6 if dtype == "float32" else 2e-3)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5 if dtype == "float32" else 2e-2)


def rows_of(groups: list[list[Completion]]) -> list[Experience]:
    """Experiences with rewards that differ within each group."""
    return [
        Experience(
            tokens=np.concatenate([np.asarray(prompt, np.int32), completion.tokens]),
            prompt_length=len(prompt),
            eid=EID(batch=0, task=task, run=run, suffix="000000"),
            logprobs=completion.logprobs,
            reward=float(run % 2),
        )
        for task, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
        for run, completion in enumerate(group)
    ]


# -- a row is its own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama, grouped queries", "gpt2"])
def test_a_row_does_not_depend_on_what_else_is_in_the_batch(name: str) -> None:
    sampler = sampler_of(build(name))
    alone = generate(sampler, PROMPTS[:1])
    for others in ([[13]], [[8, 9, 10, 11, 12, 16, 17, 18]], PROMPTS[1:]):
        together = generate(sampler, PROMPTS[:1] + others)
        assert tokens(together[:1]) == tokens(alone)
        for one, other in zip(together[0], alone[0], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_group_is_prefilled_once_and_equals_prompts_prefilled_one_by_one() -> None:
    model = build("llama, grouped queries")
    prefilled: list[int] = []

    class Counting(LayeredDecoder):
        def prefill(self, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            prefilled.append(ids.numel())
            return super().prefill(ids, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "make_decoder", Counting)
        grouped = generate(sampler_of(model), [PROMPTS[1]], n=6)
        repeated = generate(sampler_of(model), [PROMPTS[1]] * 6, n=1)
    assert prefilled == [5, 30]
    assert tokens(grouped)[0] == [group[0] for group in tokens(repeated)]
    for one, other in zip(grouped[0], (group[0] for group in repeated), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_finished_rows_are_dropped_without_changing_the_others() -> None:
    model = build("llama")
    widths: list[int] = []

    class Watched(LayeredDecoder):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            widths.append(len(tokens))
            return super().step(tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "make_decoder", Watched)
        dropped = generate(sampler_of(model, stop_token_ids=(STOP, 5, 6, 7, 8)))
        patch.setattr(sampler_module, "KEEP_SHARE", 0.0)
        first = widths.copy()
        widths.clear()
        kept = generate(sampler_of(model, stop_token_ids=(STOP, 5, 6, 7, 8)))
    assert first[0] > first[-1]
    assert set(widths) == {len(PROMPTS) * 8}
    assert len({len(completion.tokens) for group in kept for completion in group}) > 3
    assert tokens(dropped) == tokens(kept)
    for one, other in zip(flat(dropped), flat(kept), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_batches_that_are_cut_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(build())
    whole = generate(sampler)
    monkeypatch.setattr(sampler_module, "MAX_ROWS", 8)
    monkeypatch.setattr(sampler_module, "MAX_LOGITS", VOCABULARY * 3)
    assert tokens(generate(sampler)) == tokens(whole)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_completions_to_the_bit() -> None:
    first, second = generate(sampler_of(build())), generate(sampler_of(build()))
    assert tokens(first) == tokens(second)
    for one, other in zip(flat(first), flat(second), strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    sampler = sampler_of(build())
    torch.manual_seed(1)
    first = tokens(generate(sampler))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert tokens(generate(sampler)) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_other_seeds_and_other_rows_give_other_completions() -> None:
    sampler = sampler_of(build())
    groups = tokens(generate(sampler, [PROMPTS[0]] * 3, seed=1))
    assert len({str(row) for group in groups for row in group}) > 20
    assert tokens(generate(sampler, [PROMPTS[0]] * 3, seed=2)) != groups
    assert tokens(generate(sampler, [PROMPTS[0]] * 3, seed=-1)) != groups


def test_tokens_are_drawn_from_the_models_distribution() -> None:
    model = build(initializer_range=0.1)
    drawn = generate(sampler_of(model), [PROMPTS[0]], n=4000, max_tokens=1)[0]
    counts = np.bincount([completion.tokens[0] for completion in drawn], minlength=VOCABULARY)
    expected = 4000 * np.exp([reference_logprobs(model, PROMPTS[0], [token])[0] for token in range(VOCABULARY)])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 39 + 5 * np.sqrt(2 * 39)  # 39 degrees of freedom: mean 39, deviation 8.8


# -- temperature ------------------------------------------------------------------------------------------------------


def test_temperature_0_is_the_most_likely_token_with_untempered_logprobs() -> None:
    model = build()
    for prompt, group in zip(PROMPTS, generate(sampler_of(model), temperature=0.0, n=2), strict=True):
        assert group[0].tokens.tolist() == group[1].tokens.tolist()
        sequence = list(prompt)
        for token in group[0].tokens.tolist():
            assert token == int(model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax())
            sequence.append(token)
        expected = reference_logprobs(model, prompt, group[0].tokens.tolist())
        assert group[0].logprobs == pytest.approx(expected, abs=2e-5)


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_nearly_uniform() -> None:
    sampler = sampler_of(build())
    greedy = tokens(generate(sampler, temperature=0.0))
    assert tokens(generate(sampler, temperature=1e-4)) == greedy
    hot = generate(sampler, temperature=100.0, n=64, max_tokens=1)
    assert np.mean([completion.logprobs[0] for group in hot for completion in group]) == pytest.approx(
        -np.log(VOCABULARY), abs=0.02
    )


# -- lengths and reasons ----------------------------------------------------------------------------------------------


def test_finish_reason_and_length() -> None:
    groups = generate(sampler_of(build(), stop_token_ids=(STOP, 5, 6)), max_tokens=6, n=32)
    reasons = set()
    for completion in flat(groups):
        ids = completion.tokens.tolist()
        reasons.add(completion.finish_reason)
        assert not {STOP, 5, 6} & set(ids[:-1])
        assert (completion.finish_reason == "stop") == (ids[-1] in (STOP, 5, 6))
        assert completion.finish_reason == "stop" or len(ids) == 6
        assert len(completion.logprobs) == len(ids)
        assert completion.action_mask.tolist() == [True] * len(ids)
    assert reasons == {"stop", "length"}


def test_n_completions_for_each_prompt_in_the_order_of_the_prompts() -> None:
    model = build()
    groups = generate(sampler_of(model), n=3, temperature=0.0)
    assert [len(group) for group in groups] == [3, 3, 3, 3]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        expected = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
        assert group[0].tokens[0] == expected


def test_a_response_ends_where_the_models_positions_end() -> None:
    sampler = sampler_of(build(), stop_token_ids=(VOCABULARY - 1,))
    long, short = [7] * 20, [8] * 4
    groups = generate(sampler, [long, short], max_tokens=12)
    lengths = [
        [len(completion.tokens) for completion in group if completion.finish_reason == "length"] for group in groups
    ]
    assert [set(found) for found in lengths] == [{4}, {12}]


@pytest.mark.parametrize(("length", "fits"), [(23, True), (24, False), (30, False)])
def test_a_prompt_that_leaves_no_room_says_what_to_do(length: int, fits: bool) -> None:
    sampler = sampler_of(build(), stop_token_ids=(VOCABULARY - 1,))
    if fits:
        assert [len(row.tokens) for row in generate(sampler, [[7] * length], n=2)[0]] == [1, 1]
        return
    with pytest.raises(
        DataError, match=rf"prompt 1 has {length} tokens .*max_model_len = 24; shorten the prompt or raise"
    ):
        generate(sampler, [[5], [7] * length])


@pytest.mark.parametrize(
    ("prompts", "changes", "reason"),
    [
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5]], {"n": 0}, "n = 0 and max_tokens = 10 must both be at least 1"),
        ([[5]], {"max_tokens": 0}, "n = 8 and max_tokens = 0 must both be at least 1"),
    ],
)
def test_what_cannot_be_sampled(prompts: list[list[int]], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        generate(sampler_of(build()), prompts, **changes)


def test_no_prompts_no_completions() -> None:
    assert generate(sampler_of(build()), []) == []


# -- weights ----------------------------------------------------------------------------------------------------------


def test_loaded_weights_are_copied_and_used() -> None:
    source, sampler = build(seed=1), sampler_of(build(seed=0))
    weights = {name: value.detach().clone() for name, value in source.named_parameters()}
    sampler.load(7, weights)
    loaded = tokens(generate(sampler))
    for value in weights.values():
        value.zero_()
    assert sampler.version == 7
    assert tokens(generate(sampler)) == loaded == tokens(generate(sampler_of(source)))


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused_and_change_nothing(fault: str) -> None:
    sampler = sampler_of(build(seed=0))
    before = tokens(generate(sampler))
    weights = {name: value.detach().clone() for name, value in build(seed=1).named_parameters()}
    name = "model.norm.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.extra"] = weights[name]
    else:
        weights[name] = weights[name][:-1]
    said = {"missing": "lack 1 tensors, model.norm.weight", "unknown": "1 unknown tensors, model.extra"}
    with pytest.raises(EngineError, match=f"weights version 3.*{said.get(fault, 'model.norm.weight has shape')}"):
        sampler.load(3, weights)
    assert (sampler.version, tokens(generate(sampler))) == (0, before)


def test_weights_that_are_not_finite_are_named_by_version() -> None:
    model = build()
    sampler = sampler_of(model)
    weights = {name: torch.full_like(value, torch.nan) for name, value in model.named_parameters()}
    sampler.load(5, weights)
    with pytest.raises(EngineError, match="weights version 5 give logprobs that are not finite"):
        generate(sampler)


def test_a_stop_token_outside_the_vocabulary() -> None:
    with pytest.raises(EngineError, match=r"\[40\] are outside the vocabulary of 40"):
        sampler_of(build(), stop_token_ids=(40,))


def test_sampling_leaves_a_training_model_in_training_mode() -> None:
    model = build().train()
    generate(sampler_of(model), n=1)
    assert model.training
