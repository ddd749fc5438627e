"""The snapshot of an engine: model/ (HF folder), optimizer.safetensors, engine_state.json. No pickle.

Owns: the format, and that a restored engine goes on bit for bit. Does not own: where snapshots live (`trinity_tasks`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engines.errors import CheckpointError
from engines.hf.optim import AdamW

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "engine_state.json"


def write(folder: Path, optimizer: AdamW, counters: dict[str, int]) -> None:
    """Write optimizer, counters and random states into `folder`; the model is written by `engines.hf.model.save`."""
    tensors = {key: value.contiguous() for key, value in optimizer.tensors().items()}
    save_file(tensors, folder / OPTIMIZER)
    state = {"format": FORMAT, "num_updates": optimizer.num_updates, "counters": counters, "rng": _rng_states()}
    (folder / STATE).write_text(json.dumps(state, indent=1))


def read(folder: Path, optimizer: AdamW) -> dict[str, int]:
    """Load what `write` wrote into `optimizer` and the random generators; returns the counters.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(f"{folder / STATE} has format {state['format']}, this version reads {FORMAT}")
        counters = {key: int(value) for key, value in state["counters"].items()}
        optimizer.num_updates = int(state["num_updates"])
        optimizer.load_tensors(load_file(folder / OPTIMIZER))
        _set_rng_states(state["rng"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"snapshot {folder} cannot be restored ({type(error).__name__}: {error}); resume from an older checkpoint"
        ) from error
    return counters


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
