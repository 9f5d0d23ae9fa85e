"""JSON files of a checkpoint in the build folder."""

import json
from pathlib import Path
from typing import Any

from graphs.contract.spec import BuildError


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises BuildError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise BuildError(f"{path}: expected a JSON object, got no JSON: {e}") from e
    if not isinstance(content, dict):
        raise BuildError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
