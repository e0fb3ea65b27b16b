"""``paceline serve``: the OpenAI-compatible server, with the engine in a process of its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli.options import (
    DEFAULTS,
    CacheTypeK,
    CacheTypeV,
    CudaGraphs,
    Device,
    Draft,
    DraftBlockSize,
    DraftPolicy,
    DraftSwa,
    Dtype,
    ExpandWeights,
    Level,
    LogLevel,
    MaxCtx,
    ModelOption,
    Nvtx,
    SpecSynthLen,
    Speculation,
    Threads,
    start_logging,
)
from paceline.config import EngineOptions, api_key_from_environment
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.server.service import Backend

logger = logging.getLogger("paceline.server")


def serve(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=DEFAULTS.target)
    ] = None,
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    speculation: Speculation = DEFAULTS.speculation,
    draft_block_size: DraftBlockSize = DEFAULTS.draft_block_size,
    draft_policy: DraftPolicy = DEFAULTS.draft_policy,
    draft_swa: DraftSwa = DEFAULTS.draft_swa,
    device: Device = DEFAULTS.device,
    dtype: Dtype = DEFAULTS.dtype,
    threads: Threads = DEFAULTS.threads,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", metavar="N", help="Lanes: requests that run at a time; others wait.")
    ] = DEFAULTS.max_concurrency,
    max_ctx: MaxCtx = DEFAULTS.max_ctx,
    cache_type_k: CacheTypeK = DEFAULTS.cache_type_k,
    cache_type_v: CacheTypeV = DEFAULTS.cache_type_v,
    kv_pool_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-pool-tokens",
            metavar="TOKENS",
            help="Tokens of K/V that all lanes share.",
            show_default="max-concurrency times max-ctx",
        ),
    ] = DEFAULTS.kv_pool_tokens,
    prefill_tokens: Annotated[
        int,
        typer.Option(
            "--prefill-tokens",
            metavar="TOKENS",
            help="Prompt tokens read per round while lanes decode; four times as many while none does. "
            "Smaller keeps the lanes' latency lower, larger reads prompts faster.",
        ),
    ] = DEFAULTS.prefill_tokens,
    admission_coalesce_ms: Annotated[
        float,
        typer.Option(
            "--admission-coalesce-ms",
            metavar="MS",
            help="How long an idle engine waits after a first request for others that can share its rounds.",
        ),
    ] = DEFAULTS.admission_coalesce_ms,
    cuda_graphs: CudaGraphs = DEFAULTS.cuda_graphs,
    expand_weights: ExpandWeights = DEFAULTS.expand_weights,
    nvtx: Nvtx = DEFAULTS.nvtx,
    spec_synth_len: SpecSynthLen = DEFAULTS.spec_synth_len,
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", metavar="NAME", help="The name in replies.", show_default="the file's"),
    ] = DEFAULTS.model_name,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Key that clients must send as a bearer token.",
            show_default="the environment variable PACELINE_API_KEY, or none",
        ),
    ] = None,
    log_level: Level = LogLevel.INFO,
) -> int:
    """Serve a model to many clients at once, over OpenAI's HTTP API.

    Without arguments: the built-in demo pair on http://127.0.0.1:8000/v1.
    """
    if target is not None and model is not None:
        raise typer.BadParameter(f"the model is given twice, as {target!r} and with --model as {model!r}")
    if api_key == "":
        raise ConfigError("--api-key is empty; leave it out to serve without a key", param="api_key")
    chosen = model if target is None else target
    options = EngineOptions(
        target=DEFAULTS.target if chosen is None else chosen,
        drafter=draft,
        speculation=speculation,
        draft_block_size=draft_block_size,
        draft_policy=cast(Any, draft_policy),  # EngineOptions checks it
        draft_swa=draft_swa,
        device=device,
        dtype=dtype,
        threads=threads,
        max_concurrency=max_concurrency,
        max_ctx=max_ctx,
        cache_type_k=cast(Any, cache_type_k),  # EngineOptions checks it
        cache_type_v=cast(Any, cache_type_v),
        kv_pool_tokens=kv_pool_tokens,
        prefill_tokens=prefill_tokens,
        admission_coalesce_ms=admission_coalesce_ms,
        cuda_graphs=cuda_graphs,
        expand_weights=expand_weights,
        nvtx=nvtx,
        spec_synth_len=spec_synth_len,
        model_name=model_name,
    )
    start_logging(log_level)
    from paceline.server import run

    key = api_key or api_key_from_environment()
    return run.serve(lambda: _load(options, log_level), host=host, port=port, api_key=key, say=logger.info)


def _load(options: EngineOptions, log_level: LogLevel) -> Backend:
    """Open and check the files here, which takes a second, before an engine is started that would find the same faults."""
    from paceline.engine.build import resolve_paths
    from paceline.engine.process import EngineProcess
    from paceline.server.service import Backend
    from paceline.weights.load import check_pair, open_drafter, open_target

    target_path, drafter_path = resolve_paths(options)
    target = open_target(target_path)
    tokenizer, template = target.tokenizer(), target.chat_template()
    if drafter_path is not None:
        check_pair(target, open_drafter(drafter_path))
    return Backend(EngineProcess(options, log_level=log_level.number), tokenizer, template)
