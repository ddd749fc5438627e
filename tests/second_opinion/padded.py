"""One batch in both layouts: TRL's, padded [B, T] with masks, and ours, the action tokens alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs
from engines.algorithms.objective import Objective
from engines.algorithms.reduce import counts_by_part
from engines.algorithms.spec import Algorithm

LENGTHS = (5, 2, 7, 1, 4, 3)
"""Response tokens of each row, those of a tool included."""
TOOL_TOKENS = ((2, 2), (2, 3), (4, 0))
"""(row, token) that a tool wrote."""
NUM_ROWS, LONGEST = len(LENGTHS), max(LENGTHS)
ADVANTAGES = (1.5, -0.7, -1.1, 0.4, 0.0, -0.3)


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """What a policy loss may read, all [B, T] float64 but the advantages [B]. Padding holds numbers that must not
    matter.
    """

    logprobs: Tensor
    entropies: Tensor
    old: Tensor
    rollout: Tensor
    """Of the sampler, as float32 has them: TRL keeps them so."""
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    """[B, T] 1 on tokens of the response that the policy wrote."""

    @property
    def completion_mask(self) -> Tensor:
        """[B, T] 1 on tokens of the response."""
        return (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()

    def trl_inputs(self) -> dict[str, Tensor]:
        """What `_compute_loss` of GRPOTrainer takes."""
        ids = torch.ones(NUM_ROWS, LONGEST, dtype=torch.long)
        return {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": self.completion_mask,
            "tool_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
        }

    def rows(self, wanted: slice) -> Padded:
        """Some rows."""
        return Padded(**{each.name: getattr(self, each.name)[wanted] for each in dataclasses.fields(self)})

    def flat(self) -> LossInputs:
        """The rows that train, as our losses see them."""
        trains = self.mask.bool()
        lengths = trains.sum(1)
        kept = torch.arange(int((lengths > 0).sum()))
        lengths = lengths[lengths > 0]
        return LossInputs(
            logprobs=self.logprobs[trains],
            row_of_token=torch.repeat_interleave(kept, lengths),
            num_actions=lengths,
            old_logprobs=self.old[trains],
            advantages=self.advantages[:, None].expand_as(self.mask)[trains],
            reference_logprobs=self.reference[trains],
            rollout_logprobs=self.rollout[trains],
            entropies=self.entropies[trains],
        )


def batch(spread: float = 0.6, seed: int = 0, **changes: Any) -> Padded:
    """Six rows of unequal lengths whose ratios to the old policy have a log of about +-spread."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, shift: float) -> Tensor:
        return torch.randn(NUM_ROWS, LONGEST, generator=generator, dtype=torch.float64) * scale + shift

    old = normal(0.5, -2.0)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
    for row, token in TOOL_TOKENS:
        mask[row, token] = 0
    fields: dict[str, Tensor] = {
        "logprobs": (old + normal(spread, 0.0)).requires_grad_(),
        "entropies": normal(0.2, 1.5).requires_grad_(),
        "old": old,
        "rollout": (old + normal(0.3, 0.0)).float().double(),
        "reference": old + normal(0.3, 0.0),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "mask": mask,
    }
    return Padded(**fields | changes)


def ours(x: Padded, algorithm: Algorithm) -> Tensor:
    """Our loss of the batch."""
    flat = x.flat()
    experts = [False] * len(flat.num_actions)
    response_lengths = [length for length, mask in zip(LENGTHS, x.mask, strict=False) if mask.any()]
    return Objective(algorithm).loss(flat, counts_by_part(flat.num_actions.tolist(), response_lengths, experts))[0]


def assert_same(x: Padded, our_loss: Tensor, their_loss: Tensor, rtol: float = 1e-12) -> None:
    """Equal losses, and equal gradients in all logprobs and entropies, tool tokens and padding included."""
    torch.testing.assert_close(our_loss.detach(), their_loss.detach(), rtol=rtol, atol=1e-15)
    for leaf in (x.logprobs, x.entropies):
        our, their = (
            torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
            for loss in (our_loss, their_loss)
        )
        torch.testing.assert_close(our, their, rtol=rtol, atol=1e-15)
        if leaf is x.logprobs:
            assert our.abs().max() > 1e-3
            assert (our[~x.mask.bool()] == 0).all()
