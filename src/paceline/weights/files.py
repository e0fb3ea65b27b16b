"""Small files beside the weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from paceline.errors import LoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
