"""What reading a model's geometry from GGUF metadata and from ``config.json`` has in common.

Whatever a file asks for that the models do not compute is refused by name; a file that loads is computed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import DrafterConfig, TargetConfig
from paceline.errors import LoadError
from paceline.ops.quant import QuantTensor


def infer_sliding(num_layers: int) -> tuple[bool, ...]:
    """Which drafter layers slide when a file has a window and no pattern: all but the last, as in the published
    drafters that mix both kinds."""
    return tuple(i < num_layers - 1 for i in range(num_layers))


class Keys:
    """Metadata below a prefix, with errors that name file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise LoadError(f"{self.path}: {self.prefix}{key} is missing")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.path}: {self.prefix}{key} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise LoadError(f"{self.path}: {self.prefix}{key} must be a positive number, found {value!r}")
        return float(value)

    def refuse_unless(self, key: str, accepted: tuple[Any, ...]) -> None:
        """Refuse the file when ``key`` is present with a value that the models do not compute."""
        value = self.get(key)
        if value is not None and value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise LoadError(f"{self.path}: {self.prefix}{key} is {value!r}; only {wanted} is supported")


def check_target(path: Path, config: TargetConfig) -> TargetConfig:
    divide(path, "attention heads", config.num_heads, "key/value heads", config.num_kv_heads)
    divide(path, "value heads", config.gdn_value_heads, "key heads", config.gdn_key_heads)
    _check_rotary(path, config.rotary_dim, config.head_dim)
    return config


def check_drafter(path: Path, config: DrafterConfig, has_selector: bool, fc_columns: int) -> DrafterConfig:
    for pair in (("conv_kernel", "conv_group"), ("selector_rank", "selector_top_k")):
        first, second = (getattr(config, name) for name in pair)
        if (first > 0) != (second > 0):
            raise LoadError(f"{path}: {pair[0]} is {first} and {pair[1]} is {second}; both or neither must be set")
    if has_selector != (config.selector_rank > 0):
        state = "has" if has_selector else "lacks"
        raise LoadError(f"{path}: selector_rank is {config.selector_rank}, but the file {state} the candidate selector")
    if config.conv_group:
        divide(path, "hidden size", config.hidden_size, "conv_group_size", config.conv_group)
    divide(path, "attention heads", config.num_heads, "key/value heads", config.num_kv_heads)
    _check_rotary(path, config.head_dim, config.head_dim)
    if config.block_size < 2:
        raise LoadError(f"{path}: block_size is {config.block_size}; a block has at least 2 rows")
    expected = len(config.target_layer_ids) * config.hidden_size
    if fc_columns and fc_columns != expected:
        raise LoadError(
            f"{path}: fc.weight has {fc_columns} columns, but {len(config.target_layer_ids)} target layers "
            f"of {config.hidden_size} make {expected}"
        )
    return config


def own_rows(tensors: Mapping[str, QuantTensor], embedding: str, head: str) -> tuple[int, int]:
    """Rows of a drafter's own embedding and head. An embedding without a head serves as both."""
    own_embedding = rows_or_zero(tensors, embedding)
    return own_embedding, rows_or_zero(tensors, head) or own_embedding


def _check_rotary(path: Path, rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise LoadError(f"{path}: {rotary_dim} rotary dimensions do not fit heads of {head_dim}: even and at most that")


def divide(path: Path, what: str, total: int, by: str, parts: int) -> int:
    if total % parts:
        raise LoadError(f"{path}: {what} ({total}) must be a multiple of {by} ({parts})")
    return total // parts


def rows(path: Path, tensors: Mapping[str, QuantTensor], name: str) -> int:
    if name not in tensors:
        raise LoadError(f"{path}: tensor {name} is missing")
    return tensors[name].shape[0]


def rows_or_zero(tensors: Mapping[str, QuantTensor], name: str) -> int:
    return tensors[name].shape[0] if name in tensors else 0
