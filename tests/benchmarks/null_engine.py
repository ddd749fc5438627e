"""An engine that learns nothing and answers from a can, to time everything around it. No torch.

It keeps a diary: when each train step began, how long engine and sampler have taken so far, resident memory. The diary
is allocated whole, so that keeping it does not look like growth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from engines.base import Completion, Sampler, TrainEngineWrapper, Weights
from engines.config import EngineConfig
from engines.experience import Experience
from engines.registry import ENGINES
from engines.text import Tokenizer, build_tokenizer
from tests.benchmarks import machine

NAME = "null"
RESPONSE = "benchmar"
CANNED_METRICS = dict.fromkeys(
    ("loss/policy", "loss/total", "grad/norm", "lr", "policy/clip_fraction", "policy/ratio_mean", "kl/policy"), 0.5
)


class Diary:
    """One line per train step, from step 1 on."""

    def __init__(self, num_steps: int, watched: Sequence[int] = ()) -> None:
        self.begun_s = np.full(num_steps, np.nan)
        """perf_counter at the beginning of the step."""
        self.inside_s = np.full(num_steps, np.nan)
        """Seconds in engine and sampler before the step, all together."""
        self.cpu_s = np.full(num_steps, np.nan)
        """Processor time of this process at the beginning of the step, all threads."""
        self.rss_kb = np.full(num_steps, np.nan)
        """Resident memory of this process at the beginning of the step."""
        self.children_cpu_s: dict[int, dict[int, float]] = {}
        """Processor time by child at the watched steps."""
        self._watched = frozenset(watched)
        self._inside_s = 0.0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Time in this block is the engine's or the sampler's, and the diary's own."""
        start = time.perf_counter()
        yield
        self._inside_s += time.perf_counter() - start

    def note(self, step: int) -> None:
        """Write the step's line; call it first thing within `inside`."""
        self.begun_s[step - 1] = time.perf_counter()
        self.inside_s[step - 1] = self._inside_s
        self.cpu_s[step - 1] = time.process_time()
        self.rss_kb[step - 1] = machine.rss_kb()
        if step in self._watched:
            self.children_cpu_s[step] = machine.children_cpu_s()

    def outside_ms(self) -> np.ndarray:
        """[num_steps - 1] from the beginning of a step to that of the next, less what was inside, milliseconds."""
        return (np.diff(self.begun_s) - np.diff(self.inside_s)) * 1000


def install(diary: Diary) -> None:
    """Make trainer_type `null` known in this process; its engines write in this diary."""
    ENGINES[NAME] = f"{__name__}:NullEngine"
    NullEngine.diary = diary


class NullEngine(TrainEngineWrapper):
    """Counts steps."""

    diary: Diary

    def __init__(self, config: EngineConfig) -> None:
        assert config.model.tokenizer is not None
        self._tokenizer_config = config.model.tokenizer
        self._step = 0

    async def prepare(self) -> None:
        self.tokenizer: Tokenizer = build_tokenizer(self._tokenizer_config)

    @property
    def train_step_num(self) -> int:
        return self._step

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        with self.diary.inside():
            self._step += 1
            self.diary.note(self._step)
            rewards = [exp.reward or 0.0 for exp in batch_exps]
            return {"data/reward_mean": float(np.mean(rewards)), **CANNED_METRICS}

    def make_sampler(self) -> Sampler:
        return NullSampler(self.diary, self.tokenizer)

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        del block_until_saved, save_as_hf
        self.save_state_dict()

    def save_state_dict(self) -> None:
        assert self.staging_dir is not None
        (self.staging_dir / "model").mkdir()
        (self.staging_dir / "model" / "config.json").write_text(json.dumps({"model_type": NAME}))

    def upload_state_dict(self) -> None:
        assert self.weights_sink is not None
        self.weights_sink(self._step, {})

    def sync_weight(self) -> None:
        raise NotImplementedError("the null engine has no weights to broadcast")


class NullSampler:
    """The same few letters for everyone."""

    def __init__(self, diary: Diary, tokenizer: Tokenizer) -> None:
        self.version = 0
        self._diary = diary
        letters: Any = tokenizer.encode(RESPONSE, add_special_tokens=False)
        self._completion = Completion(np.asarray(letters, np.int32), np.full(len(letters), -0.5, np.float32), "stop")

    def load(self, version: int, weights: Weights) -> None:
        del weights
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        del max_tokens, temperature, seed
        with self._diary.inside():
            return [[self._completion] * n for _ in prompts]
