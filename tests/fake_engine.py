"""`FakeEngine`: a whole engine in a few numbers, for tests of everything around engines. No torch.

Its one weight vector is a deterministic function of every token it was trained on, in order, so that a lost, repeated
or reordered batch changes the final weights. Its sampler answers from the weights and the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from engines.base import Completion, TrainEngineWrapper, Weights
from engines.config import EngineConfig, TokenizerConfig
from engines.errors import EngineError
from engines.experience import Experience
from engines.text import Tokenizer, build_tokenizer


class FakeSampler:
    """Tokens from a hash of (weights, prompt, seed)."""

    def __init__(self, weights: np.ndarray, stop: int, vocab: int) -> None:
        self.version = 0
        self._weights = weights
        self._stop = stop
        self._vocab = vocab

    def load(self, version: int, weights: Weights) -> None:
        self.version, self._weights = version, weights["weights"]

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        return [[self._one(prompt, run, max_tokens, seed) for run in range(n)] for prompt in prompts]

    def _one(self, prompt: Sequence[int], run: int, max_tokens: int, seed: int) -> Completion:
        digest = hashlib.sha256(self._weights.tobytes() + repr((list(prompt), run, seed)).encode()).digest()
        length = 1 + digest[0] % max(min(max_tokens, 4) - 1, 1)
        letters = [self._vocab - 1 - byte % 20 for byte in digest[1:length]]
        return Completion(
            np.asarray([*letters, self._stop], np.int32), np.full(length, -0.5 - digest[9] / 512, np.float32), "stop"
        )


class FakeEngine(TrainEngineWrapper):
    """See the module. `fail_at`: the train step that raises."""

    fail_at: int | None = None
    bad_weights = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.calls: list[str] = []
        self._step = 0
        self._weights = np.zeros(8)
        self.tokenizer: Tokenizer = build_tokenizer(config.model.tokenizer or TokenizerConfig(kind="char"))

    async def prepare(self) -> None:
        self._weights = np.random.default_rng(self.config.seed).standard_normal(8)
        if self.model_dir is not None:
            self._weights = load_file(self.model_dir / "model.safetensors")["weights"]
        if self.restore_dir is not None:
            self._weights = load_file(self.restore_dir / "model" / "model.safetensors")["weights"]
            self._step = json.loads((self.restore_dir / "engine_state.json").read_text())["train_step_num"]

    @property
    def train_step_num(self) -> int:
        return self._step

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        if self.fail_at == self._step + 1:
            self.calls.append("engine.train_step raises")
            raise EngineError(f"step {self._step + 1}: told to fail")
        text = repr([(exp.eid.uid, exp.tokens.tolist(), exp.reward) for exp in batch_exps])
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)[:8]
        self._weights = np.cos(self._weights * 1.37) + digest / 256
        self._step += 1
        self.calls.append(f"engine.train_step#{self._step}")
        rewards = [exp.reward or 0.0 for exp in batch_exps]
        return {"loss/policy": float(self._weights.sum()), "data/reward_mean": float(np.mean(rewards))}

    def _save_model(self, folder: Path) -> None:
        if self.bad_weights:
            raise EngineError("weights: not finite; the snapshot is refused")
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weights": self._weights}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "fake"}))

    def _staged(self) -> Path:
        assert self.staging_dir is not None
        return self.staging_dir

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        self.calls.append(f"engine.save_checkpoint(step={self._step},block={block_until_saved},hf={save_as_hf})")
        self._save_model(self._staged() / "model")
        (self._staged() / "engine_state.json").write_text(json.dumps({"train_step_num": self._step}))

    def sync_weight(self) -> None:
        self.calls.append(f"engine.sync_weight_nccl(step={self._step})")

    def upload_state_dict(self) -> None:
        self.calls.append(f"engine.upload_state_dict(step={self._step})")
        if self.weights_sink is not None:
            self.weights_sink(self._step, {"weights": self._weights.copy()})

    def save_state_dict(self) -> None:
        self.calls.append(f"engine.save_state_dict(step={self._step})")
        self._save_model(self._staged())

    def make_sampler(self) -> Any:
        stop: Any = self.tokenizer.eos_token_id
        sampler = FakeSampler(self._weights.copy(), stop, len(self.tokenizer))
        sampler.version = self._step
        return sampler
