"""What may be sent to a tracker: legal names, flat parameters, no secrets.

Owns: the one place where names are sanitised and secrets masked. Does not own: sending (`tracking.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

MAX_NAME_LENGTH = 250
"""Characters MLflow allows in a metric, parameter or tag name."""
MAX_PARAM_LENGTH = 6000
"""Characters MLflow allows in a parameter value."""
MAX_TAG_LENGTH = 7500
"""Characters of a tag value; MLflow allows 8000."""
MASK = "***"
"""What is shown instead of a secret."""

_ILLEGAL = re.compile(r"[^\w./ -]")
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|(access|api|private|token|account|sas)_?key"
    r"|(^|_)(access|api|auth|bearer|hf|hub|refresh|session)_?token$|^(token|authorization)$",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


@lru_cache(maxsize=4096)
def sanitize_name(name: str) -> str:
    """The nearest legal metric, parameter or tag name; names that are too long stay apart by a hash."""
    legal = _ILLEGAL.sub("_", name.replace("@", "_at_").replace("%", "pct"))
    legal = "/".join(part for part in legal.split("/") if part.strip(" .")) or "unnamed"
    if len(legal) <= MAX_NAME_LENGTH:
        return legal
    return f"{legal[: MAX_NAME_LENGTH - 9]}.{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def mask_secrets(value: Any, key: str = "") -> Any:
    """`value` with every secret replaced: all below a secret-looking key, and logins inside URLs."""
    if value not in (None, "") and _SECRET.search(key.rpartition(".")[2]):
        return MASK
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): mask_secrets(item, str(name)) for name, item in items}
    if isinstance(value, str):
        return _URL_LOGIN.sub(f"{MASK}@", value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [mask_secrets(item, key) for item in cast("Sequence[Any]", value)]
    return value


def legal_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags with legal names and lengths, secrets masked."""
    return {sanitize_name(key): str(mask_secrets(value, key))[:MAX_TAG_LENGTH] for key, value in tags.items()}


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested config as `a.b.0.c` -> text, secrets masked, values above 6000 characters cut and named by their hash."""
    return {sanitize_name(name): _param_text(value) for name, value in _leaves(mask_secrets(config), "") if name}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in cast("dict[str, Any]", value).items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in cast("list[Any]", value)):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value


def _param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MAX_PARAM_LENGTH:
        return text
    suffix = f"... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return text[: MAX_PARAM_LENGTH - len(suffix)] + suffix
