"""JSON files that a checkpoint brought into the build folder."""

import json
from pathlib import Path
from typing import Any

from graphs.contract.spec import BuildError


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises BuildError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise BuildError(f"{path}: a JSON object expected, not readable as one: {e}") from e
    if not isinstance(found, dict):
        raise BuildError(f"{path}: a JSON object expected, found {type(found).__name__}")
    return found
