"""For pyright: the library's own types take it fifteen seconds to read."""

from typing import Any

def __getattr__(name: str) -> Any: ...
