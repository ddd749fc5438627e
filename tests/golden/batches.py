"""Padded [B, T] batches of a golden file as our losses see them: action tokens alone, once with our denominators and
once with those of the reference system, which counts rows without action tokens and adds 1e-8 (difference 4).

Ours, evaluated with the second, must be exactly its number: so that difference is taken out and all else is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Part, TokenLoss
from engines.algorithms.reduce import Counts, CountsByPart, StatTotals, aggregate, counts_by_part
from engines.algorithms.spec import Aggregation
from tests.golden.derived_losses import EPSILON, Token, Tokens, row_weights
from tests.golden.format import Bools, Floats, Unreadable, mask_of, padded

COLUMNS = {"old_logprob": "old_logprobs", "advantages": "advantages", "ref_logprob": "reference_logprobs"}
"""Key of the file -> field of `LossInputs`."""
ROW_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean")
ONE_EACH: Mapping[Part, float] = {}


@dataclass(frozen=True, slots=True)
class Reduced:
    """A loss as numbers."""

    loss: float
    gradient: Floats
    """[B, T]."""
    shares: dict[Part, float]
    metrics: dict[str, float]


@dataclass(slots=True)
class Batch:
    """One padded batch."""

    mask: Bools
    """[B, T]."""
    expert: Bools
    """[B]."""
    leaf: Tensor
    """[B, T] logprobs, or entropies, or what else the loss is differentiated by."""
    inputs: LossInputs
    """The rows that have an action token."""
    rows: list[Tokens]
    """All of them, for derivations."""

    @classmethod
    def of(cls, inputs: dict[str, Any], leaf_key: str = "logprob", step: int = 0) -> Batch:
        """Raises Unreadable for keys that are missing or of another shape."""
        mask, values = mask_of(inputs), padded(inputs, leaf_key)
        given = {key: padded(inputs, key) for key in COLUMNS if inputs.get(key) is not None}
        for key, value in {leaf_key: values, **given}.items():
            if value.shape != mask.shape:
                raise Unreadable(f"{key} is {value.shape}, the mask {mask.shape}")
        experts = inputs.get("expert_mask")
        expert = np.zeros(len(mask), np.bool_) if experts is None else np.array(experts, np.bool_)
        leaf, flat = torch.from_numpy(values).requires_grad_(), torch.from_numpy(mask)
        num_actions = flat.sum(1)
        number = torch.cumsum(num_actions > 0, 0) - 1
        x = LossInputs(
            logprobs=leaf[flat],
            row_of_token=number[:, None].expand_as(flat)[flat],
            num_actions=num_actions[num_actions > 0],
            entropies=leaf[flat],
            is_expert=None if experts is None else torch.from_numpy(expert)[:, None].expand_as(flat)[flat],
            step=step,
            **{COLUMNS[key]: torch.from_numpy(value)[flat] for key, value in given.items()},
        )
        rows = [
            Tokens(
                logprob=values[b][mask[b]].tolist(),
                old=given["old_logprob"][b][mask[b]].tolist() if "old_logprob" in given else [],
                advantage=given["advantages"][b][mask[b]].tolist() if "advantages" in given else [],
                reference=given["ref_logprob"][b][mask[b]].tolist() if "ref_logprob" in given else [],
            )
            for b in range(len(mask))
        ]
        return cls(mask, expert, leaf, x, rows)

    @property
    def lengths(self) -> list[int]:
        """[B] action tokens."""
        return self.mask.sum(1).tolist()

    @property
    def width(self) -> int:
        """T."""
        return self.mask.shape[1]

    @property
    def counts(self) -> CountsByPart:
        """Ours."""
        return counts_by_part(self.lengths, [self.width] * len(self.mask), self.expert.tolist())

    def members(self, part: Part) -> list[int]:
        """The rows of a part."""
        everyone = range(len(self.mask))
        if part is Part.ALL:
            return list(everyone)
        return [row for row in everyone if self.expert[row] == (part is Part.EXPERT)]

    def counts_there(self, epsilon: float = EPSILON) -> dict[Part, Any]:
        """The reference system's, which are no whole numbers: with rows without action tokens, and 1e-8."""
        lengths, counts = self.mask.sum(1), dict[Part, Any]()
        for part in Part:
            rows = self.members(part)
            of_any_type: Any = (lengths[rows].sum() + epsilon, len(rows), self.width + epsilon)
            counts[part] = Counts(*of_any_type)
        return counts

    def inputs_there(self, epsilon: float = EPSILON) -> LossInputs:
        """With its row lengths, which divide means over a row."""
        return dataclasses.replace(self.inputs, num_actions=self.inputs.num_actions.double() + epsilon)

    def skips_rows(self, mode: str, parts: Sequence[Part] = (Part.ALL,)) -> bool:
        """Difference 4 applies: a mean over rows leaves out some, but not all, of a part."""
        lengths = self.mask.sum(1)
        return mode in ROW_MEANS and any(
            0 < (lengths[self.members(p)] == 0).sum() < len(self.members(p)) for p in parts
        )

    def lacks_all(self, mode: str, part: Part) -> bool:
        """Difference 4 applies: a mean over the rows of a part that has none."""
        return mode in ROW_MEANS and not self.members(part)

    def reduced(
        self,
        loss: TokenLoss | tuple[TokenLoss, ...],
        mode: Aggregation,
        x: LossInputs,
        counts: CountsByPart,
        factors: Mapping[Part, float] = ONE_EACH,
    ) -> Reduced:
        """Our loss as numbers, with these denominators; `factors` multiply the shares of parts."""
        total, shares, totals = self.leaf.sum() * 0, dict[Part, float](), StatTotals()
        for each in loss if isinstance(loss, tuple) else (loss,):
            share = factors.get(each.part, 1.0) * aggregate(each, x.part(each.part), mode, counts[each.part])
            total, shares[each.part] = total + share, float(share.detach())
            totals.add({key: stat._replace(part=each.part) for key, stat in each.stats.items()})
        (gradient,) = torch.autograd.grad(total, self.leaf, retain_graph=True)
        metrics = {key: number.value for key, number in totals.numbers(counts).items()}
        return Reduced(float(total.detach()), gradient.numpy(), shares, metrics)

    def derived(
        self, tokens: Mapping[int, Sequence[Token]], mode: str, of_that_system: bool = False
    ) -> tuple[float, Floats, float]:
        """(loss, [B, T] gradient, sum of the sizes of all terms) of derived tokens of some rows, row -> tokens."""
        lengths = self.mask.sum(1)
        weights = row_weights([int(lengths[row]) for row in tokens], self.width, mode, of_that_system)
        loss, size, gradient = 0.0, 0.0, np.zeros(self.mask.shape)
        for (row, values), weight in zip(tokens.items(), weights, strict=True):
            for column, (value, slope) in zip(np.flatnonzero(self.mask[row]), values, strict=True):
                loss, size = loss + weight * value, size + abs(weight * value)
                gradient[row, column] = weight * slope
        return loss, gradient, size
