"""Configuration: model geometry as read from a checkpoint, engine options as given by the user, and the environment.

This is the only module that reads environment variables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError

LayerType = Literal["gdn", "attention"]
HeadLayout = Literal["grouped", "tiled"]
CacheType = Literal["f32", "f16", "bf16", "q8_0"]
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "f16", "bf16", "q8_0")
DraftPolicy = Literal["auto", "fixed"]
DRAFT_POLICIES: tuple[DraftPolicy, ...] = ("auto", "fixed")
DTYPES = ("auto", "float32", "bfloat16", "float16")

PAGE_SIZE = 16
"""Tokens per K/V page."""
CHUNK_SIZE = 64
"""Tokens per chunk of the gated delta rule, and the grid on which prompts may be cut."""
MAX_THREADS = 1024
"""OpenMP ends the process when the system does not give it as many threads as it was told to start."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters (formats: inverse frequencies are blended by a ramp, cos and sin scaled by ``attention_factor``)."""

    factor: float
    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Geometry of a Qwen3.5-family target. ``head_layout`` says how value heads map to key heads: ``grouped`` (Hugging
    Face, ``h // r``) or ``tiled`` (GGUF, ``h % Hk``)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_eps: float
    context_length: int
    conv_kernel: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    head_layout: HeadLayout
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def conv_channels(self) -> int:
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Geometry of a DFlash (``selector_rank == 0``) or DFlash2 drafter.

    ``target_layer_ids`` are 0-based target layers whose *outputs* are tapped. ``sliding`` and ``causal`` hold one flag per
    layer; ``sliding_window`` counts the query itself and is ``None`` when no layer slides. ``pattern_source`` says where
    ``sliding`` came from: the file's metadata, or inferred because the file has none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    context_length: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    sliding_window: int | None
    sliding: tuple[bool, ...]
    causal: tuple[bool, ...]
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_vocab: int = 0
    output_multiplier: float = 1.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    own_embedding_rows: int = 0
    own_head_rows: int = 0
    rope_scaling: RopeScaling | None = None
    pattern_source: Literal["metadata", "inferred"] = "metadata"

    @property
    def kind(self) -> str:
        return "DFlash2" if self.selector_rank else "DFlash"


_LOWEST = {
    "max_concurrency": 1,
    "max_ctx": 2,
    "draft_swa": 1,
    "draft_block_size": 2,
    "draft_max": 1,
    "kv_pool_tokens": 1,
    "prefill_tokens": CHUNK_SIZE,
    "threads": 1,
}
"""The options that are integers, and the least each may be."""
_MAY_BE_NONE = (
    "drafter",
    "max_ctx",
    "draft_swa",
    "draft_block_size",
    "draft_max",
    "kv_pool_tokens",
    "threads",
    "spec_synth_len",
    "itl_budget_ms",
    "model_name",
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may choose, with the defaults of ``LLM`` and of ``paceline serve``. Checked on construction."""

    target: str = "demo"
    drafter: str | None = "demo"
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 6
    max_ctx: int | None = None
    cache_type_k: CacheType = "q8_0"
    cache_type_v: CacheType = "q8_0"
    speculation: bool = True
    draft_swa: int | None = None
    draft_block_size: int | None = None
    draft_max: int | None = None
    draft_policy: DraftPolicy = "auto"
    kv_pool_tokens: int | None = None
    admission_coalesce_ms: float = 20.0
    prefill_tokens: int = 512
    itl_budget_ms: float | None = None
    threads: int | None = None
    cuda_graphs: bool = True
    run_ahead: bool = True
    prompts_beside: bool = True
    expand_weights: bool = True
    nvtx: bool = False
    spec_synth_len: float | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("target", "drafter"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: give a file or a directory", param=name)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", param="dtype")
        for name, choices in (
            ("cache_type_k", CACHE_TYPES),
            ("cache_type_v", CACHE_TYPES),
            ("draft_policy", DRAFT_POLICIES),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}", param=name)
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}", param=name)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"threads must be at most {MAX_THREADS}, got {self.threads}", param="threads")
        if not 0 <= self.admission_coalesce_ms <= 1000:
            raise ConfigError(
                f"admission_coalesce_ms must lie in [0, 1000], got {self.admission_coalesce_ms:g}",
                param="admission_coalesce_ms",
            )

        if self.itl_budget_ms is not None and not 0 < self.itl_budget_ms <= 60_000:
            raise ConfigError(f"itl_budget_ms must lie in (0, 60000], got {self.itl_budget_ms:g}", param="itl_budget_ms")

    def _check_types(self) -> None:
        for wanted, kinds, names in (
            ("text", (str,), ("target", "drafter", "device", "model_name")),
            ("an integer", (int,), tuple(_LOWEST)),
            ("a number", (int, float), ("admission_coalesce_ms", "spec_synth_len", "itl_budget_ms")),
            (
                "True or False",
                (bool,),
                ("speculation", "cuda_graphs", "run_ahead", "prompts_beside", "expand_weights", "nvtx"),
            ),
        ):
            for name in names:
                value = getattr(self, name)
                if value is None and name in _MAY_BE_NONE:
                    continue
                # Python counts True among the integers; as a number of lanes it is a mistake.
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise ConfigError(f"{name} must be {wanted}, got {value!r}", param=name)


DEMO_DIR = Path(__file__).parent / "demo"
DEMO_TARGET = DEMO_DIR / "paceline-demo-IQ4_XS.gguf"
DEMO_DRAFTER = DEMO_DIR / "paceline-demo-DFlash2-Q8_0.gguf"


def api_key_from_environment() -> str | None:
    """``PACELINE_API_KEY``: the key clients must send, when ``--api-key`` is not given."""
    return os.environ.get("PACELINE_API_KEY") or None


_SWITCHES = (
    "PACELINE_",
    "OMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "CUDA_",
    "NCCL_",
    "GGML_",
    "LLAMA_",
)
"""How names of environment variables begin that may change what a benchmark measures."""


def environment_switches() -> dict[str, str]:
    """The variables that may change what a benchmark measures, none of which is a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SWITCHES) and not any(word in name for word in ("KEY", "TOKEN", "SECRET"))
    }


def build_name() -> str:
    """The program and its version."""
    try:
        return f"paceline {version('paceline')}"
    except PackageNotFoundError:
        return "paceline (run from source, not installed)"
