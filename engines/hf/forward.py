"""Logprobs and entropies of given tokens, from hidden states. Owns: every softmax over the vocabulary.

The full [N, V] logits never exist: they are made, used and dropped one chunk at a time, and made again in the backward
pass. The softmax is float32 whatever the precision of the matrix products (float64 stays float64, for tests). The
sampler uses the same functions, so that a sampled logprob is a trained logprob.

Shapes: N tokens, d hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
"""Size of one chunk of float32 logits. Above 32 MB glibc maps and faults fresh pages for each chunk: 4x slower."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection of a causal LM: logits = hidden @ weight.T + bias."""

    weight: Tensor
    """[V, d]; the embedding itself when the two are tied."""
    bias: Tensor | None = None
    """[V]."""


def tempered_logits(hidden: Tensor, head: Head, temperature: float, dtype: torch.dtype) -> Tensor:
    """[N, V] logits over the temperature, in float32 or better; temperature 0 (greedy) leaves them as they are.

    The product runs in `dtype`. Differentiable, but holds all N * V values: for the training path use `token_logprobs`.
    """
    return _tempered_logits(hidden.to(dtype), head.weight.to(dtype), head.bias, temperature)


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `targets` at the temperature, and with `entropy` the entropy of each distribution in nats.

    hidden [N, d], targets [N] int64 -> [N] and [N] or None, differentiable in hidden and head. Products run in `dtype`.
    """
    outputs = _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, dtype, entropy)
    return outputs if entropy else (outputs, None)


@torch.no_grad()
def token_distributions(
    hidden: Tensor, head: Head, temperature: float = 1.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Of each distribution the entropy H in nats, and the sum over the vocabulary of p^2 (H + log p).

    hidden [N, d] -> [N] and [N].
    """
    cast_hidden, cast_weight = hidden.to(dtype), head.weight.to(dtype)
    precise = torch.promote_types(dtype, torch.float32)
    entropies, scores = (hidden.new_empty(len(hidden), dtype=precise) for _ in range(2))
    for rows in _chunks(len(hidden), len(head.weight)):
        log_probs = torch.log_softmax(_tempered_logits(cast_hidden[rows], cast_weight, head.bias, temperature), dim=-1)
        probs = log_probs.exp()
        entropies[rows] = -(probs * log_probs).sum(-1)
        scores[rows] = (probs.square() * (log_probs + entropies[rows, None])).sum(-1)
    return entropies, scores


def _tempered_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if bias is not None:
        logits = logits + bias
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _chunks(size: int, other: int) -> list[slice]:
    """Equal cuts of one side of a [size, other] matrix of logits, each at most CHUNK_BYTES and at least 32 wide."""
    limit = max(32, CHUNK_BYTES // (4 * max(other, 1)))
    count = -(-size // limit)
    width = -(-size // count) if count else 1
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps only the log-normaliser of each token; backward makes each chunk of logits again.

    d logprob[y] / d z = onehot(y) - p and d entropy / d z = -p * (log p + entropy), for z = logits / temperature.
    Forward cuts the tokens. Backward cuts the vocabulary, so that each part of the weight's gradient is written once
    instead of being added to for every chunk: the sum over tokens is inside one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        want_entropy: bool,
    ) -> Any:
        cast_hidden, cast_weight = hidden.to(dtype), weight.to(dtype)
        precise = torch.promote_types(dtype, torch.float32)
        logprobs, normaliser = (hidden.new_empty(len(hidden), dtype=precise) for _ in range(2))
        entropies = hidden.new_empty(len(hidden) if want_entropy else 0, dtype=precise)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _tempered_logits(cast_hidden[rows], cast_weight, bias, temperature)
            normaliser[rows] = torch.logsumexp(logits, dim=-1)
            logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - normaliser[rows]
            if want_entropy:
                probs = torch.softmax(logits, dim=-1)
                entropies[rows] = normaliser[rows] - (probs * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropies)
        ctx.temperature, ctx.dtype = temperature, dtype
        return (logprobs, entropies) if want_entropy else logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets, normaliser, entropies = ctx.saved_tensors
        scale = 1.0 if ctx.temperature == 0 else 1.0 / ctx.temperature
        grad_logprobs = grads[0] * scale
        grad_entropies = grads[1] * scale if len(grads) > 1 else None
        cast_hidden, cast_weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for columns in _chunks(len(weight), len(hidden)):
            part_bias = None if bias is None else bias[columns]
            logits = _tempered_logits(cast_hidden, cast_weight[columns], part_bias, ctx.temperature)
            log_probs = logits.sub_(normaliser[:, None])
            if grad_entropies is None:
                grad_logits = log_probs.exp_().mul_(-grad_logprobs[:, None])
            else:
                slope = (log_probs + entropies[:, None]).mul_(grad_entropies[:, None]).add_(grad_logprobs[:, None])
                grad_logits = log_probs.exp_().mul_(slope.neg_())
            inside = ((targets >= columns.start) & (targets < columns.stop)).nonzero().squeeze(1)
            grad_logits[inside, targets[inside] - columns.start] += grad_logprobs[inside]
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(0)
            grad_logits = grad_logits.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ cast_weight[columns]
            if grad_weight is not None:
                grad_weight[columns] = grad_logits.t() @ cast_hidden
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
