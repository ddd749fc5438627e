"""Causal attention over rows laid end to end. Owns: the attention function of the packed layout.

A packed micro-batch is one stream of N tokens, cut into blocks; a block is n rows of equal padded length. Linear
layers, norms and the embedding see one row of N tokens; attention runs per block, on the fast causal path of torch,
without a mask. Padding is at the right end of a row, where no real token can attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "trinity_blocks"
"""Name under which transformers finds `block_attention`. It has no mask function, so transformers builds no mask."""


class Block(NamedTuple):
    """`num_rows` rows of `length` tokens each, padding included, next to each other in the stream."""

    num_rows: int
    length: int


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: Sequence[Block],
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, N, D], key and value [1, Hkv, N, D], N = sum of the blocks -> [1, N, Hq, D].

    Signature of transformers' attention functions; `blocks` comes through the model's forward as a keyword.
    """
    if attention_mask is not None:
        raise ValueError("packed rows take no attention mask: blocks say where a row ends")
    parts = []
    for block, q, k, v in zip(blocks, *(_split(x, blocks) for x in (query, key, value)), strict=True):
        mask = _window_mask(block.length, sliding_window, query.device)
        out, _ = sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=scaling, **kwargs)
        parts.append(out.flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _split(x: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """[1, H, N, D] -> per block [n, H, length, D]. One split, so that the backward pass is one cat."""
    parts = x.squeeze(0).transpose(0, 1).split([block.num_rows * block.length for block in blocks])
    return [part.unflatten(0, block).transpose(1, 2) for part, block in zip(parts, blocks, strict=True)]


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[1, 1, length, length] True where a token may look, for a window shorter than the row; None: plain causal."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(ATTENTION, block_attention)
