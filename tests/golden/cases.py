"""Reads golden files and lays their padded [B, T] arrays out as losses see them.

Format: {cases: [{name, init_args, inputs, outputs}]}, non-finite numbers as strings. Differences on purpose that touch
these files, by their number in the table that came with them: 4, rows with an empty mask do not count in seq-mean
denominators, and no epsilon is added to a denominator; 6, the advantage of a group of one is 0; 11, the rank penalty
applies to mean, std and numerator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs
from engines.algorithms.reduce import Counts

VECTORS = Path(__file__).parent / "vectors"
RTOL = 2e-8
"""The files' 1e-9, plus their 1e-8 added to denominators (difference 4), which rows of one token feel in full."""


def cases(file: str) -> list[Any]:
    """The cases of one file."""
    return json.loads((VECTORS / f"{file}.json").read_text())["cases"]


def names(file: str) -> list[str]:
    """Test ids."""
    return [case["name"] for case in cases(file)]


def float64(values: Any) -> Tensor:
    """A float64 tensor; "nan", "inf" and "-inf" are numbers."""
    return torch.tensor(json.loads(json.dumps(values), parse_constant=float), dtype=torch.float64)


@dataclass
class Flat:
    """A padded case with its action tokens picked out."""

    inputs: LossInputs
    counts: Counts
    leaf: Tensor
    """[B, T] logprobs (or entropies), whose gradient the file gives."""
    mask: Tensor
    """[B, T]."""

    @property
    def seq_mean_factor(self) -> float:
        """Difference 4: the file divides by all rows, we by those with an action token."""
        return len(self.mask) / max(self.counts.sequences, 1)


def flatten(inputs: dict[str, Any], leaf_key: str = "logprob") -> Flat:
    """Action tokens of `inputs`, rows without any left out."""
    mask = torch.tensor(inputs.get("action_mask") or inputs["response_mask"])
    leaf = float64(inputs[leaf_key]).requires_grad_()
    num_actions = mask.sum(1)
    compact = torch.cumsum(num_actions > 0, 0) - 1
    rows = compact[:, None].expand_as(mask)[mask]

    def pick(key: str) -> Tensor | None:
        return float64(inputs[key])[mask] if inputs.get(key) is not None else None

    x = LossInputs(
        logprobs=leaf[mask],
        row_of_token=rows,
        num_actions=num_actions[num_actions > 0],
        old_logprobs=pick("old_logprob"),
        advantages=pick("advantages"),
        reference_logprobs=pick("ref_logprob"),
        entropies=leaf[mask],
    )
    return Flat(x, Counts.of(num_actions.tolist(), [mask.shape[1]] * len(mask)), leaf, mask)
