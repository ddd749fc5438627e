"""The sample strategy that a config names.

Owns: putting reader, strategy and expert buffer together. Does not own: any of them.
"""

from __future__ import annotations

from functools import partial

from trinity_tasks.buffer.epochs import Epochs
from trinity_tasks.buffer.mixed import Mixed
from trinity_tasks.buffer.pool import Decay, NewestFirst, Pooled
from trinity_tasks.buffer.reader import ExperienceReader
from trinity_tasks.buffer.row_checks import RowLimits
from trinity_tasks.buffer.strategies import Fifo, Strategy
from trinity_tasks.buffer_config import ExperienceBufferConfig
from trinity_tasks.config import Config
from trinity_tasks.offline.config import IMPORT_WRITER
from trinity_tasks.selectors import Selector, SelectorConfig, build_selector
from trinity_tasks.storage import Storage


def row_limits(config: Config) -> RowLimits:
    """What the model takes.

    Not the tokenizer's size: embeddings are often padded, and the model may sample what pads.
    """
    return RowLimits(
        max_prompt_tokens=config.model.max_prompt_tokens,
        max_response_tokens=config.model.max_response_tokens,
        max_model_len=config.model.max_model_len,
    )


def strategy_for(config: Config, store: Storage) -> Strategy:
    """Takes the batches of the config's job; `store` is the job's folder."""
    buffers, num_experts = config.buffer.trainer_input, config.expert_batch_size
    sampled = _strategy(config, store, buffers.experience_buffer, config.train_batch_size - num_experts)
    if not num_experts:
        return sampled
    return Mixed(sampled, _strategy(config, store, buffers.expert_buffer, num_experts), buffers.expert_buffer.name)


def _strategy(config: Config, store: Storage, buffer: ExperienceBufferConfig, num_rows: int) -> Strategy:
    own = [config.explorer.name] if config.mode == "both" else None
    reader = ExperienceReader(
        store,
        buffer.name,
        writers=own if buffer.data is None else [IMPORT_WRITER],
        limits=row_limits(config),
        max_damaged_shards=buffer.max_damaged_shards,
    )
    match buffer.sample_strategy:
        case "fifo":
            return Fifo(reader, num_rows, max_staleness=buffer.max_staleness)
        case "newest" | "priority":
            priority = NewestFirst() if buffer.sample_strategy == "newest" else _decay(config, buffer)
            return Pooled(reader, num_rows, priority, capacity=buffer.capacity, max_staleness=buffer.max_staleness)
        case "epochs":
            return Epochs(
                reader,
                num_rows,
                config.group_size,
                partial(_selector, buffer.data_selector, config.seed),
                feature_keys=buffer.data_selector.feature_keys,
                total_epochs=buffer.total_epochs,
                last_batch=config.buffer.trainer_input.last_batch,
            )


def _decay(config: Config, buffer: ExperienceBufferConfig) -> Decay:
    replay = buffer.replay_buffer
    return Decay(
        seed=config.seed,
        decay=replay.decay,
        sigma=replay.sigma,
        use_count_limit=replay.use_count_limit,
        cooldown_steps=replay.reuse_cooldown_steps,
    )


def _selector(config: SelectorConfig, seed: int, num_items: int, features: list[list[float]] | None) -> Selector:
    return build_selector(config, num_items, seed, features)
