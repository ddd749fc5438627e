"""Any: the library's own annotations leave too much unknown for strict files."""

from typing import Any

def __getattr__(name: str) -> Any: ...
