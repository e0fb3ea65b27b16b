"""The Qwen3.5-family target: Gated-DeltaNet layers with a full-attention layer every few.

Shapes: N packed rows, S spans, H hidden, Hq / Hkv attention heads of D, Hk / Hv Gated-DeltaNet key / value heads of Dk / Dv,
C convolution channels. Residual stream, norms, states and logits are float32; ``dtype`` is the type of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.batch import PackedBatch
from paceline.config import TargetConfig
from paceline.models.layers import MLP, Embedding, Linear, RMSNorm, Siblings, finish, operand_type, parameter, products
from paceline.ops.attention import attention_inputs, gated_attention, value_bound
from paceline.ops.conv import conv_history
from paceline.ops.gdn import gdn_inputs, gdn_mixer, gdn_prefill, output_bound
from paceline.ops.kv import slots
from paceline.ops.linear import Rows
from paceline.ops.norm import gated_output
from paceline.ops.rope import RopeTable
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
        self.operand = operand_type(dtype)

    def finish(self, max_positions: int) -> None:
        """After loading: pack the products and make the rotary table for positions below ``max_positions``."""
        config, device = self.config, self.norm.weight.device
        if config.tie_embeddings:
            self.embed_tokens.share(self.lm_head)
        finish(self)
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                module.head_map = module.head_map.to(device)
                module.measure()
            if isinstance(module, Layer) and module.self_attn is not None:
                module.self_attn.measure(module.input_layernorm.weight)
        self.rope = RopeTable(max_positions, config.rotary_dim, config.rope_theta, config.rope_scaling, device)

    def expand(self, room: int) -> int:
        """Keep the weights that prompt rows multiply in 16 bits too, as many as fit into ``room`` bytes; the bytes taken."""
        taken = 0
        for product in products(self):
            if product is not self.lm_head:
                taken += product.expand(room - taken)
        return taken

    def forward(
        self, token_ids: Tensor, batch: PackedBatch, views: TargetViews, taps: Sequence[int] = ()
    ) -> tuple[Hidden, Tensor | None]:
        """token_ids [N] -> (what ``logits`` reads, features [N, len(taps) * H] or None).

        ``taps`` are 0-based layers whose outputs, before any norm, are the features, concatenated in the order given.
        State is read from ``views``; what this forward adds to it is left there for the pool to commit.
        """
        assert self.rope is not None, "finish() has not been called"
        angles = self.rope.at(batch.positions)
        hidden = Hidden(self.embed_tokens(token_ids))
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x, n = layer.input_layernorm.after(*hidden, self.operand)
            if index - 1 in taps:
                tapped[index - 1] = x
            hidden = layer(x, n, angles, batch, views.layers[index])
        if len(self.layers) - 1 in taps:
            tapped[len(self.layers) - 1] = hidden.whole()
        return hidden, torch.cat([tapped[index] for index in taps], dim=-1) if taps else None

    def logits(self, hidden: Hidden) -> Tensor:
        """R rows -> float32 [R, V]. Always the decode product, also for a prompt's last row."""
        return self.lm_head(self.norm.after(*hidden, self.operand)[1], "decode")


class Hidden(NamedTuple):
    """The residual stream of some rows [R, H]: ``x``, and what the last sublayer adds to it, which the next norm does."""

    x: Tensor
    delta: Tensor | None = None

    def whole(self) -> Tensor:
        return self.x if self.delta is None else self.x + self.delta

    def rows(self, index: Tensor) -> Hidden:
        return Hidden(self.x[index], None if self.delta is None else self.delta[index])


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

    def forward(
        self, x: Tensor, n: Tensor | Rows, angles: Angles, batch: PackedBatch, view: GdnView | AttentionView
    ) -> Hidden:
        """The residual stream [N, H] before the layer and its norm ``n`` -> the stream behind it."""
        if isinstance(view, GdnView):
            assert self.linear_attn is not None
            delta = self.linear_attn(n, batch, view)
        else:
            assert self.self_attn is not None
            delta = self.self_attn(n, angles, batch, view)
        x, n = self.post_attention_layernorm.after(x, delta, self.mlp.operand)
        return Hidden(x, self.mlp(n, batch.kind))


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
        self.qkv = Siblings(self.q_proj, self.k_proj, self.v_proj)
        self.bound: float | None = None
        self.operand = operand_type(dtype)

    def measure(self, norm: Tensor) -> None:
        """Once after the weights have been merged; ``norm`` is the weight of the norm before this."""
        self.bound = value_bound(self.qkv.weights, 2, norm)

    def forward(self, n: Tensor | Rows, angles: Angles, batch: PackedBatch, view: AttentionView) -> Tensor:
        q, k, v = self.qkv(n, batch.kind)
        # query and gate are interleaved per head
        q, gate = q.unflatten(-1, (self.heads, 2, self.head_dim)).unbind(2)
        k, v = (x.unflatten(-1, (self.kv_heads, self.head_dim)) for x in (k, v))
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = attention_inputs(q, k, v, *norms, angles, view.k, view.v, slots(view.page_table, batch))
        o = gated_attention(
            q,
            gate,
            view.k,
            view.v,
            view.page_table,
            batch,
            scale=self.head_dim**-0.5,
            causal=True,
            operand=self.operand,
            bound=self.bound,
        )
        return self.o_proj(o, batch.kind)


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
        self.in_proj = Siblings(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.bound: float | None = None
        self.operand = operand_type(dtype)

    def measure(self) -> None:
        """Once after the weights have been merged."""
        self.bound = output_bound(self.in_proj.weights, 1, self.norm.weight)

    def forward(self, n: Tensor | Rows, batch: PackedBatch, view: GdnView) -> Tensor:
        raw, z, b, a = self.in_proj(n, batch.kind)
        z = z.unflatten(-1, (self.value_heads, self.value_dim))
        if view.log is not None:
            mixed = gdn_mixer(
                raw,
                z,
                b,
                a,
                view.history,
                self.conv1d.weight,
                self.A,
                self.dt_bias,
                self.key_heads,
                view.state,
                self.head_map,
                self.norm.weight,
                self.norm.eps,
                batch,
                view.log,
                self.operand,
                n.norms if isinstance(n, Rows) else None,
                self.bound,
            )
            return self.out_proj(mixed, batch.kind)
        facts = (view.history, self.conv1d.weight, self.A, self.dt_bias, self.key_heads, self.key_dim, batch)
        of_states, of_histories = view.room or (None, None)
        inputs = gdn_inputs(raw, b, a, *facts)
        o, state = gdn_prefill(*inputs, view.state, self.head_map, batch, of_states)
        view.advance(state, conv_history(raw, view.history, batch.span_lengths, batch, of_histories))
        return self.out_proj(gated_output(o, z, self.norm.weight, self.norm.eps, self.operand), batch.kind)


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
