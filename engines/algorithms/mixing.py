"""Losses of a batch of sampled and of expert rows: a component each, over its own counts. See `Mix`, `MixChord`."""

from __future__ import annotations

import dataclasses
import math

import torch

from engines.algorithms.inputs import LossInputs, Part, TokenLoss, maximum, token_mean
from engines.algorithms.losses import ppo_clip, sft, sft_phi
from engines.algorithms.spec import Mix, MixChord, Sft, SftPhi


def mix(x: LossInputs, p: Mix) -> tuple[TokenLoss, TokenLoss]:
    """PPO on the sampled rows and SFT on the expert's, with a fixed share; see `Mix`."""
    experts = x.part(Part.EXPERT)
    return _mixed(x, p, p.mu, experts, sft(experts, Sft()))


def mix_chord(x: LossInputs, p: MixChord) -> tuple[TokenLoss, TokenLoss]:
    """The same with a share that follows the train step; see `MixChord`."""
    experts = x.part(Part.EXPERT)
    loss = sft_phi(experts, SftPhi()) if p.enable_phi_function else sft(experts, Sft())
    return _mixed(x, p, chord_mu(x.step, p), experts, loss)


def chord_mu(step: int, p: MixChord) -> float:
    """The expert's share after `step` train steps."""
    if step < p.mu_warmup_steps:
        return step / p.mu_warmup_steps * p.mu_peak
    decayed = step - p.mu_warmup_steps
    if decayed >= p.mu_decay_steps:
        return p.mu_valley
    return p.mu_valley + (p.mu_peak - p.mu_valley) * (1 + math.cos(math.pi * decayed / p.mu_decay_steps)) / 2


def _mixed(x: LossInputs, p: Mix, mu: float, experts: LossInputs, loss: TokenLoss) -> tuple[TokenLoss, TokenLoss]:
    sampled = ppo_clip(x.part(Part.SAMPLED), p.ppo)
    stats = {
        "mix/expert_nll": token_mean(-experts.logprobs),
        "mix/mu": maximum(torch.tensor(mu, device=x.logprobs.device)),
    }
    return (
        dataclasses.replace(sampled, value=(1 - mu) * sampled.value, part=Part.SAMPLED),
        dataclasses.replace(loss, value=mu * loss.value, part=Part.EXPERT, stats=stats),
    )
