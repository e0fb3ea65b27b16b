"""Pairs with the geometry of a published model and random weights, to measure speed with. They generate noise.

Nothing is quantised: a matrix is cut from a pool of random blocks of its type. Every code and every sub-block scale that a
block can hold is a number, so random bytes are a valid block as soon as its float16 factor ``d`` is set, and ``d`` sets the
standard deviation of the weights. What leaves a product then has about the size of what went in, as in a trained model.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from paceline.config import DEMO_TARGET
from paceline.errors import ConfigError
from paceline.ops.quant.fields import IQ4_VALUES
from paceline.weights.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of a pair; the names are those of ``TargetConfig`` and ``DrafterConfig``. ``taps`` are 0-based target layers.
    The sizes of a head, and what else all models of the family share, are below."""

    size_label: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    gdn_key_heads: int
    gdn_value_heads: int
    vocab_size: int
    context_length: int
    drafter_size_label: str
    drafter_intermediate_size: int
    drafter_heads: int
    drafter_kv_heads: int
    selector_rank: int
    taps: tuple[int, ...]

    @property
    def attention_layers(self) -> tuple[bool, ...]:
        return tuple((layer + 1) % _INTERVAL == 0 for layer in range(self.num_layers))


SHAPES = {
    "qwen3.8-27b": Shape(
        size_label="27B",
        hidden_size=5120,
        intermediate_size=17408,
        num_layers=64,
        num_heads=24,
        num_kv_heads=4,
        gdn_key_heads=16,
        gdn_value_heads=48,
        vocab_size=248_320,
        context_length=262_144,
        drafter_size_label="2B",
        drafter_intermediate_size=17408,
        drafter_heads=32,
        drafter_kv_heads=8,
        selector_rank=256,
        taps=(5, 19, 33, 47, 61),
    ),
    "tiny": Shape(
        size_label="10M",
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        gdn_key_heads=2,
        gdn_value_heads=6,
        vocab_size=16_640,
        context_length=4096,
        drafter_size_label="3M",
        drafter_intermediate_size=512,
        drafter_heads=4,
        drafter_kv_heads=2,
        selector_rank=64,
        taps=(0, 2),
    ),
}

_INTERVAL = 4
_HEAD_DIM, _ROTARY_DIM, _ROPE_SECTIONS = 256, 64, [11, 11, 10, 0]
_GDN_DIM = 128
_DRAFTER_HEAD_DIM = 128
_CONV_KERNEL = 4
_THETA, _EPS = 1e7, 1e-6
_BLOCK_SIZE, _WINDOW = 8, 2048
_DRAFTER_CONV, _DRAFTER_CONV_GROUP = 2, 16
_SELECTOR_TOP_K = 16

_FILE_TYPES = {"IQ4_XS": 30, "Q8_0": 7}
_METADATA_BYTES = 16_000_000
"""More than vocabulary, merges and tensor list take in a file."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to write: ``low`` to ``high`` are the bounds of a float32 one, ``deviation`` is that of a quantised one."""

    name: str
    shape: tuple[int, ...]
    type: Type
    low: float = 0.0
    high: float = 0.0
    deviation: float = 0.0

    @property
    def nbytes(self) -> int:
        elements, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True, slots=True)
class _Model:
    path: Path
    metadata: dict[str, Any]
    tensors: list[_Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) + _METADATA_BYTES


def write_pair(shape: str, out: Path, seed: int = 0, *, force: bool = False) -> tuple[Path, Path]:
    """Write target and drafter of ``SHAPES[shape]`` into the directory ``out``, which is made if it is missing.

    The same seed gives the same bytes. Returns the two files. ``ConfigError`` for an unknown shape, a file that is there
    already (unless ``force``) and a disk with too little room, with both numbers.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}", param="shape")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}", param="seed")
    models = (_target(shape, out), _drafter(shape, out))
    out.mkdir(parents=True, exist_ok=True)
    for model in models:
        _make_way(model.path, force)
    need, free = sum(model.nbytes for model in models), shutil.disk_usage(out).free
    if need > free:
        raise ConfigError(f"{out}: the pair needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", param="out")
    for model in models:
        _write(model, np.random.default_rng(seed))
    return models[0].path, models[1].path


def _make_way(path: Path, force: bool) -> None:
    """Remove what is at ``path`` if that is allowed. A file that a running engine has mapped must not be written into."""
    size = path.stat().st_size if path.exists() else 0
    if size and not force:
        raise ConfigError(f"{path} exists and has {size:,} bytes; --force replaces it", param="force")
    path.unlink(missing_ok=True)


def _write(model: _Model, rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(model.path, model.metadata["general.architecture"])
    for key, value in model.metadata.items():
        _add(writer, key, value)
    for tensor in model.tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    pools: dict[Type, _Pool] = {}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in model.tensors:
            writer.write_tensor_data(cast(Any, _Stream(tensor, rng, pools)))
        writer.close()
    except BaseException:
        writer.close()
        model.path.unlink(missing_ok=True)
        raise


_VALUE_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":
        return  # the writer has it already
    if isinstance(value, list):
        item = gguf.GGUFValueType.get_type(value[0])
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=item)
    else:
        writer.add_key_value(key, value, _VALUE_TYPES[type(value)])


# -- random weights --------------------------------------------------------------------------------------------------------

_POOL_BLOCKS = 299_993
"""A prime above the rows of the largest vocabulary: two rows of a matrix then never begin at the same block."""
_D_AT = {Type.IQ4_XS: 0, Type.Q6_K: 208, Type.Q8_0: 0}
"""Byte of a block at which its factor d is."""


def _rms(values: Any) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


_UNIT_DEVIATION = {
    Type.IQ4_XS: _rms(range(-32, 32)) * _rms(IQ4_VALUES),
    Type.Q6_K: _rms(range(-128, 128)) * _rms(range(-32, 32)),
    Type.Q8_0: _rms(range(-128, 128)),
}
"""Deviation of the values of a random block with d = 1."""
_FACTORS = np.linspace(0.8, 1.2, 256)
"""Blocks have different d around the one that makes the deviation."""


class _Pool:
    """Random blocks of one type."""

    def __init__(self, kind: Type, rng: np.random.Generator) -> None:
        self.kind, self.rng = kind, rng
        size = gguf.GGML_QUANT_SIZES[kind][1]
        self.blocks: NDArray[np.uint8] = rng.integers(0, 256, (_POOL_BLOCKS, size), dtype=np.uint8)
        self.factor: NDArray[np.uint8] = rng.integers(0, len(_FACTORS), _POOL_BLOCKS, dtype=np.uint8)

    def write(self, file: IO[bytes], count: int, deviation: float) -> None:
        """``count`` blocks from a random place on, round and round."""
        d = (deviation / _UNIT_DEVIATION[self.kind] * _FACTORS).astype(np.float16)
        at = _D_AT[self.kind]
        self.blocks[:, at : at + 2] = d[self.factor, None].view(np.uint8)
        start = int(self.rng.integers(_POOL_BLOCKS))
        while count:
            part = self.blocks[start : start + count]
            file.write(part.data)
            count, start = count - len(part), 0


@dataclass(frozen=True, slots=True)
class _Stream:
    """A tensor that is made while it is written; the writer asks for no more of an array than this."""

    tensor: _Tensor
    rng: np.random.Generator
    pools: dict[Type, _Pool]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def tofile(self, file: IO[bytes]) -> None:
        kind = self.tensor.type
        if kind == Type.F32:
            values = self.rng.uniform(self.tensor.low, self.tensor.high, self.tensor.shape)
            file.write(values.astype(np.float32).data)
            return
        if kind not in self.pools:
            self.pools[kind] = _Pool(kind, self.rng)
        self.pools[kind].write(file, self.nbytes // gguf.GGML_QUANT_SIZES[kind][1], self.tensor.deviation)


def _matrix(name: str, outputs: int, inputs: int, kind: Type, gain: float = 1.0) -> _Tensor:
    """Weights [outputs, inputs] that make values of deviation ``gain`` out of inputs of deviation one."""
    return _Tensor(f"{name}.weight", (outputs, inputs), kind, deviation=gain / math.sqrt(inputs))


def _floats(name: str, *shape: int, low: float = 0.9, high: float = 1.1) -> _Tensor:
    """A float32 tensor, by default the weights of a norm."""
    return _Tensor(name, shape, Type.F32, low, high)


# -- the target ------------------------------------------------------------------------------------------------------------


def _target(name: str, out: Path) -> _Model:
    shape, kind = SHAPES[name], Type.IQ4_XS
    tensors = [
        _floats("output_norm.weight", shape.hidden_size),
        _Tensor("token_embd.weight", (shape.vocab_size, shape.hidden_size), Type.Q6_K, deviation=1.0),
        _matrix("output", shape.vocab_size, shape.hidden_size, Type.Q6_K),
    ]
    for layer, attention in enumerate(shape.attention_layers):
        at = f"blk.{layer}."
        tensors += _attention(at, shape, kind) if attention else _gdn(at, shape, kind)
        tensors.append(_floats(f"{at}post_attention_norm.weight", shape.hidden_size))
        tensors += _ffn(at, shape.hidden_size, shape.intermediate_size, kind)
    return _Model(out / f"{name}-random-IQ4_XS.gguf", _target_metadata(name, shape), tensors)


def _attention(at: str, shape: Shape, kind: Type) -> Iterator[_Tensor]:
    heads, keys = shape.num_heads * _HEAD_DIM, shape.num_kv_heads * _HEAD_DIM
    yield _floats(f"{at}attn_norm.weight", shape.hidden_size)
    yield _matrix(f"{at}attn_q", 2 * heads, shape.hidden_size, kind)
    yield _matrix(f"{at}attn_k", keys, shape.hidden_size, kind)
    yield _matrix(f"{at}attn_v", keys, shape.hidden_size, kind)
    yield _matrix(f"{at}attn_output", shape.hidden_size, heads, kind)
    yield _floats(f"{at}attn_q_norm.weight", _HEAD_DIM)
    yield _floats(f"{at}attn_k_norm.weight", _HEAD_DIM)


def _gdn(at: str, shape: Shape, kind: Type) -> Iterator[_Tensor]:
    """Decays e^g of 0.6 to nearly 1, as trained ones: A from -8 to -0.5, softplus of about -4.5 for the step."""
    heads, inner = shape.gdn_value_heads, shape.gdn_value_heads * _GDN_DIM
    channels = 2 * shape.gdn_key_heads * _GDN_DIM + inner
    yield _floats(f"{at}attn_norm.weight", shape.hidden_size)
    yield _matrix(f"{at}attn_qkv", channels, shape.hidden_size, kind)
    yield _matrix(f"{at}attn_gate", inner, shape.hidden_size, kind)
    yield _floats(f"{at}ssm_a", heads, low=-8.0, high=-0.5)
    yield _matrix(f"{at}ssm_alpha", heads, shape.hidden_size, kind)
    yield _matrix(f"{at}ssm_beta", heads, shape.hidden_size, kind)
    yield _floats(f"{at}ssm_conv1d.weight", channels, _CONV_KERNEL, low=-0.8, high=0.8)
    yield _floats(f"{at}ssm_dt.bias", heads, low=-6.0, high=-3.0)
    yield _floats(f"{at}ssm_norm.weight", _GDN_DIM)
    yield _matrix(f"{at}ssm_out", shape.hidden_size, inner, kind)


def _ffn(at: str, hidden: int, intermediate: int, kind: Type) -> Iterator[_Tensor]:
    yield _matrix(f"{at}ffn_gate", intermediate, hidden, kind)
    yield _matrix(f"{at}ffn_up", intermediate, hidden, kind)
    yield _matrix(f"{at}ffn_down", hidden, intermediate, kind)


def _target_metadata(name: str, shape: Shape) -> dict[str, Any]:
    return {
        **_general("qwen35", f"{name} shape with random weights", shape.size_label, "IQ4_XS"),
        "qwen35.block_count": shape.num_layers,
        "qwen35.context_length": shape.context_length,
        "qwen35.embedding_length": shape.hidden_size,
        "qwen35.feed_forward_length": shape.intermediate_size,
        "qwen35.attention.head_count": shape.num_heads,
        "qwen35.attention.head_count_kv": shape.num_kv_heads,
        "qwen35.attention.key_length": _HEAD_DIM,
        "qwen35.attention.value_length": _HEAD_DIM,
        "qwen35.attention.layer_norm_rms_epsilon": _EPS,
        "qwen35.attention.recurrent_layers": [not attention for attention in shape.attention_layers],
        "qwen35.full_attention_interval": _INTERVAL,
        "qwen35.rope.dimension_count": _ROTARY_DIM,
        "qwen35.rope.dimension_sections": _ROPE_SECTIONS,
        "qwen35.rope.freq_base": _THETA,
        "qwen35.ssm.conv_kernel": _CONV_KERNEL,
        "qwen35.ssm.state_size": _GDN_DIM,
        "qwen35.ssm.group_count": shape.gdn_key_heads,
        "qwen35.ssm.time_step_rank": shape.gdn_value_heads,
        "qwen35.ssm.inner_size": shape.gdn_value_heads * _GDN_DIM,
        **_tokenizer(shape.vocab_size),
    }


# -- the drafter -----------------------------------------------------------------------------------------------------------


def _drafter(name: str, out: Path) -> _Model:
    shape, kind = SHAPES[name], Type.Q8_0
    hidden, vocab, rank = shape.hidden_size, shape.vocab_size, shape.selector_rank
    # Scores of the selector then vary as the logits do: a sum over ``rank`` products of two entries and a projection.
    codebook = rank**-0.25
    tensors = [
        _floats("enc.output_norm.weight", hidden),
        _matrix("fc", hidden, len(shape.taps) * hidden, kind),
        _floats("output_norm.weight", hidden),
        _matrix("selector_hidden", rank, hidden, kind),
        _Tensor("selector_predecessor.weight", (vocab, rank), kind, deviation=codebook),
        _Tensor("selector_successor.weight", (vocab, rank), kind, deviation=codebook),
    ]
    for layer in range(len(shape.taps)):
        tensors += _drafter_layer(f"blk.{layer}.", shape, kind)
    return _Model(out / f"{name}-random-DFlash2-Q8_0.gguf", _drafter_metadata(name, shape), tensors)


def _drafter_layer(at: str, shape: Shape, kind: Type) -> Iterator[_Tensor]:
    hidden = shape.hidden_size
    heads, keys = shape.drafter_heads * _DRAFTER_HEAD_DIM, shape.drafter_kv_heads * _DRAFTER_HEAD_DIM
    for sublayer in ("attn", "ffn"):
        yield _floats(f"{at}{sublayer}_norm.weight", hidden)
        yield _floats(f"{at}{sublayer}_conv_base", 2, _DRAFTER_CONV, hidden, low=0.3, high=0.7)
        kernels = 2 * _DRAFTER_CONV * (hidden // _DRAFTER_CONV_GROUP)
        yield _matrix(f"{at}{sublayer}_conv_proj", kernels, hidden, kind, gain=0.1)
    yield _matrix(f"{at}attn_q", heads, hidden, kind)
    yield _matrix(f"{at}attn_k", keys, hidden, kind)
    yield _matrix(f"{at}attn_v", keys, hidden, kind)
    yield _matrix(f"{at}attn_output", hidden, heads, kind)
    yield _floats(f"{at}attn_q_norm.weight", _DRAFTER_HEAD_DIM)
    yield _floats(f"{at}attn_k_norm.weight", _DRAFTER_HEAD_DIM)
    yield from _ffn(at, hidden, shape.drafter_intermediate_size, kind)


def _drafter_metadata(name: str, shape: Shape) -> dict[str, Any]:
    layers = len(shape.taps)
    return {
        **_general("dflash", f"{name} DFlash2 shape with random weights", shape.drafter_size_label, "Q8_0"),
        "dflash.block_count": layers,
        "dflash.context_length": shape.context_length,
        "dflash.embedding_length": shape.hidden_size,
        "dflash.feed_forward_length": shape.drafter_intermediate_size,
        "dflash.attention.head_count": shape.drafter_heads,
        "dflash.attention.head_count_kv": shape.drafter_kv_heads,
        "dflash.attention.causal": False,
        "dflash.attention.key_length": _DRAFTER_HEAD_DIM,
        "dflash.attention.value_length": _DRAFTER_HEAD_DIM,
        "dflash.attention.layer_norm_rms_epsilon": _EPS,
        "dflash.attention.sliding_window": _WINDOW,
        "dflash.attention.sliding_window_pattern": [True] * layers,
        "dflash.rope.freq_base": _THETA,
        "dflash.rope.dimension_sections": [_DRAFTER_HEAD_DIM // 2, 0, 0, 0],
        "dflash.block_size": _BLOCK_SIZE,
        "dflash.conv_kernel_size": _DRAFTER_CONV,
        "dflash.conv_group_size": _DRAFTER_CONV_GROUP,
        "dflash.selector_rank": shape.selector_rank,
        "dflash.selector_top_k": _SELECTOR_TOP_K,
        "dflash.target_layers": [tap + 1 for tap in shape.taps],
        **_tokenizer(shape.vocab_size),
    }


# -- what both files carry -------------------------------------------------------------------------------------------------


def _general(architecture: str, name: str, size_label: str, file_type: str) -> dict[str, Any]:
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.size_label": size_label,
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[file_type],
    }


def _tokenizer(vocab_size: int) -> Mapping[str, Any]:
    """The demo pair's tokenizer and chat template, with unused tokens behind its vocabulary."""
    demo = GgufFile(DEMO_TARGET).metadata
    keys = {key: demo[key] for key in demo if key.startswith("tokenizer.")}
    known = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] += [f"<|unused_{index}|>" for index in range(vocab_size - known)]
    keys["tokenizer.ggml.token_type"] += [int(gguf.TokenType.UNUSED)] * (vocab_size - known)
    return keys
