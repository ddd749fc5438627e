"""The snapshot of an engine: model/ (HF folder), optimizer.safetensors, engine_state.json. No pickle.

Owns: the format, and that a restored engine goes on bit for bit. Does not own: where snapshots live (`trinity_tasks`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engines.errors import CheckpointError
from engines.hf.optim import AdamW

FORMAT = 2
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "engine_state.json"


@dataclass(slots=True)
class EngineState:
    """What goes on beside the weights and the optimizers."""

    train_step_num: int = 0
    consecutive_nonfinite: int = 0
    kl_coefficients: dict[str, float] = field(default_factory=dict[str, float])
    """Part of the algorithm -> coefficient, where it is adapted."""


def write(folder: Path, optimizers: Mapping[str, AdamW], state: EngineState) -> None:
    """Write optimizers, by the prefix of their file, state and random states; models write themselves."""
    for prefix, optimizer in optimizers.items():
        tensors = {key: value.contiguous() for key, value in optimizer.tensors().items()}
        save_file(tensors, folder / f"{prefix}{OPTIMIZER}")
    updates = {prefix: optimizer.num_updates for prefix, optimizer in optimizers.items()}
    content = {"format": FORMAT, "num_updates": updates, "state": asdict(state), "rng": _rng_states()}
    (folder / STATE).write_text(json.dumps(content, indent=1))


def read(folder: Path, optimizers: Mapping[str, AdamW]) -> EngineState:
    """Load what `write` wrote into the optimizers and the random generators; returns the rest.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    try:
        content: dict[str, Any] = json.loads((folder / STATE).read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(f"{folder / STATE} has format {content['format']}, this version reads {FORMAT}")
        state = EngineState(**content["state"])
        for prefix, optimizer in optimizers.items():
            optimizer.num_updates = int(content["num_updates"][prefix])
            optimizer.load_tensors(load_file(folder / f"{prefix}{OPTIMIZER}"))
        _set_rng_states(content["rng"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"snapshot {folder} cannot be restored ({type(error).__name__}: {error}); resume from an older checkpoint"
        ) from error
    return state


def seed_everything(seed: int) -> None:
    """Start all random generators. Only torch's goes on in a snapshot: see `_rng_states`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _rng_states() -> dict[str, str]:
    """Of torch alone: any library of the process may draw from those of Python and numpy, in threads of its own, so
    they belong to no snapshot, and nothing here draws from them."""
    return {"torch": torch.get_rng_state().numpy().tobytes().hex()}


def _set_rng_states(states: dict[str, str]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
