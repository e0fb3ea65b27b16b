"""DFlash and DFlash2: a block-diffusion drafter conditioned on the target's hidden states.

Context: each committed position's tapped target features become one K/V row per layer (``project``). A block is the anchor
followed by B - 1 mask tokens at the next positions; one forward gives the hidden states from which the tokens at those
same positions are read (``propose``). The blocks of all lanes go through one forward; convolutions, masks and positions
stay inside a lane's block. L lanes, B block rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.batch import PackedBatch
from paceline.config import DrafterConfig
from paceline.models.layers import MLP, Delta, Embedding, Linear, RMSNorm, Siblings, finish, operand_type, parameter
from paceline.ops.activation import softcap
from paceline.ops.attention import attention, attention_inputs
from paceline.ops.conv import Convolved, dynamic_conv
from paceline.ops.kv import slots
from paceline.ops.linear import Rows
from paceline.ops.rope import RopeTable, norm_and_rope
from paceline.ops.selector import selector_walk
from paceline.ops.topk import top_k
from paceline.sampling import SamplingRows, pick_candidates
from paceline.types import RowKind
from paceline.views import AttentionView, ContextView

Angles = tuple[Tensor, Tensor]


class DFlash(nn.Module):
    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = Linear(len(config.target_layer_ids) * hidden, hidden, dtype)
        self.hidden_norm = RMSNorm(hidden, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.num_layers))
        # the context rows of all layers come out of one product, those of a block layer by layer
        attentions = [_attention(layer) for layer in self.layers]
        self.context_kv = Siblings(*(linear for each in attentions for linear in (each.k_proj, each.v_proj)), too=True)
        self.norm = RMSNorm(hidden, config.rms_eps)
        self.candidate_selector = Selector(config, dtype) if config.selector_rank else None
        self.embed_tokens = Embedding(config.own_embedding_rows, hidden) if config.own_embedding_rows else None
        self.lm_head = None
        if config.own_head_rows:
            self.lm_head = Linear(hidden, config.own_head_rows, dtype, dense_dtype=torch.float32)
        self.rope: RopeTable | None = None
        self.context_norms: Tensor | None = None
        self.operand = operand_type(dtype)

    def finish(self, max_positions: int) -> None:
        """After loading: pack the products and make the rotary table for positions below ``max_positions``."""
        finish(self)
        self.context_norms = torch.stack([_attention(layer).k_norm.weight for layer in self.layers])
        config, device = self.config, self.norm.weight.device
        self.rope = RopeTable(max_positions, config.head_dim, config.rope_theta, config.rope_scaling, device)

    def expand(self, room: int) -> int:
        """As ``Qwen35.expand``: what context rows are projected by."""
        taken = self.fc.expand(room)
        return taken + self.context_kv.expand(room - taken)

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        """Stage the context K/V rows of features [N, taps * H] for each layer; nothing is attended here."""
        assert self.rope is not None and self.context_norms is not None, "finish() has not been called"
        _, context = self.hidden_norm.after(self.fc(features, batch.kind), None, self.operand)
        heads = (self.config.num_kv_heads, self.config.head_dim)
        parts = [part.unflatten(-1, heads) for part in self.context_kv(context, batch.kind)]
        keys = norm_and_rope(parts[::2], self.context_norms, self.config.rms_eps, self.rope, batch.positions)
        for view, k, v in zip(views, keys, parts[1::2], strict=True):
            view.stage(k, v)

    def hidden(self, anchors: Tensor, embed: Embedding, batch: PackedBatch, views: list[AttentionView]) -> Tensor:
        """Final hidden states [L, B, H] of one block per lane; anchors [L], ``batch`` has L spans of B rows."""
        assert self.rope is not None, "finish() has not been called"
        lanes, rows = batch.num_spans, batch.lengths[0]
        tokens = torch.full((lanes, rows), self.config.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        angles = self.rope.at(batch.positions)
        x: Tensor = (self.embed_tokens or embed)(tokens.flatten())
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        delta = None
        for layer, view in zip(self.layers, views, strict=True):
            x, delta = layer(x, delta, angles, batch, view)
        normed = self.norm.after(x, delta, None)[1]
        assert isinstance(normed, Tensor)
        return normed.unflatten(0, (lanes, rows))

    def logits(self, hidden: Tensor, head: Linear) -> Tensor:
        """float32 logits [R, V] of hidden rows [R, H], scaled and capped as the checkpoint says."""
        logits: Tensor = (self.lm_head or head)(hidden, "decode")
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.logit_softcap
        return softcap(logits, cap) if cap > 0 else logits

    def propose(
        self,
        anchors: Tensor,
        embed: Embedding,
        head: Linear,
        batch: PackedBatch,
        views: list[AttentionView],
        rows: SamplingRows,
    ) -> Tensor:
        """Draft tokens [L, B - 1] for anchors [L]. ``embed`` and ``head`` are the target's, used where the drafter has none
        of its own; ``rows`` holds L * (B - 1) rows, lane-major, for the noise that drafter and target share."""
        hidden = self.hidden(anchors, embed, batch, views)[:, 1:]
        lanes, drafts, _ = hidden.shape
        logits = self.logits(hidden.flatten(0, 1), head)
        if self.candidate_selector is None:
            values, ids = top_k(logits, min(_PLAIN_TOP_K, logits.shape[1]))
            chosen = pick_candidates(values, ids, rows)
            return ids.gather(1, chosen.unsqueeze(1)).view(lanes, drafts)
        return self.candidate_selector(hidden, logits, anchors, rows)


_PLAIN_TOP_K = 16
"""Candidates that a drafter without a selector draws among when the request samples; greedy needs only the first."""


def _attention(layer: nn.Module) -> Attention:
    assert isinstance(layer, Layer)
    return layer.self_attn


class Selector(nn.Module):
    """Walks the slots of a block, choosing each token given the one before it."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = parameter(config.selector_vocab, config.selector_rank)
        self.successor_codebook = parameter(config.selector_vocab, config.selector_rank)
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, dtype)

    def forward(self, hidden: Tensor, logits: Tensor, anchors: Tensor, rows: SamplingRows) -> Tensor:
        """hidden [L, B - 1, H], logits [L * (B - 1), V], anchors [L] -> tokens [L, B - 1]."""
        lanes, drafts, _ = hidden.shape
        values, ids = (t.view(lanes, drafts, -1) for t in top_k(logits, self.top_k))
        query = self.hidden_projection(hidden.flatten(0, 1), "decode").view(lanes, drafts, -1)
        return selector_walk(
            values,
            ids,
            query,
            anchors,
            self.predecessor_codebook,
            self.successor_codebook,
            rows.temperature,
            rows.seed,
            rows.choice,
            rows.position,
        )


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype)
        self.attention_conv = DynamicConv(config, dtype) if config.conv_kernel else None
        self.mlp_conv = DynamicConv(config, dtype) if config.conv_kernel else None
        self.operand = operand_type(dtype)

    def forward(
        self, x: Tensor, delta: Delta | None, angles: Angles, batch: PackedBatch, view: AttentionView
    ) -> tuple[Tensor, Delta]:
        """The residual stream [N, H] and what the last sublayer adds to it -> both behind this layer."""
        x, delta = self._add(
            self.input_layernorm, self.attention_conv, x, delta, batch, lambda n: self.self_attn(n, angles, batch, view)
        )
        return self._add(self.post_attention_layernorm, self.mlp_conv, x, delta, batch, lambda n: self.mlp(n, batch.kind))

    def _add(
        self,
        norm: RMSNorm,
        conv: DynamicConv | None,
        x: Tensor,
        delta: Delta | None,
        batch: PackedBatch,
        inner: Callable[[Tensor | Rows], Tensor],
    ) -> tuple[Tensor, Delta]:
        """(x + delta, conv_out(inner(conv_in(n)))) for n = norm(x + delta); both kernels come from n, before the first
        convolution."""
        if conv is None:
            x, n = norm.after(x, delta, self.operand)
            return x, inner(n)
        x, plain, n = norm.after_twice(x, delta, self.operand)
        blocks = (batch.num_spans, batch.lengths[0])
        kernels = conv.kernels(n, batch.kind).unflatten(0, blocks)
        mixed = dynamic_conv(plain.unflatten(0, blocks), conv.base_kernel[0], kernels[:, :, 0], self.operand)
        out = inner(mixed if isinstance(mixed, Rows) else mixed.flatten(0, 1))
        return x, Convolved(out, conv.base_kernel[1], kernels[:, :, 1])


class DynamicConv(nn.Module):
    """Kernels of the two convolutions around a sublayer: base [2, K, H] and a projection that adds to it per token and
    group of channels (row of the projection = (side * K + tap) * G + group)."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.taps, self.groups = config.conv_kernel, config.hidden_size // config.conv_group
        self.base_kernel = parameter(2, self.taps, config.hidden_size)
        self.kernel_projection = Linear(config.hidden_size, 2 * self.taps * self.groups, dtype)

    def kernels(self, n: Tensor | Rows, kind: RowKind) -> Tensor:
        """[N, H] -> [N, 2, K, G]."""
        return self.kernel_projection(n, kind).unflatten(-1, (2, self.taps, self.groups))


class Attention(nn.Module):
    """Grouped-query attention over the lane's context rows and its own block, full rotary embedding."""

    def __init__(self, config: DrafterConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.causal = config.causal[index]
        self.window = config.sliding_window if config.sliding[index] else None
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim, dtype)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, dtype)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, dtype)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_eps)
        self.qkv = Siblings(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, n: Tensor | Rows, angles: Angles, batch: PackedBatch, view: AttentionView) -> Tensor:
        # Block rows are written behind the committed context, where only their own block sees them and where the next
        # committed rows overwrite them.
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(n, batch.kind))
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = attention_inputs(q, k, v, *norms, angles, view.k, view.v, slots(view.page_table, batch))
        o = attention(
            q,
            view.k,
            view.v,
            view.page_table,
            batch,
            scale=self.head_dim**-0.5,
            causal=self.causal,
            window=self.window,
        )
        return self.o_proj(o.flatten(1), batch.kind)
