"""Any: the library carries no type information."""

from typing import Any

def __getattr__(name: str) -> Any: ...
