"""From a config or an HF folder to a causal LM, its tokenizer and its logprobs. Owns: loading, checking, exporting.

Weights are float32 whatever the folder holds: an update of 1e-6 must not be rounded away. Dropout is off in every
forward, so that the ratio of a policy to itself is 1; the exported config keeps its dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from engines.config import ModelConfig
from engines.errors import ConfigError, EngineError
from engines.hf.attention import ATTENTION
from engines.hf.batch import Layout, MicroBatch, micro_batches
from engines.hf.forward import Head, token_distributions, token_logprobs
from engines.plugins import hint
from engines.rows import Row
from engines.text import build_tokenizer

disable_progress_bar()  # of transformers: it would write over our own display

ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Older spelling of parts of rope_parameters, which transformers still takes."""
SELF_CHECK_TOLERANCE = 1e-3
"""Largest difference between our logprobs and the model's own, nats, in float32."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model in float32 and eval mode, and the ids that end or pad a sequence."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids below this are valid."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight.shape[0]


def load(config: ModelConfig, folder: Path | None, seed: int, device: torch.device | str = "cpu") -> LoadedModel:
    """The model of an HF folder, or one built from `config.architecture` with weights drawn from `seed`.

    Raises ConfigError if the folder, the architecture or the tokenizer is not what it must be; EngineError for weights
    that cannot be read.
    """
    if folder is None and config.architecture is None:
        folder = Path(str(config.model_path))
    loaded = _build(config, seed) if folder is None else _read(folder)
    _to(loaded.model, device).eval()
    _check_limits(loaded, config, folder)
    return loaded


def save(loaded: LoadedModel, folder: Path) -> None:
    """Write model and tokenizer as an HF folder that `AutoModelForCausalLM.from_pretrained` reads."""
    loaded.model.save_pretrained(folder)
    for how_it_was_loaded in ("is_local", "local_files_only"):  # else a resumed run would save other bytes
        loaded.tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    loaded.tokenizer.save_pretrained(folder)


def twin(loaded: LoadedModel) -> PreTrainedModel:
    """Another instance of the same model with transformers' own attention and equal weights, sharing no memory.

    The random generators stay as they are: a resumed run makes a twin too, and must go on with the same numbers.
    """
    config = type(loaded.model.config).from_dict(loaded.model.config.to_dict())
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.model.state_dict())
    return _to(model, loaded.model.device).eval().requires_grad_(False)


class Policy:
    """Logprobs of a model: its hidden states, then its head, at one temperature and precision."""

    def __init__(self, model: PreTrainedModel, temperature: float, dtype: torch.dtype) -> None:
        """Raises EngineError if this model's logprobs cannot be reproduced from its hidden states."""
        self.model = model
        self.temperature = temperature
        self.dtype = dtype
        output: Any = model.get_output_embeddings()
        self.head = Head(output.weight, output.bias)
        self.layout: Layout = _choose_layout(self)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[A, d] the state before each action token."""
        with torch.autocast(batch.input_ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, batch.predictors)

    def logprobs(self, batch: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[A] logprobs of the action tokens, and with `entropy` [A] entropies in nats."""
        hidden = self.hidden(batch)
        return token_logprobs(hidden, self.head, batch.targets, self.temperature, dtype=self.dtype, entropy=entropy)

    def distributions(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[A] entropies H in nats, and [A] sums over the vocabulary of p^2 (H + log p). No gradient."""
        return token_distributions(self.hidden(batch), self.head, self.temperature, dtype=self.dtype)


def _build(config: ModelConfig, seed: int) -> LoadedModel:
    assert config.architecture is not None
    assert config.tokenizer is not None
    tokenizer = build_tokenizer(config.tokenizer)
    keys = dict(config.architecture)
    model_type = keys.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type = {model_type!r} is not known; {hint(model_type, CONFIG_MAPPING)}"
        )
    known = vars(CONFIG_MAPPING[model_type]()).keys() | CONFIG_MAPPING[model_type].attribute_map.keys()
    if "rope_parameters" in known:
        known |= ROPE_KEYS
    for key in keys.keys() - known:
        raise ConfigError(f"model.architecture.{key} is not a key of {model_type}; {hint(key, known)}")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    keys = special | {"vocab_size": len(tokenizer)} | keys
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys), dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(f"model.architecture {config.architecture} cannot be built: {error}") from error
    return _with_tokens(model, tokenizer)


def _read(folder: Path) -> LoadedModel:
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; set model.model_path to a local HF folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not an HF model folder; check model.model_path")
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"{folder / 'config.json'} cannot be read: {reason}; check model.model_path, it must be the folder of a "
            "causal LM"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} has no tokenizer that can be read ({error}); put its files beside config.json"
        ) from error
    for trace in ("is_local", "local_files_only"):  # of how it was loaded: it would be saved with the tokenizer
        tokenizer.init_kwargs.pop(trace, None)
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise EngineError(
            f"the weights in {folder} cannot be loaded: {error}; the folder is damaged or incomplete"
        ) from error
    model, report = read
    if missing := sorted(report["missing_keys"]):
        raise EngineError(
            f"{folder} lacks {len(missing)} tensors of its model, {missing[0]} first; it would train from noise"
        )
    for tensor in (*model.parameters(), *model.buffers()):
        # Tensors read from a file lie at any address, and products may round differently there: a resumed run would
        # drift from one that was not stopped. A clone is aligned as every new tensor is.
        tensor.data = tensor.data.clone()
    return _with_tokens(model, tokenizer)


def _with_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    generation: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops: set[int] = {generation} if isinstance(generation, int) else set(generation or ())
    end, pad = cast("int | None", tokenizer.eos_token_id), cast("int | None", tokenizer.pad_token_id)
    if end is not None:
        stops.add(end)
    if not stops:
        raise ConfigError("neither the model's generation config nor its tokenizer has an end-of-sequence token")
    if pad is None:
        pad = min(stops)
    return LoadedModel(model, tokenizer, tuple(sorted(stops)), pad)


def _check_limits(loaded: LoadedModel, config: ModelConfig, folder: Path | None) -> None:
    where = "model.architecture" if folder is None else str(folder)
    highest = max(loaded.tokenizer.get_vocab().values(), default=-1)
    if highest >= loaded.vocab_size:
        raise ConfigError(
            f"{where}: the tokenizer has ids up to {highest}, the embedding only {loaded.vocab_size} rows; "
            "this is the tokenizer of another model"
        )
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    if positions is not None and config.max_model_len > positions:
        raise ConfigError(
            f"model.max_model_len = {config.max_model_len} is more than the {positions} positions of {where}; lower it"
        )


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _to(model: AnyModule, device: torch.device | str) -> AnyModule:
    """Without the guards of `PreTrainedModel.to`, which are for quantised models."""
    nn.Module.to(model, device)
    return model


def _choose_layout(policy: Policy) -> Layout:
    """Packed if the model's attention can be replaced with equal results; otherwise rows, with its own attention."""
    rows = _check_rows(policy.head.weight.shape[0])
    try:
        expected = _own_logprobs(policy, rows)
    except RuntimeError as error:
        raise ConfigError(
            f"{type(policy.model).__name__} cannot compute with this architecture: {error}; check that its sizes fit, "
            "num_attention_heads a multiple of num_key_value_heads for example"
        ) from error
    own = policy.model.config._attn_implementation or "eager"
    layouts: tuple[Layout, ...] = ("packed", "rows") if policy.model._supports_attention_backend else ("rows",)
    for layout in layouts:
        policy.model.set_attn_implementation(ATTENTION if layout == "packed" else own)
        if (_our_logprobs(policy, rows, layout) - expected).abs().max() <= SELF_CHECK_TOLERANCE:
            return layout
    raise EngineError(
        f"{type(policy.model).__name__} is not supported: logprobs from its hidden states and output matrix differ "
        f"from its own by more than {SELF_CHECK_TOLERANCE}; its head does more than one product (soft cap, scaling)"
    )


def _check_rows(vocab_size: int) -> list[Row]:
    """Three short rows, two of one length, of every action token but the first."""
    ids = torch.arange(1, 8).numpy() * 7
    return [
        Row((ids[:length] + shift) % vocab_size, torch.arange(1, length).numpy())
        for length, shift in ((7, 0), (4, 0), (4, 1))
    ]


@torch.no_grad()
def _own_logprobs(policy: Policy, rows: list[Row]) -> Tensor:
    """Of each row alone, from the model's full logits, untempered."""
    device = policy.model.device
    parts = []
    for row in rows:
        ids = torch.from_numpy(row.tokens).to(device)
        logprobs = torch.log_softmax(policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float(), -1)
        parts.append(logprobs.gather(1, ids[1:, None]).squeeze(1))
    return torch.cat(parts)


@torch.no_grad()
def _our_logprobs(policy: Policy, rows: list[Row], layout: Layout) -> Tensor:
    """Of all rows as one micro-batch, as training computes them, untempered and in float32."""
    (batch,) = micro_batches(rows, sum(row.length for row in rows) * 2, layout, policy.model.device)
    hidden = policy.model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state
    predictors = hidden.flatten(0, 1).index_select(0, batch.predictors)
    return token_logprobs(predictors, policy.head, batch.targets)[0]
