"""`HfSampler`: batched generation from live weights, with the logprobs that training will see.

Owns: batching of prompts, drawing tokens, stopping, dropping finished rows. Does not own: the cache and the forward
(`engines.hf.decoding`), scoring of responses, weight transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.base import Completion
from engines.errors import DataError, EngineError
from engines.hf.decoding import cache_bytes_per_token, make_decoder
from engines.hf.forward import Head, tempered_logits

MAX_ROWS = 1024
MAX_CACHE_BYTES = 2 << 30
MAX_LOGITS = 1 << 24
"""Logits held at once, in numbers: 64 MB of float32, and twice that of cumulative probabilities."""
KEEP_SHARE = 0.85
"""Rows are compacted when fewer than this share is unfinished: copying the cache must cost less than it saves."""
GOLDEN_GAMMA = -0x61C8864680B583EB
"""2**64 over the golden ratio, as int64: the increment of SplitMix64."""


class HfSampler:
    """Samples n responses to each prompt; a prompt is prefilled once and its cache repeated.

    Each row draws from its own stream of uniform numbers, fixed by (seed, row): a response depends neither on which
    rows have finished nor, beyond rounding, on what else is in the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_token_ids: tuple[int, ...],
        pad_token_id: int,
        max_model_len: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.version = 0
        self._model: Any = model
        self._pad = pad_token_id
        self._max_model_len = max_model_len
        self._compute_dtype = compute_dtype
        output = self._model.get_output_embeddings()
        self._head = Head(output.weight, output.bias)
        self._device = output.weight.device
        vocab_size = output.weight.shape[0]
        if bad := [token for token in (*stop_token_ids, pad_token_id) if not 0 <= token < vocab_size]:
            raise EngineError(f"stop or pad token ids {bad} are outside the vocabulary of {vocab_size}")
        self._stops = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
        self._stops[list(stop_token_ids)] = True

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Copy these weights into the model; `version` is the train step at which they were published.

        Raises EngineError for a missing, unknown or misshapen tensor; the model is then unchanged.
        """
        own = dict(self._model.named_parameters())
        aliases = self._model.state_dict().keys()
        if missing := sorted(own.keys() - weights.keys()):
            raise EngineError(f"weights version {version} lack {len(missing)} tensors, {missing[0]} first")
        if unknown := sorted(weights.keys() - aliases):
            raise EngineError(f"weights version {version} have {len(unknown)} unknown tensors, {unknown[0]} first")
        for name, parameter in own.items():
            if weights[name].shape != parameter.shape:
                shapes = f"{tuple(weights[name].shape)}, the model has {tuple(parameter.shape)}"
                raise EngineError(f"weights version {version}: {name} has shape {shapes}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self.version = version

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """n completions for each prompt, equal for equal (weights, arguments). temperature 0: greedy, untempered.

        Raises DataError for an empty prompt or one that leaves no room; EngineError if the weights are not finite.
        """
        limits = self._limits(prompts, n, max_tokens)
        streams = _row_streams(seed, len(prompts) * n).view(-1, n).to(self._device)
        results: list[list[Completion]] = [[] for _ in prompts]
        was_training = self._model.training
        self._model.eval()
        for chunk in self._chunks(prompts, limits, n):
            completions = self._generate_chunk(
                [prompts[index] for index in chunk],
                [limits[index] for index in chunk],
                streams[chunk].flatten(),
                n,
                temperature,
            )
            for index, group in zip(chunk, completions, strict=True):
                results[index] = group
        self._model.train(was_training)
        return results

    def _limits(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> list[int]:
        """Longest response of each prompt, tokens."""
        if n < 1 or max_tokens < 1:
            raise DataError(f"n = {n} and max_tokens = {max_tokens} must both be at least 1")
        limits: list[int] = []
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise DataError(f"prompt {index} is empty; nothing can be sampled from it")
            if len(prompt) >= self._max_model_len:
                raise DataError(
                    f"prompt {index} has {len(prompt)} tokens and leaves no room for a response within "
                    f"model.max_model_len = {self._max_model_len}; shorten the prompt or raise the limit"
                )
            limits.append(min(max_tokens, self._max_model_len - len(prompt)))
        return limits

    def _chunks(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], n: int) -> list[list[int]]:
        """Prompt indices, shortest first, in batches bounded by rows and by tokens in the cache."""
        max_tokens = MAX_CACHE_BYTES // cache_bytes_per_token(self._model)
        chunks: list[list[int]] = []
        for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            rows = (len(chunks[-1]) + 1) * n if chunks else 0
            if not chunks or rows > MAX_ROWS or rows * (len(prompts[index]) + limits[index]) > max_tokens:
                chunks.append([])
            chunks[-1].append(index)
        return chunks

    def _generate_chunk(
        self, prompts: list[Sequence[int]], limits: list[int], streams: Tensor, n: int, temperature: float
    ) -> list[list[Completion]]:
        """One batch to its end; streams [P * n] int64, one per row."""
        decoder = make_decoder(self._model)
        rows = len(prompts) * n
        row_limits = torch.tensor(limits, device=self._device).repeat_interleave(n)
        tokens = torch.full((rows, max(limits)), self._pad, device=self._device)
        logprobs = torch.zeros((rows, max(limits)), device=self._device)
        lengths = row_limits.clone()
        stopped = torch.zeros(rows, dtype=torch.bool, device=self._device)
        alive = torch.arange(rows, device=self._device)
        open_rows = torch.ones(rows, dtype=torch.bool, device=self._device)
        with torch.autocast(self._device.type, self._compute_dtype, enabled=self._compute_dtype != torch.float32):
            hidden = decoder.prefill(*self._left_padded(prompts)).repeat_interleave(n, 0)
            decoder.repeat(n)
            for step in range(max(limits)):
                chosen, chosen_logprobs = self._draw(hidden, _uniform(streams[alive], step), temperature)
                tokens[alive, step] = chosen
                logprobs[alive, step] = chosen_logprobs
                ended = self._stops[chosen] & open_rows
                lengths[alive[ended]] = step + 1
                stopped[alive[ended]] = True
                open_rows &= ~ended & (row_limits[alive] > step + 1)
                num_open = int(open_rows.sum())
                if num_open == 0:
                    break
                if num_open <= KEEP_SHARE * len(alive):
                    kept = open_rows.nonzero().squeeze(1)
                    decoder.keep(kept)
                    alive, chosen, open_rows = alive[kept], chosen[kept], open_rows[kept]
                hidden = decoder.step(chosen)
        return self._completions(tokens, logprobs, lengths, stopped, n)

    def _left_padded(self, prompts: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """ids [P, L] with padding on the left, and the slot [P] of each first token."""
        longest = max(map(len, prompts))
        padded = [[self._pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        start = [longest - len(prompt) for prompt in prompts]
        return torch.tensor(padded, device=self._device), torch.tensor(start, device=self._device)

    def _draw(self, hidden: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens [B] by inverse of the cumulative distribution at uniform [B], and their logprobs [B]."""
        parts = max(1, MAX_LOGITS // len(self._head.weight))
        drawn = [
            self._draw_part(some_hidden, some_uniform, temperature)
            for some_hidden, some_uniform in zip(hidden.split(parts), uniform.split(parts), strict=True)
        ]
        return torch.cat([chosen for chosen, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])

    def _draw_part(self, hidden: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = tempered_logits(hidden, self._head, temperature, self._compute_dtype)
        normaliser = torch.logsumexp(logits, -1, keepdim=True)
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            cumulative = (logits - normaliser).exp().double().cumsum(-1)
            # below the total by more than rounding, so that no token of probability 0 is ever reached
            target = uniform[:, None].clamp_max(1 - 1e-12) * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, target, right=True).clamp_max(logits.shape[1] - 1)
        return chosen.squeeze(1), (logits.gather(1, chosen) - normaliser).squeeze(1)

    def _completions(
        self, tokens: Tensor, logprobs: Tensor, lengths: Tensor, stopped: Tensor, n: int
    ) -> list[list[Completion]]:
        """Rows as completions, n in each group."""
        all_tokens, all_logprobs = tokens.int().cpu().numpy(), logprobs.cpu().numpy()
        rows = [
            Completion(all_tokens[row, :length].copy(), all_logprobs[row, :length].copy(), "stop" if stop else "length")
            for row, (length, stop) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
        ]
        within = torch.arange(logprobs.shape[1], device=self._device)[None, :] < lengths[:, None]
        if not bool(torch.isfinite(logprobs[within]).all()):
            raise EngineError(
                f"weights version {self.version} give logprobs that are not finite; resume from a checkpoint"
            )
        return [rows[first : first + n] for first in range(0, len(rows), n)]


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014, fig. 13) on int64, whose products wrap."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _row_streams(seed: int, num_rows: int) -> Tensor:
    """[num_rows] int64 starting points of independent streams of random numbers."""
    key = _mix(torch.tensor([(seed + 2**63) % 2**64 - 2**63]))
    return _mix(key + torch.arange(1, num_rows + 1) * GOLDEN_GAMMA)


def _uniform(streams: Tensor, step: int) -> Tensor:
    """[B] float64 in [0, 1): number `step` of each stream."""
    return _shift_right(_mix(streams + torch.tensor(step + 1) * GOLDEN_GAMMA), 11).double() * 2.0**-53
