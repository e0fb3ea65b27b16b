"""The Qwen3.5-family target: Gated-DeltaNet layers with a full-attention layer every few.

Shapes: N packed rows, S spans, H hidden, Hq / Hkv attention heads of D, Hk / Hv Gated-DeltaNet key / value heads of Dk / Dv,
C convolution channels. Residual stream, norms, states and logits are float32; ``dtype`` is the type of the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.batch import PackedBatch
from paceline.config import TargetConfig
from paceline.models.layers import MLP, Embedding, Linear, RMSNorm, parameter
from paceline.ops.activation import sigmoid, softplus
from paceline.ops.attention import attention
from paceline.ops.conv import causal_conv
from paceline.ops.gdn import gdn_prefill, gdn_verify
from paceline.ops.kv import write_rows
from paceline.ops.norm import gated_rms_norm, l2_norm
from paceline.ops.rope import RopeTable, apply_rope
from paceline.views import AttentionView, GdnView, TargetViews

Angles = tuple[Tensor, Tensor]


class Qwen35(nn.Module):
    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, dense_dtype=torch.float32)
        if config.tie_embeddings:
            del self.lm_head.weight
        self.rope: RopeTable | None = None

    def finish(self, max_positions: int) -> None:
        """After loading: pack the products and make the rotary table for positions below ``max_positions``."""
        config, device = self.config, self.norm.weight.device
        if config.tie_embeddings:
            self.embed_tokens.share(self.lm_head)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
            elif isinstance(module, GatedDeltaNet):
                module.head_map = module.head_map.to(device)
        self.rope = RopeTable(max_positions, config.rotary_dim, config.rope_theta, config.rope_scaling, device)

    def forward(
        self, token_ids: Tensor, batch: PackedBatch, views: TargetViews, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """token_ids [N] -> (residual stream after the last layer [N, H], features [N, len(taps) * H] or None).

        ``taps`` are 0-based layers whose outputs, before any norm, are the features, concatenated in the order given.
        State is read from ``views``; what this forward adds to it is left there for the pool to commit.
        """
        assert self.rope is not None, "finish() has not been called"
        angles = self.rope.at(batch.positions)
        x = self.embed_tokens(token_ids)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, batch, views.layers[index])
            if index in taps:
                tapped[index] = x
        return x, torch.cat([tapped[index] for index in taps], dim=-1) if taps else None

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] residual rows -> float32 [R, V]. Always the decode product, also for a prompt's last row."""
        return self.lm_head(self.norm(x), "decode")


class Layer(nn.Module):
    def __init__(self, config: TargetConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        if config.layer_types[index] == "gdn":
            self.linear_attn: GatedDeltaNet | None = GatedDeltaNet(config, dtype)
            self.self_attn: GatedAttention | None = None
        else:
            self.linear_attn, self.self_attn = None, GatedAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, x: Tensor, angles: Angles, batch: PackedBatch, view: GdnView | AttentionView) -> Tensor:
        n = self.input_layernorm(x)
        if isinstance(view, GdnView):
            assert self.linear_attn is not None
            x = x + self.linear_attn(n, batch, view)
        else:
            assert self.self_attn is not None
            x = x + self.self_attn(n, angles, batch, view)
        return x + self.mlp(self.post_attention_layernorm(x), batch.kind)


class GatedAttention(nn.Module):
    """Full attention with partial rotary embedding; each head's output is multiplied by the sigmoid of its gate."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = Linear(config.hidden_size, 2 * self.heads * self.head_dim, dtype)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, dtype)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, dtype)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_eps)

    def forward(self, n: Tensor, angles: Angles, batch: PackedBatch, view: AttentionView) -> Tensor:
        # query and gate are interleaved per head
        q, gate = self.q_proj(n, batch.kind).unflatten(-1, (self.heads, 2, self.head_dim)).unbind(2)
        k = self.k_proj(n, batch.kind).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(n, batch.kind).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = apply_rope(self.q_norm(q), angles), apply_rope(self.k_norm(k), angles)
        write_rows(view.k, view.slots, k)
        write_rows(view.v, view.slots, v)
        o = attention(q, view.k, view.v, view.page_table, batch, scale=self.head_dim**-0.5, causal=True)
        return self.o_proj((o * sigmoid(gate)).flatten(1), batch.kind)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.gdn_key_heads, config.gdn_value_heads
        self.key_dim, self.value_dim = config.gdn_key_dim, config.gdn_value_dim
        self.head_map = key_head_of(config)
        hidden, inner = config.hidden_size, self.value_heads * self.value_dim
        self.in_proj_qkv = Linear(hidden, config.conv_channels, dtype)
        self.in_proj_z = Linear(hidden, inner, dtype)
        self.in_proj_b = Linear(hidden, self.value_heads, dtype)
        self.in_proj_a = Linear(hidden, self.value_heads, dtype)
        self.conv1d = Conv1d(config.conv_channels, config.conv_kernel)
        self.A = parameter(self.value_heads)
        self.dt_bias = parameter(self.value_heads)
        self.norm = RMSNorm(self.value_dim, config.rms_eps)
        self.out_proj = Linear(inner, hidden, dtype)

    def forward(self, n: Tensor, batch: PackedBatch, view: GdnView) -> Tensor:
        raw = self.in_proj_qkv(n, batch.kind)
        mixed = causal_conv(raw, view.history, self.conv1d.weight, batch)
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.value_heads * self.value_dim), dim=-1)
        q = l2_norm(q.unflatten(-1, (self.key_heads, self.key_dim))) * self.key_dim**-0.5
        k = l2_norm(k.unflatten(-1, (self.key_heads, self.key_dim)))
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        beta = sigmoid(self.in_proj_b(n, batch.kind))
        g = self.A * softplus(self.in_proj_a(n, batch.kind) + self.dt_bias)
        if batch.kind == "decode":
            o, d = gdn_verify(q, k, v, beta, g, view.state, self.head_map, batch)
            view.log(raw, k, d, g)
        else:
            o, state = gdn_prefill(q, k, v, beta, g, view.state, self.head_map, batch)
            view.advance(raw, state)
        z = self.in_proj_z(n, batch.kind).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(gated_rms_norm(o, z, self.norm.weight, self.norm.eps).flatten(1), batch.kind)


class Conv1d(nn.Module):
    """The depthwise kernel [C, w]; the last tap belongs to the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(channels, width)


def key_head_of(config: TargetConfig) -> Tensor:
    """[Hv]: the key head that each value head reads, by the checkpoint's layout."""
    heads = torch.arange(config.gdn_value_heads)
    if config.head_layout == "tiled":
        return heads % config.gdn_key_heads
    return heads // (config.gdn_value_heads // config.gdn_key_heads)
