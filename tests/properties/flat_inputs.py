"""What a loss sees, drawn at random, and how it is cut into micro-batches: written anew, not with the engine's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs
from engines.algorithms.reduce import CountsByPart, counts_by_part
from engines.algorithms.spec import Algorithm

_BY_TOKEN = [
    field.name for field in dataclasses.fields(LossInputs) if field.name not in ("num_actions", "row_of_token", "step")
]


def flat_inputs(
    algorithm: Algorithm, lengths: Sequence[int], seed: int, dtype: torch.dtype = torch.float64, spread: float = 0.5
) -> LossInputs:
    """Rows of so many tokens with every optional field; log ratios have a std of about `spread`."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return (torch.randn(num_tokens, generator=generator) * scale + shift).to(dtype)

    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    with_experts = "expert_rows" in algorithm.needs
    expert_rows = torch.rand(len(lengths), generator=generator) < 0.4
    return LossInputs(
        logprobs=normal(spread, -2).requires_grad_(),
        row_of_token=rows,
        num_actions=torch.tensor(lengths, dtype=torch.int64),
        old_logprobs=normal(spread, -2),
        advantages=normal(1.0),
        reference_logprobs=normal(spread, -2),
        rollout_logprobs=normal(spread, -2),
        entropies=normal(0.3, 2).requires_grad_(),
        selected=torch.rand(num_tokens, generator=generator) < 0.3,
        is_expert=expert_rows[rows] if with_experts else None,
        step=2,
    )


def counts_of(x: LossInputs) -> CountsByPart:
    """Global counts; responses are two tokens longer than what trains of them."""
    lengths = x.num_actions.tolist()
    experts = [False] * len(lengths)
    if x.is_expert is not None:
        experts = [bool(x.is_expert[x.row_of_token == row].any()) for row in range(len(lengths))]
    return counts_by_part(lengths, [length + 2 for length in lengths], experts)


def gradients_of(loss: Tensor, x: LossInputs) -> tuple[Tensor, Tensor]:
    """In the logprobs and in the entropies; 0 in what the loss does not read."""
    assert x.entropies is not None
    of_logprobs, of_entropies = torch.autograd.grad(
        loss, (x.logprobs, x.entropies), allow_unused=True, materialize_grads=True
    )
    return of_logprobs, of_entropies


def cut(x: LossInputs, rows: Sequence[int]) -> tuple[LossInputs, np.ndarray]:
    """These rows, in this order, as a micro-batch with leaves of its own; and which tokens of `x` they are."""
    tokens = np.concatenate([*(np.flatnonzero(x.row_of_token.numpy() == row) for row in rows), np.empty(0, np.int64)])
    fields: dict[str, Tensor] = {}
    for name in _BY_TOKEN:
        value = getattr(x, name)
        if value is not None:
            fields[name] = value.detach()[torch.from_numpy(tokens)].requires_grad_(value.requires_grad)
    num_actions = x.num_actions[torch.tensor(rows, dtype=torch.int64)]
    numbers = torch.repeat_interleave(torch.arange(len(rows)), num_actions)
    return dataclasses.replace(x, num_actions=num_actions, row_of_token=numbers, **fields), tokens
