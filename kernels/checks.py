"""One way to refuse a bad argument: a ValueError that names it, what was found and what is wanted."""

from typing import Any


def require(holds: bool, argument: str, found: Any, wanted: str) -> None:
    """Raise ValueError "`argument`: found ..., wanted ..." unless `holds`."""
    if not holds:
        raise ValueError(f"{argument}: found {found}, wanted {wanted}")
