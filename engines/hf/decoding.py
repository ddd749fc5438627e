"""One token at a time from a causal LM with a key-value cache: the hot loop below `engines.hf.sampler`.

Owns: the cache, the forward of one decoding step, positions and masks of prompts of unequal length. Does not own:
choosing tokens, stopping. Prompts are padded on the left, so that all rows write the same cache slot.

Shapes: P prompts, B rows (n per prompt, fewer as they finish), L longest prompt, S cache slots in use, H query heads,
K key-value heads (R = H / K queries each), D head width, E hidden width.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from engines.errors import EngineError

LAYERED_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
GROW_SLOTS = 16


class Decoder(Protocol):
    """State of one batch in decoding."""

    def prefill(self, ids: Tensor, start: Tensor) -> Tensor:
        """[P, E] last hidden state of prompts [P, L] whose first real token is at start [P]."""
        ...

    def repeat(self, n: int) -> None:
        """Every prompt becomes n rows, side by side."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """[B, E] last hidden state after one more token [B] per row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these, [B'] indices."""
        ...


def make_decoder(model: nn.Module) -> Decoder:
    """The fast decoder where the architecture is known, the general one for any other causal LM."""
    return LayeredDecoder(model) if is_layered(model) else CachedForwardDecoder(model)


def is_layered(model: nn.Module) -> bool:
    """True if the model is the plain Llama shape that `LayeredDecoder` computes itself."""
    config: Any = model.config
    if config.model_type not in LAYERED_MODEL_TYPES:
        return False
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return rope in STATIC_ROPE_TYPES and kinds == {"full_attention"}


def cache_bytes_per_token(model: nn.Module) -> int:
    """Memory that one token of one row takes in a float32 cache; an upper bound where the config does not say."""
    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * config.num_hidden_layers * heads * width


class LayeredDecoder:
    """Llama, Qwen2 and Qwen3: the model's own modules, called without the generality of its forward.

    The cache of a prompt is kept once and shared by its rows, whose queries meet it in one product; only what a row
    generated is its own. So neither repeating the prompt nor dropping rows copies it. Grouped-query attention never
    repeats keys and values. Values are stored [.., D, S]: with one query that product is the faster one.
    """

    def __init__(self, model: nn.Module) -> None:
        base: Any = model.get_submodule("model")
        self._base, self._layers = base, list(base.layers)
        self._prompt_keys: list[Tensor] = []
        self._prompt_values: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._generated = 0

    def prefill(self, ids: Tensor, start: Tensor) -> Tensor:
        length = ids.shape[1]
        slots = torch.arange(length, device=ids.device)
        mask, self._hidden_slots = None, None
        if bool((start > 0).any()):
            real = slots[None, None, :] >= start[:, None, None]
            # a padding query sees itself: a row without any key would be NaN
            own = torch.eye(length, dtype=torch.bool, device=ids.device)
            mask = (((slots[None, :] <= slots[:, None]) & real) | own)[:, None]
            self._hidden_slots = ~real[:, None]
        hidden = self._base.embed_tokens(ids)
        positions = (slots[None, :] - start[:, None]).clamp_min(0)
        cos, sin = (part.unsqueeze(2) for part in self._base.rotary_emb(hidden, positions))
        for layer in self._layers:
            query, key, value = _project(layer, hidden, cos, sin)
            self._prompt_keys.append(key.transpose(1, 2).contiguous())
            self._prompt_values.append(value.transpose(1, 2).contiguous())
            hidden = _finish(layer, hidden, _attend_all(layer.self_attn, query, key, value, mask))
        self._next_position = length - start
        return self._base.norm(hidden[:, -1])

    def repeat(self, n: int) -> None:
        rows = len(self._next_position) * n
        self._next_position = self._next_position.repeat_interleave(n)
        self._n = n
        self._place = torch.arange(rows, device=self._next_position.device)
        for cache in self._prompt_keys:
            _, heads, _, width = cache.shape
            self._keys.append(cache.new_empty((rows, heads, GROW_SLOTS, width)))
            self._values.append(cache.new_empty((rows, heads, width, GROW_SLOTS)))

    def step(self, tokens: Tensor) -> Tensor:
        slot = self._generated
        if slot == self._keys[0].shape[2]:
            self._keys = [torch.cat((cache, torch.empty_like(cache)), 2) for cache in self._keys]
            self._values = [torch.cat((cache, torch.empty_like(cache)), 3) for cache in self._values]
        hidden = self._base.embed_tokens(tokens)[:, None]
        cos, sin = (part.unsqueeze(2) for part in self._base.rotary_emb(hidden, self._next_position[:, None]))
        for index, layer in enumerate(self._layers):
            query, key, value = _project(layer, hidden, cos, sin)
            self._keys[index][:, :, slot] = key[:, 0]
            self._values[index][..., slot] = value[:, 0]
            hidden = _finish(layer, hidden, self._attend(index, query[:, 0] * layer.self_attn.scaling, slot + 1))
        self._generated += 1
        self._next_position = self._next_position + 1
        return self._base.norm(hidden[:, 0])

    def keep(self, rows: Tensor) -> None:
        self._next_position = self._next_position[rows]
        self._place = self._place[rows]
        self._keys = [cache.index_select(0, rows) for cache in self._keys]
        self._values = [cache.index_select(0, rows) for cache in self._values]
        prompts, group = torch.unique(self._place // self._n, return_inverse=True)
        if len(prompts) < len(self._prompt_keys[0]):
            self._place = group * self._n + self._place % self._n
            self._prompt_keys = [cache.index_select(0, prompts) for cache in self._prompt_keys]
            self._prompt_values = [cache.index_select(0, prompts) for cache in self._prompt_values]
            if self._hidden_slots is not None:
                self._hidden_slots = self._hidden_slots[prompts]

    def _attend(self, index: int, query: Tensor, generated: int) -> Tensor:
        """[B, 1, H * D] attention of one scaled query [B, H, D] to its prompt and to so many tokens of its own."""
        prompt_keys, prompt_values = self._prompt_keys[index], self._prompt_values[index]
        keys, values = self._keys[index][:, :, :generated], self._values[index][..., :generated]
        rows, heads, width = query.shape
        length = prompt_keys.shape[2]
        query = query.view(rows, keys.shape[1], -1, width)
        shared = torch.matmul(self._by_prompt(query), prompt_keys.transpose(-1, -2))
        if self._hidden_slots is not None:
            shared = shared.masked_fill(self._hidden_slots, float("-inf"))
        # softmax over a width that is no multiple of the vector length is up to 8 times slower
        padded = -(-(length + generated) // 16) * 16
        scores = query.new_full((*query.shape[:3], padded), float("-inf"), dtype=torch.float32)
        scores[..., :length] = self._by_row(shared, query.shape[2])
        scores[..., length : length + generated] = torch.matmul(query, keys.transpose(-1, -2))
        weights = torch.softmax(scores, -1).to(values.dtype)
        out = self._by_row(torch.matmul(self._by_prompt(weights[..., :length]), prompt_values), query.shape[2])
        out = out + torch.matmul(weights[..., length : length + generated], values.transpose(-1, -2))
        return out.reshape(rows, 1, heads * width)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[B, K, R, X] of the rows as [P, K, n * R, X] of their prompts; rows that are gone are zeros."""
        prompts, n = len(self._prompt_keys[0]), self._n
        if len(x) < prompts * n:
            x = x.new_zeros((prompts * n, *x.shape[1:])).index_copy_(0, self._place, x)
        return x.view(prompts, n, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor, queries: int) -> Tensor:
        """The inverse of `_by_prompt`: [P, K, n * R, X] to [B, K, R, X], R = queries."""
        prompts, heads, _, width = x.shape
        x = x.view(prompts, heads, self._n, queries, width).transpose(1, 2).reshape(-1, heads, queries, width)
        return x if len(x) == len(self._place) else x[self._place]


class CachedForwardDecoder:
    """Any causal LM whose forward takes a cache and an attention mask."""

    def __init__(self, model: nn.Module) -> None:
        base: Any = model.base_model
        self._base = base
        accepted = inspect.signature(base.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        if self._cache_name not in accepted or "attention_mask" not in accepted:
            raise EngineError(
                f"{type(model).__name__} cannot be sampled: its forward takes no cache or no attention mask; "
                "use a decoder-only transformer such as llama, qwen3 or gpt2"
            )
        self._takes_positions = "position_ids" in accepted
        self._cache = DynamicCache(config=base.config)

    def prefill(self, ids: Tensor, start: Tensor) -> Tensor:
        slots = torch.arange(ids.shape[1], device=ids.device)
        self._mask = (slots[None, :] >= start[:, None]).long()
        return self._forward(ids, (slots[None, :] - start[:, None]).clamp_min(0))

    def repeat(self, n: int) -> None:
        self._cache.batch_repeat_interleave(n)
        self._mask = self._mask.repeat_interleave(n, 0)

    def step(self, tokens: Tensor) -> Tensor:
        positions = self._mask.sum(1, keepdim=True)
        self._mask = F.pad(self._mask, (0, 1), value=1)
        return self._forward(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        extra: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        extra[self._cache_name] = self._cache
        output = self._base(input_ids=ids, attention_mask=self._mask, use_cache=True, **extra)
        return output.last_hidden_state[:, -1]


def _project(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, T, H, D], key and value [B, T, K, D] of hidden [B, T, E], rotated by cos, sin [B, T, 1, D]."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    query = attention.q_proj(normed).view(shape)
    key = attention.k_proj(normed).view(shape)
    value = attention.v_proj(normed).view(shape)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _attend_all(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, H * D] causal attention within prompts; mask [B, 1, T, T] True where a key is seen, None: plain causal."""
    groups = query.shape[2] // key.shape[2]
    key, value = (part.repeat_interleave(groups, 2) if groups > 1 else part for part in (key, value))
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    causal = mask is None
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=attention.scaling)
    return out.transpose(1, 2).flatten(2)


def _finish(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    """Output projection, feed-forward block and both residual connections."""
    hidden = hidden + layer.self_attn.o_proj(attended)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
