"""``paceline generate``: answers on the terminal, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    DEFAULTS,
    SAMPLING,
    CacheTypeK,
    CacheTypeV,
    Device,
    Draft,
    DraftBlockSize,
    DraftMax,
    DraftPolicy,
    DraftSwa,
    Dtype,
    Level,
    LogLevel,
    MaxCtx,
    ModelOption,
    Speculation,
    Threads,
)
from paceline.errors import InvalidRequest, LaneFailed
from paceline.logs import start_logging
from paceline.types import RequestStats, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM, Prompt


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="What to answer. Several prompts run at once.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-file", "-f", metavar="FILE", help="A file with one more prompt; - reads stdin.", show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="A prompt is a user's message for the chat template, or text to go on from.",
            show_default="chat where the model has a template",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", metavar="N", help="Tokens to generate at most.", show_default="to the context's end"
        ),
    ] = SAMPLING.max_tokens,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 always takes the likeliest token.")
    ] = SAMPLING.temperature,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0: all.")
    ] = SAMPLING.top_k,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens that together have probability P.")
    ] = SAMPLING.top_p,
    min_p: Annotated[
        float,
        typer.Option("--min-p", metavar="P", help="Keep tokens with at least P times the likeliest one's probability."),
    ] = SAMPLING.min_p,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed gives the same text.", show_default="drawn, and reported"),
    ] = SAMPLING.seed,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text; may be given several times.", show_default=False),
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
    max_ctx: MaxCtx = DEFAULTS.max_ctx,
    cache_type_k: CacheTypeK = DEFAULTS.cache_type_k,
    cache_type_v: CacheTypeV = DEFAULTS.cache_type_v,
    log_level: Level = LogLevel.WARNING,
) -> None:
    """Answer prompts on the terminal. The text goes to stdout as it comes, figures to stderr."""
    texts = list(prompts or ())
    if prompt_file is not None:
        texts.append(_read(prompt_file))
    if not texts:
        raise typer.BadParameter("no prompt: give PROMPT or --prompt-file")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    start_logging(log_level.number)
    from paceline.engine.llm import LLM

    with LLM(
        DEFAULTS.target if model is None else model,
        draft,
        speculation=speculation,
        draft_block_size=draft_block_size,
        draft_max=draft_max,
        draft_policy=draft_policy,
        draft_swa=draft_swa,
        device=device,
        dtype=dtype,
        threads=threads,
        max_concurrency=min(len(texts), DEFAULTS.max_concurrency),
        max_ctx=max_ctx,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    ) as llm:
        as_chat = llm.template is not None if chat is None else chat
        asked: list[Prompt] = [[{"role": "user", "content": text}] if as_chat else text for text in texts]
        if len(asked) == 1:
            _stream(llm, asked[0], sampling)
        else:
            _all(llm, texts, asked, sampling)


def _read(file: str) -> str:
    if file == "-" and sys.stdin is None:  # the shell's <&-
        raise InvalidRequest("--prompt-file -: stdin is closed", param="prompt_file")
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"--prompt-file {file}: {error.strerror}", param="prompt_file") from None
    except UnicodeDecodeError as error:
        message = f"--prompt-file {file}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
        raise InvalidRequest(message, param="prompt_file") from None


def _stream(llm: LLM, prompt: Prompt, sampling: SamplingParams) -> None:
    for delta in llm.stream(prompt, sampling):
        print(delta.text, end="", flush=True)
        if delta.finish_reason is not None:
            print()
            _report(delta.stats, delta.finish_reason, delta.error)


def _all(llm: LLM, texts: list[str], prompts: list[Prompt], sampling: SamplingParams) -> None:
    for index, result in enumerate(llm.generate(prompts, sampling)):
        print(f"[{index + 1}/{len(prompts)}] {_short(texts[index])}\n{result.text}", flush=True)
        _report(result.stats, result.finish_reason, result.error)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"


def _report(stats: RequestStats | None, reason: str, error: str | None) -> None:
    if stats is None or reason == "error":
        raise LaneFailed(error or "the request ended without a reason")
    speed = (stats.completion_tokens - 1) / stats.decode_seconds if stats.decode_seconds else 0.0
    accepted = f", acceptance length {sum(stats.keeps) / len(stats.keeps):.2f}" if stats.drafted else ""
    print(
        f"[{stats.prompt_tokens} + {stats.completion_tokens} tokens, {speed:.1f} tok/s{accepted}, "
        f"seed {stats.seed}, finish {reason}]",
        file=sys.stderr,
    )
