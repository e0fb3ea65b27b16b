"""Sizes of the state, in bytes, pages and rows. Pure arithmetic, used by the pool and by capacity planning."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import PAGE_SIZE, CacheType, DrafterConfig, TargetConfig
from paceline.ops.attention import KEY_BLOCK
from paceline.ops.kv import bytes_per_token


@dataclass(frozen=True, slots=True)
class StateShape:
    """What the pool allocates.

    ``lanes`` live requests; ``max_ctx`` tokens per sequence; ``pool_tokens`` tokens of K/V over all lanes;
    ``draft_rows`` the drafter's block (0 without a drafter).
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    lanes: int
    max_ctx: int
    pool_tokens: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    draft_cache_type: CacheType

    @property
    def draft_rows(self) -> int:
        return self.drafter.block_size if self.drafter else 0

    @property
    def features(self) -> int:
        """Numbers that the drafter is told about a token (0 without a drafter)."""
        return len(self.drafter.target_layer_ids) * self.target.hidden_size if self.drafter else 0

    @property
    def feature_rows(self) -> int:
        """Rows of a lane whose features are kept: as many as may wait for the drafter, and those of a verify span."""
        return 2 * self.draft_rows

    @property
    def pages(self) -> int:
        return -(-self.pool_tokens // PAGE_SIZE)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pool can hold, with nobody else in it."""
        return self.pages * PAGE_SIZE - self._rows_behind

    @property
    def ring_pages(self) -> int:
        """Pages of a lane's ring for sliding drafter layers: the window and one block, in whole key blocks, so that a
        key block never wraps and block rows never overwrite a row that is still visible."""
        if self.drafter is None or self.drafter.sliding_window is None:
            return 0
        rows = min(self.drafter.sliding_window, self.max_ctx) + self.draft_rows
        return -(-rows // KEY_BLOCK) * KEY_BLOCK // PAGE_SIZE

    def reserve(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens may come to own."""
        return pages_for(tokens + self._rows_behind)

    @property
    def _rows_behind(self) -> int:
        """Full-attention drafter layers share the target's page table and write one block behind the last token."""
        return self.draft_rows if self.drafter and not all(self.drafter.sliding) else 0


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def kv_bytes_per_token(shape: StateShape) -> int:
    """Bytes of paged K/V per token: the target's attention layers and the drafter's full layers."""
    target, drafter = shape.target, shape.drafter
    layers = target.layer_types.count("attention")
    total = layers * (
        bytes_per_token(shape.cache_type_k, target.num_kv_heads, target.head_dim)
        + bytes_per_token(shape.cache_type_v, target.num_kv_heads, target.head_dim)
    )
    if drafter:
        full = drafter.sliding.count(False)
        total += 2 * full * bytes_per_token(shape.draft_cache_type, drafter.num_kv_heads, drafter.head_dim)
    return total


def lane_bytes(shape: StateShape) -> int:
    """Bytes per lane whatever its context: Gated-DeltaNet state, convolution history, replay log, features that wait, the
    drafter's rings."""
    drafter = shape.drafter
    total = _state_bytes(shape) + max(1, shape.draft_rows) * _log_bytes(shape) + _feature_bytes(shape)
    if drafter:
        per_token = bytes_per_token(shape.draft_cache_type, drafter.num_kv_heads, drafter.head_dim)
        total += 2 * drafter.sliding.count(True) * shape.ring_pages * PAGE_SIZE * per_token
    return total


def spare_bytes(shape: StateShape) -> int:
    """Bytes of the lane that the padding of a batch is of."""
    return _state_bytes(shape) + _log_bytes(shape) + _feature_bytes(shape)


def _feature_bytes(shape: StateShape) -> int:
    return 4 * shape.feature_rows * shape.features


def _state_bytes(shape: StateShape) -> int:
    target = shape.target
    state = target.gdn_value_heads * target.gdn_key_dim * target.gdn_value_dim
    history = (target.conv_kernel - 1) * target.conv_channels
    return 4 * target.layer_types.count("gdn") * (state + history)


def _log_bytes(shape: StateShape) -> int:
    """Of one row: raw inputs of the convolution, k, d, g."""
    target = shape.target
    keys, values = target.gdn_key_heads * target.gdn_key_dim, target.gdn_value_heads * (target.gdn_value_dim + 1)
    return 4 * target.layer_types.count("gdn") * (target.conv_channels + keys + values)
