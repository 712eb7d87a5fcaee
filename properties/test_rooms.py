"""Which room may import which: kernels and oracles know nothing of each other, and nobody knows the verbs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FORBIDDEN = {
    "kernels": {"oracles", "properties", "ci"},
    "oracles": {"jax", "jaxlib", "kernels", "properties", "ci"},
    "properties": {"ci"},
}


def imported(path: Path) -> Iterator[str]:
    """Top-level names of every import in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_keep_to_themselves(room: str) -> None:
    """No file of the room imports what the room may not know."""
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {path.name: sorted(FORBIDDEN[room] & set(imported(path))) for path in files}
    assert not {name: names for name, names in found.items() if names}
