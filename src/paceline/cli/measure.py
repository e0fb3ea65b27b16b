"""The commands of ``paceline bench`` that measure. What they print and write is described in docs/benchmarks.md."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from paceline.cli.options import DEFAULTS, Device, Draft, ModelOption, Speculation
from paceline.config import EngineOptions
from paceline.errors import ConfigError

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the record is written, as JSON.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")]


ServersFile = Annotated[
    Path | None,
    typer.Option("--servers", metavar="FILE", help="A file that describes more servers, as TOML."),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="NAME=FLAGS",
        help="A configuration of paceline to measure: a name, and the flags it adds to 'paceline serve'. Give several.",
        show_default="off=--no-speculation and on=",
    ),
]
ServeFlags = Annotated[
    str, typer.Option("--serve-flags", metavar="FLAGS", help="Flags that every configuration of paceline has.")
]
Concurrency = Annotated[
    str | None, typer.Option("--concurrency", metavar="C,C,...", help="Numbers of requests at a time to measure.")
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", metavar="N", help="Requests of each cell.", show_default="60 of the manifest; 3 C + 3 fixed"),
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", help="Times that the whole is measured, each in another order.")
]
WarmUp = Annotated[
    int | None,
    typer.Option("--warm-up", metavar="N", help="Requests before each measurement, at its C.", show_default="C"),
]
OutDirectory = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Where the documents are written. A run that is there already is continued."),
]


def serve(
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="NAME", help="A server to measure. Give several.", show_default="paceline"),
    ] = None,
    servers: ServersFile = None,
    config: Config = None,
    serve_flags: ServeFlags = "",
    concurrency: Concurrency = "1,2,3,4,5,6",
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            metavar="manifest|fixed",
            help="The chats of the manifest to their natural end, or prompts and answers of fixed lengths.",
        ),
    ] = "manifest",
    requests: Requests = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="The most tokens of an answer to the manifest.")
    ] = 64,
    prompt_tokens: PromptTokens = 107,
    output_tokens: Annotated[int, typer.Option("--output-tokens", metavar="N", help="Tokens of each fixed answer.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the order of the manifest's requests.")] = 0,
    repeats: Repeats = 1,
    lanes: Annotated[
        int, typer.Option("--lanes", metavar="N", help="Lanes of every server.", show_default="the largest C")
    ] = 0,
    warm_up: WarmUp = None,
    fresh: Annotated[
        str,
        typer.Option(
            "--fresh",
            metavar="cell|configuration",
            help="A server is started for each cell, or for each configuration.",
        ),
    ] = "cell",
    quiet: Annotated[
        float | None,
        typer.Option(
            "--quiet",
            metavar="CORES",
            help="A cell does not count if others kept more cores busy in it; the same command measures it again.",
            show_default="any number",
        ),
    ] = None,
    peer: Annotated[
        Path | None,
        typer.Option("--peer", metavar="FILE", help="Figures of another engine to show beside these, as JSON."),
    ] = None,
    out: OutDirectory = Path("benchmarks/serve"),
) -> int:
    """Servers measured over HTTP, by configuration and number of requests at a time.

    A run that was interrupted goes on where it stopped. The exit status is 1 if a cell failed, or if tokens of Paceline
    differ from cell to cell.
    """
    bench = _bench()
    if workload not in ("manifest", "fixed"):
        raise ConfigError(f"workload must be manifest or fixed, got {workload!r}", param="workload")
    asked: Any = (
        bench.Fixed(prompt_tokens, output_tokens, temperature, requests)
        if workload == "fixed"
        else bench.Manifest(60 if requests is None else requests, max_tokens, temperature, seed)
    )
    known = bench.read_servers(servers)
    configurations = tuple(map(bench.Configuration.parse, config or ()))
    chosen = []
    for name in server or ("paceline",):
        if name not in known:
            raise ConfigError(f"there is no server {name!r}; there are {', '.join(known)}", param="server")
        ours = name == "paceline"
        flags = bench.flags_of(serve_flags, "serve_flags") if ours else []
        chosen.append(bench.with_flags(known[name], flags, configurations if ours else ()))
    if fresh not in ("cell", "configuration"):
        raise ConfigError(f"fresh must be cell or configuration, got {fresh!r}", param="fresh")
    plan = bench.Plan(
        target=model or DEFAULTS.target,
        drafter=draft,
        servers=tuple(chosen),
        workloads=(asked,),
        concurrency=_integers("concurrency", concurrency or ""),
        repeats=repeats,
        lanes=lanes,
        warm_up=warm_up,
        fresh=fresh,
        quiet=quiet,
    )
    return _watched(bench, plan, out, peer)


def screen(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="drafts, blocks, acceptance, contexts, burst or mixed."),
    ],
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    serve_flags: ServeFlags = "",
    concurrency: Concurrency = None,
    requests: Requests = None,
    longest: Annotated[
        int | None,
        typer.Option("--longest", metavar="TOKENS", help="Leave out longer prompts.", show_default="none"),
    ] = None,
    repeats: Repeats = 1,
    warm_up: WarmUp = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="As for serve.", show_default="benchmarks/screen-NAME")
    ] = None,
) -> int:
    """A ready-made run that varies one thing: drafts, blocks, acceptance, contexts, or how requests arrive."""
    bench = _bench()
    chosen = bench.screen(name)
    flags = bench.flags_of(serve_flags, "serve_flags")
    ours = bench.with_flags(bench.read_servers()["paceline"], flags, chosen.configurations)
    lengths = [max(getattr(asked, "prompt_tokens", 0), asked.long_tokens) for asked in chosen.workloads]
    if longest is not None and longest < min(lengths):
        raise ConfigError(f"longest must be at least {min(lengths)} for this screen, got {longest}", param="longest")
    workloads = [
        asked for asked, length in zip(chosen.workloads, lengths, strict=True) if longest is None or length <= longest
    ]
    if requests is not None:
        workloads = [replace(asked, requests=requests) for asked in workloads]
    plan = bench.Plan(
        target=model or DEFAULTS.target,
        drafter=draft,
        servers=(ours,),
        workloads=tuple(workloads),
        concurrency=_integers("concurrency", concurrency) if concurrency else chosen.concurrency,
        repeats=repeats,
        lanes=chosen.lanes,
        warm_up=warm_up,
        fresh="configuration",
    )
    return _watched(bench, plan, out or Path(f"benchmarks/screen-{name}"), None)


def report(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="DIR...", help="Directories of runs.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Print the ratios of two runs, B / A, row by row, and no report."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where the page goes.", show_default="report.html in the first DIR"),
    ] = None,
) -> int:
    """One page of HTML about runs, and their table as Markdown on stdout.

    The exit status is 1 if a cell failed or is missing, or if tokens of Paceline differ.
    """
    try:
        from paceline.bench.matrix import read_matrix, verdict
        from paceline.bench.report import compare as ratios
        from paceline.bench.report import markdown, page
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    if compare is not None:
        print(ratios(*compare))
        return 0
    if not directories:
        raise typer.BadParameter("a directory of a run is needed, or --compare with two")
    path = out or directories[0] / "report.html"
    path.write_text(page(directories), encoding="utf-8")
    wrong = []
    for directory in directories:
        matrix = read_matrix(directory)
        wrong += verdict(matrix)
        print(markdown(matrix), end="\n\n")
    print("\n".join([*wrong, f"written to {path}"]))
    return 1 if wrong else 0


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"benchmarks need {error.name}, which is not installed: {sys.executable} -m pip install {error.name}")


def _bench() -> SimpleNamespace:
    """The parts of the benchmark, which need libraries that serving does not."""
    try:
        from paceline.bench import matrix, screens, serve, servers, workloads
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return SimpleNamespace(
        Plan=matrix.Plan,
        screen=screens.screen,
        with_flags=screens.with_flags,
        run=serve.run,
        Configuration=servers.Configuration,
        read_servers=servers.read_servers,
        flags_of=servers.flags_of,
        Fixed=workloads.Fixed,
        Manifest=workloads.Manifest,
    )


def _watched(bench: SimpleNamespace, plan: Any, out: Path, peer: Path | None) -> int:
    from paceline.cli.progress import RunProgress

    beside = _peer(peer) if peer else None
    before = signal.signal(signal.SIGTERM, _interrupt)  # the servers must end with it
    try:
        with RunProgress() as progress:
            return bench.run(plan, out, progress, beside)
    finally:
        signal.signal(signal.SIGTERM, before)


def _peer(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not readable as JSON: {error}"
        raise ConfigError(f"{path}: {reason}", param="peer") from None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} must be integers with commas between them, got {text!r}", param=name) from None


def ops(
    shape: Annotated[
        str, typer.Option("--shape", metavar="SHAPE", help="Whose sizes: 'qwen3.8-27b', or 'demo' for the built-in pair.")
    ] = "qwen3.8-27b",
    only: Annotated[
        str, typer.Option("--only", metavar="NAME", help="Cases with this in their name, or the group of this name.")
    ] = "",
    device: Device = DEFAULTS.device,
    portable: Annotated[
        bool, typer.Option("--portable", help="Without the kernels that are for one generation of GPUs.")
    ] = False,
    out: Out = Path("benchmarks/ops.json"),
) -> int:
    """Every op beside the ceiling of the device, after it has been compared with its reference.

    The exit status is 1 if an op failed or differs from its reference.
    """
    from paceline.bench.ops import run

    return run(shape, device, only, out, portable)


def round(
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    speculation: Speculation = DEFAULTS.speculation,
    lanes: Annotated[int, typer.Option("--lanes", metavar="N", help="Requests that decode together.")] = 6,
    count: Annotated[int, typer.Option("--rounds", metavar="N", help="Rounds that are timed; 8 more are profiled.")] = 20,
    prompt_tokens: PromptTokens = 107,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="FIELD=VALUE", help="Any other keyword of LLM, such as max_ctx=4096. Give several."
        ),
    ] = None,
    out: Out = Path("benchmarks/rounds.json"),
) -> int:
    """Where the time of a decode round goes on a GPU, by family of kernels and beside what must be read."""
    from paceline.bench.rounds import options_of, run

    chosen: dict[str, Any] = {
        "target": model or DEFAULTS.target,
        "drafter": draft,
        "speculation": speculation,
        "max_concurrency": lanes,
    }
    more = options_of(option or ())
    try:
        options = EngineOptions(**{**chosen, **more})
    except ConfigError as error:
        if error.param in more:
            raise ConfigError(f"--option {error.message}", param="option") from None
        raise
    return run(options, count, prompt_tokens, out)
