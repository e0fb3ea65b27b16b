"""``paceline serve``: the OpenAI-compatible server, with the engine in a process of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from paceline.cli.options import (
    DEFAULTS,
    CacheTypeK,
    CacheTypeV,
    CudaGraphs,
    Device,
    Draft,
    DraftBlockSize,
    DraftMax,
    DraftPolicy,
    DraftSwa,
    Dtype,
    ExpandWeights,
    Level,
    LogLevel,
    MaxCtx,
    ModelOption,
    Nvtx,
    PromptsBeside,
    RunAhead,
    SpecSynthLen,
    Speculation,
    Threads,
)
from paceline.config import EngineOptions, api_key_from_environment
from paceline.errors import ConfigError
from paceline.logs import start_logging
from paceline.server.options import ServerOptions, api_keys

if TYPE_CHECKING:
    from paceline.server.service import Backend

SERVER = ServerOptions()

logger = logging.getLogger("paceline.server")


def serve(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=DEFAULTS.target)
    ] = None,
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    speculation: Speculation = DEFAULTS.speculation,
    draft_block_size: DraftBlockSize = DEFAULTS.draft_block_size,
    draft_max: DraftMax = DEFAULTS.draft_max,
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
    itl_budget_ms: Annotated[
        float | None,
        typer.Option(
            "--itl-budget-ms",
            metavar="MS",
            help="A bound on the time between tokens: a round reads no more of prompts than fits into it.",
            show_default="none",
        ),
    ] = DEFAULTS.itl_budget_ms,
    admission_coalesce_ms: Annotated[
        float,
        typer.Option(
            "--admission-coalesce-ms",
            metavar="MS",
            help="How long an idle engine waits after a first request for others that can share its rounds.",
        ),
    ] = DEFAULTS.admission_coalesce_ms,
    cuda_graphs: CudaGraphs = DEFAULTS.cuda_graphs,
    run_ahead: RunAhead = DEFAULTS.run_ahead,
    prompts_beside: PromptsBeside = DEFAULTS.prompts_beside,
    expand_weights: ExpandWeights = DEFAULTS.expand_weights,
    nvtx: Nvtx = DEFAULTS.nvtx,
    spec_synth_len: SpecSynthLen = DEFAULTS.spec_synth_len,
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", metavar="NAME", help="The name in replies.", show_default="the file's"),
    ] = DEFAULTS.model_name,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str],
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="A key that clients may send as a bearer token; may be given several times. Other users of the machine can "
            "read a command line: --api-key-file and the environment are better places.",
            show_default="the environment variable PACELINE_API_KEY, or none",
        ),
    ] = [],  # noqa: B006
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="A file with more keys, one a line.")
    ] = None,
    cors_origin: Annotated[
        list[str],
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Pages of this origin may use the server from a browser; may be given several times, * means any.",
            show_default="none",
        ),
    ] = [],  # noqa: B006
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", metavar="MIB", help="The largest body of a request that is read.")
    ] = SERVER.max_body_bytes // 2**20,
    stream_buffer_tokens: Annotated[
        int,
        typer.Option(
            "--stream-buffer-tokens",
            metavar="TOKENS",
            help="How many tokens of a stream may wait for a client that reads slowly; beyond, its request ends.",
        ),
    ] = SERVER.stream_buffer_tokens,
    client_timeout: Annotated[
        float,
        typer.Option(
            "--client-timeout",
            metavar="SECONDS",
            help="How long a client may neither read what waits for it nor send more of a body it has begun.",
        ),
    ] = SERVER.client_timeout,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", metavar="N", help="How many answers may wait for a lane; more are refused with 429."),
    ] = SERVER.max_queue,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            "--request-timeout",
            metavar="SECONDS",
            help="The time that a request has which gives no timeout itself.",
            show_default="none",
        ),
    ] = SERVER.request_timeout,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout", metavar="SECONDS", help="How long running requests may go on after SIGTERM or SIGINT."
        ),
    ] = SERVER.drain_timeout,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Add a JSON line per round to this file: lanes, widths, keeps, times."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="Log lines as text or as JSON objects.")
    ] = "text",
    log_level: Level = LogLevel.INFO,
) -> int:
    """Serve a model to many clients at once, over OpenAI's HTTP API.

    Without arguments: the built-in demo pair on http://127.0.0.1:8000/v1.
    """
    if target is not None and model is not None:
        raise typer.BadParameter(f"the model is given twice, as {target!r} and with --model as {model!r}")
    chosen = model if target is None else target
    options = EngineOptions(
        target=DEFAULTS.target if chosen is None else chosen,
        drafter=draft,
        speculation=speculation,
        draft_block_size=draft_block_size,
        draft_max=draft_max,
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
        itl_budget_ms=itl_budget_ms,
        admission_coalesce_ms=admission_coalesce_ms,
        cuda_graphs=cuda_graphs,
        run_ahead=run_ahead,
        prompts_beside=prompts_beside,
        expand_weights=expand_weights,
        nvtx=nvtx,
        spec_synth_len=spec_synth_len,
        model_name=model_name,
    )
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must lie in [0, 65535], got {port}", param="port")
    if max_body_mib < 1:
        raise ConfigError(f"max_body_mib must be at least 1, got {max_body_mib}", param="max_body_mib")
    from_environment = api_key_from_environment()
    server_options = ServerOptions(
        api_keys=api_keys(api_key, api_key_file) or ((from_environment,) if from_environment else ()),
        cors_origins=tuple(cors_origin),
        max_body_bytes=max_body_mib * 2**20,
        stream_buffer_tokens=stream_buffer_tokens,
        client_timeout=client_timeout,
        max_queue=max_queue,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
    )
    start_logging(log_level.number, log_format)
    from paceline.server import run

    def load() -> Backend:
        return _load(options, log_level=log_level.number, log_format=log_format, trace=trace)

    return run.serve(load, host=host, port=port, options=server_options, say=logger.info)


def _load(options: EngineOptions, **logging_options: Any) -> Backend:
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
    return Backend(EngineProcess(options, **logging_options), tokenizer, template)
