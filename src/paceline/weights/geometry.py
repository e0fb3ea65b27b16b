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

    def integer(self, key: str, default: int | None = None, low: int = 0) -> int:
        """An integer of at least ``low``."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise LoadError(f"{self.path}: {self.prefix}{key} must be an integer of at least {low}, found {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        return self.integer(key, default, low=1)

    def items(self, key: str, length: int | None = None) -> list[Any]:
        """A list, of ``length`` entries if that is given."""
        value = self.require(key)
        if not isinstance(value, list):
            raise LoadError(f"{self.path}: {self.prefix}{key} must be a list, found {value!r}")
        if length is not None and len(value) != length:
            raise LoadError(f"{self.path}: {self.prefix}{key} must have {length} entries, found {len(value)}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers that is not empty."""
        values = self.items(key)
        if not values or not all(isinstance(value, int) for value in values):
            raise LoadError(f"{self.path}: {self.prefix}{key} must be a list of integers, found {values!r}")
        return tuple(values)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number, or the default."""
        value = self.require(key) if default is None else self.get(key, default)
        if value == default:
            return float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise LoadError(f"{self.path}: {self.prefix}{key} must be a positive number, found {value!r}")
        return float(value)

    def refuse_unless(self, key: str, accepted: tuple[Any, ...]) -> None:
        """Refuse the file when ``key`` is present with a value that the models do not compute."""
        value = self.get(key)
        if value is not None and value not in accepted:
            limit = f"only {' or '.join(map(repr, accepted))} is supported" if accepted else "this is not supported"
            raise LoadError(f"{self.path}: {self.prefix}{key} is {value!r}; {limit}")


def check_target(path: Path, config: TargetConfig) -> TargetConfig:
    """Check a target's geometry against itself."""
    divide(path, "attention heads", config.num_heads, "key/value heads", config.num_kv_heads)
    divide(path, "value heads", config.gdn_value_heads, "key heads", config.gdn_key_heads)
    _check_rotary(path, config.rotary_dim, config.head_dim)
    return config


def check_drafter(path: Path, config: DrafterConfig, tensors: Mapping[str, QuantTensor]) -> DrafterConfig:
    """Check a drafter's geometry against itself and against its tensors (by parameter name)."""
    for pair in (("conv_kernel", "conv_group"), ("selector_rank", "selector_top_k")):
        first, second = (getattr(config, name) for name in pair)
        if (first > 0) != (second > 0):
            raise LoadError(f"{path}: {pair[0]} is {first} and {pair[1]} is {second}; both or neither must be set")
    has_selector = "candidate_selector.hidden_projection.weight" in tensors
    if has_selector != (config.selector_rank > 0):
        state = "has" if has_selector else "lacks"
        raise LoadError(f"{path}: selector_rank is {config.selector_rank}, but the file {state} the candidate selector")
    if config.conv_group:
        divide(path, "hidden size", config.hidden_size, "conv_group", config.conv_group)
    divide(path, "attention heads", config.num_heads, "key/value heads", config.num_kv_heads)
    _check_rotary(path, config.head_dim, config.head_dim)
    if config.block_size < 2:
        raise LoadError(f"{path}: block_size is {config.block_size}; a block has at least 2 rows")
    if "layers.0.self_attn.k_proj.weight" in tensors and "layers.0.self_attn.v_proj.weight" not in tensors:
        raise LoadError(f"{path}: the layers share keys and values (no attn_v), which is not supported")
    taps, columns = len(config.target_layer_ids), tensors["fc.weight"].shape[-1]
    if columns != taps * config.hidden_size:
        raise LoadError(
            f"{path}: fc.weight has {columns} columns, but {taps} target layers of {config.hidden_size} "
            f"make {taps * config.hidden_size}"
        )
    return config


def own_rows(tensors: Mapping[str, QuantTensor]) -> tuple[int, int]:
    """Rows of a drafter's own embedding and head. An embedding without a head serves as both."""
    embedding = rows_or_zero(tensors, "embed_tokens.weight")
    return embedding, rows_or_zero(tensors, "lm_head.weight") or embedding


def _check_rotary(path: Path, rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise LoadError(f"{path}: {rotary_dim} rotary dimensions do not fit heads of {head_dim}: even and at most that")


def divide(path: Path, what: str, total: int, by: str, parts: int) -> int:
    if total % parts:
        raise LoadError(f"{path}: {what} ({total}) must be a multiple of {by} ({parts})")
    return total // parts


def rows(path: Path, tensors: Mapping[str, QuantTensor], name: str) -> int:
    if name not in tensors:
        raise LoadError(f"{path}: no tensor for parameter {name}")
    return tensors[name].shape[0]


def rows_or_zero(tensors: Mapping[str, QuantTensor], name: str) -> int:
    return tensors[name].shape[0] if name in tensors else 0
