"""Our models against ``transformers`` (target) and ``dflash`` (drafter) on random tiny checkpoints.

The reference values come from ``tests/reference/generate.py``; nothing of it is needed here. Each checkpoint is loaded from
every layout that the loaders read. Between our own paths equality is to the bit and tested elsewhere; a tolerance appears
here only because the other side is foreign float32 code with another order of additions.

Where the tolerances come from: against the same mathematics in float64 the reference values are off by up to 1.7e-5 in
the target's hidden states and 6.5e-5 in its logits of up to 56, by up to 5.2e-6 in a drafter's hidden states and 9.7e-6 in
its logits. Ours may be off by as much in the other direction; the bounds are four to six times the reference's own error.
Of the mistakes that were tried on purpose, the mildest (a sliding window one key too wide) changes hidden states by 0.5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_checkpoints import (
    write_directory,
    write_drafter_gguf,
    write_target_gguf,
    write_wrapped_directory,
)
from safetensors.torch import load_file
from torch import Tensor

from paceline.batch import pack
from paceline.config import PAGE_SIZE, TargetConfig
from paceline.models.dflash import DFlash
from paceline.models.layers import Embedding, Linear
from paceline.models.qwen35 import Qwen35
from paceline.ops.gdn import ReplayLog
from paceline.ops.kv import allocate_pages, write_rows
from paceline.sampling import SamplingRows
from paceline.types import RowKind
from paceline.views import AttentionView, ContextView, GdnView, TargetViews
from paceline.weights.load import fill, open_drafter, open_target

DATA = Path(__file__).parent.parent / "data" / "reference"
REFERENCE: dict[str, Any] = json.loads((DATA / "reference.json").read_text())
CONTEXTS: list[int] = REFERENCE["contexts"]
CPU = torch.device("cpu")

TARGET_HIDDEN, TARGET_LOGITS = 1e-4, 3e-4
DRAFTER_HIDDEN, DRAFTER_LOGITS = 3e-5, 5e-5

TARGET_WRITERS = {
    "directory": write_directory,
    "wrapped": write_wrapped_directory,
    "gguf": lambda path, config, tensors: write_target_gguf(path.with_suffix(".gguf"), config, tensors),
}
DRAFTER_WRITERS = {
    "directory": write_directory,
    "gguf": lambda path, config, tensors: write_drafter_gguf(path.with_suffix(".gguf"), config, tensors),
}


def tensors_of(name: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{name}.safetensors")


def load_target(path: Path) -> Qwen35:
    checkpoint = open_target(path)
    model = Qwen35(checkpoint.config, torch.float32)
    fill(model, checkpoint)
    model.finish(256)
    return model


def load_drafter(path: Path) -> DFlash:
    checkpoint = open_drafter(path)
    model = DFlash(checkpoint.config, torch.float32)
    fill(model, checkpoint)
    model.finish(256)
    return model


def pages_for(length: int, heads: int, dim: int) -> tuple[AttentionView, Tensor]:
    """A view of one sequence of ``length`` positions and the slot of each position. Pages are handed out backwards, so that
    a page number is never by accident the index of what it holds, and what is not written yet is NaN."""
    count = -(-length // PAGE_SIZE)
    table = torch.arange(count - 1, -1, -1)
    slots = (table[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    k, v = (allocate_pages("f32", count, heads, dim, CPU) for _ in range(2))
    k.data.fill_(torch.nan)
    v.data.fill_(torch.nan)
    return AttentionView(k, v, table[None]), slots


def empty_views(config: TargetConfig, length: int) -> TargetViews:
    state = (1, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
    history = (1, config.conv_kernel - 1, config.conv_channels)
    return TargetViews(
        [
            GdnView(torch.zeros(state), torch.zeros(history), log_of(config, length))
            if kind == "gdn"
            else pages_for(length, config.num_kv_heads, config.head_dim)[0]
            for kind in config.layer_types
        ]
    )


def log_of(config: TargetConfig, rows: int) -> ReplayLog:
    heads, dk, dv = config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim
    shapes = (config.conv_channels,), (config.gdn_key_heads, dk), (heads, dv), (heads,)
    return ReplayLog(*(torch.zeros(rows, *shape) for shape in shapes))


def run_target(model: Qwen35, tokens: Tensor, spans: list[tuple[RowKind, int]]) -> tuple[Tensor, Tensor]:
    """One sequence cut into spans: the residual stream after each layer [layers, T, H] and the logits [T, V].

    A decode span must be the last one: what commits its replay log is not a model's business.
    """
    length = sum(rows for _, rows in spans)
    views, outputs, start = empty_views(model.config, length), [], 0
    layers = range(model.config.num_layers)
    for kind, rows in spans:
        batch = pack(kind, [rows], [start], CPU)
        for view in views.layers:
            if kind == "prefill" and isinstance(view, GdnView):
                view.log = None
        last, features = model(tokens[start : start + rows], batch, views, layers)
        assert features is not None
        hidden = features.unflatten(-1, (len(layers), -1)).transpose(0, 1)
        assert torch.equal(hidden[-1], last.whole())
        outputs.append((hidden, model.logits(last)))
        for index, view in enumerate(views.layers):
            if kind == "prefill" and isinstance(view, GdnView):
                assert view.new_state is not None and view.new_history is not None
                views.layers[index] = GdnView(view.new_state, view.new_history, log_of(model.config, length))
        start += rows
    return torch.cat([hidden for hidden, _ in outputs], dim=1), torch.cat([logits for _, logits in outputs])


def target_ends(inputs: dict[str, Tensor]) -> tuple[Embedding, Linear]:
    """The embedding and the output head that a drafter borrows from its target."""
    vocab, hidden = inputs["embedding"].shape
    embed, head = Embedding(vocab, hidden), Linear(hidden, vocab, torch.float32)
    embed.weight = torch.nn.Parameter(inputs["embedding"].float(), requires_grad=False)
    head.weight = torch.nn.Parameter(inputs["lm_head"].float(), requires_grad=False)
    head.pack()
    return embed, head


def greedy_rows(count: int) -> SamplingRows:
    zeros = [0] * count
    return SamplingRows.from_lists([0.0] * count, zeros, [1.0] * count, [0.0] * count, zeros, zeros, range(count))


def run_drafter(model: DFlash, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One lane whose context grows round by round: hidden [steps, B, H], logits [steps, B, V], drafts [steps, B - 1]."""
    config = model.config
    embed, head = target_ends(inputs)
    pages = [
        pages_for(CONTEXTS[-1] + config.block_size, config.num_kv_heads, config.head_dim) for _ in range(config.num_layers)
    ]
    results, start = [], 0
    for end, anchor in zip(CONTEXTS, inputs["anchors"].long(), strict=True):
        append_context(model, inputs["features"][start:end], start, pages)
        batch = pack("decode", [config.block_size], [end], CPU)
        views = [view for view, _ in pages]
        hidden = model.hidden(anchor[None], embed, batch, views)[0]
        drafts = model.propose(anchor[None], embed, head, batch, views, greedy_rows(config.block_size - 1))[0]
        results.append((hidden, model.logits(hidden, head), drafts))
        start = end
    hidden, logits, drafts = (torch.stack(column) for column in zip(*results, strict=True))
    return hidden, logits, drafts


def append_context(model: DFlash, features: Tensor, start: int, pages: list[tuple[AttentionView, Tensor]]) -> None:
    """Project the features of newly committed positions and store their K/V rows in every layer's pages."""
    kind: RowKind = "prefill" if start == 0 else "decode"
    contexts = [ContextView() for _ in pages]
    model.project(features, pack(kind, [len(features)], [start], CPU), contexts)
    for context, (view, slots) in zip(contexts, pages, strict=True):
        assert context.k is not None and context.v is not None
        write_rows(view.k, slots[start : start + len(features)], context.k)
        write_rows(view.v, slots[start : start + len(features)], context.v)


def assert_close(ours: Tensor, reference: Tensor, bound: float, what: str) -> None:
    assert ours.shape == reference.shape
    error = float((ours - reference).abs().max())
    assert error <= bound, f"{what}: largest error {error:.2e}, allowed {bound:.0e}"


SPANS: dict[str, list[tuple[RowKind, int]]] = {
    "prompt of 70": [("prefill", 70)],
    "prompt of 140": [("prefill", 140)],
    "prompt of 140 in two": [("prefill", 64), ("prefill", 76)],
    "prompt of 70, then 70 generated": [("prefill", 70), ("decode", 70)],
}


@pytest.mark.parametrize("layout", TARGET_WRITERS)
@pytest.mark.parametrize("name", REFERENCE["targets"])
def test_target_equals_transformers(name: str, layout: str, tmp_path: Path) -> None:
    config = REFERENCE["targets"][name]["config"]
    path = TARGET_WRITERS[layout](tmp_path / "target", config, tensors_of(f"{name}.weights"))
    expected = tensors_of(f"{name}.outputs")
    model = load_target(path)
    for what, spans in SPANS.items():
        rows = sum(length for _, length in spans)
        hidden, logits = run_target(model, expected["tokens"][:rows].long(), spans)
        for layer, (ours, reference) in enumerate(zip(hidden, expected["hidden"], strict=True)):
            assert_close(ours, reference[:rows], TARGET_HIDDEN, f"{what}, layer {layer}")
        assert_close(logits, expected["logits"][:rows], TARGET_LOGITS, f"{what}, logits")


@pytest.mark.parametrize("layout", DRAFTER_WRITERS)
@pytest.mark.parametrize("name", REFERENCE["drafters"])
def test_drafter_equals_dflash(name: str, layout: str, tmp_path: Path) -> None:
    reference = REFERENCE["drafters"][name]
    tensors = tensors_of(f"{reference['weights']}.weights")
    if "conv_kernel_size" not in reference["config"]["dflash_config"]:
        tensors = {key: value for key, value in tensors.items() if "_conv." not in key and "selector" not in key}
    path = DRAFTER_WRITERS[layout](tmp_path / "drafter", reference["config"], tensors)
    hidden, logits, drafts = run_drafter(load_drafter(path), tensors_of("drafter_inputs"))
    expected = tensors_of("drafter_outputs")
    assert_close(hidden, expected[f"{name}.hidden"], DRAFTER_HIDDEN, "hidden")
    assert_close(logits, expected[f"{name}.logits"], DRAFTER_LOGITS, "logits")
    # every draft of the reference leads its rivals by at least 2e-3, so here equality is exact
    assert drafts.tolist() == expected[f"{name}.drafts"].tolist()
