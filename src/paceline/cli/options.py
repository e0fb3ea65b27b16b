"""Options that several commands share. Their defaults are those of ``EngineOptions`` and ``SamplingParams``."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Annotated

import typer

from paceline.config import CACHE_TYPES, DRAFT_POLICIES, DTYPES, EngineOptions
from paceline.types import SamplingParams

DEFAULTS = EngineOptions()
SAMPLING = SamplingParams()

_CACHES = "|".join(CACHE_TYPES)
_DRAFTING_ONLY = "Neither used nor checked with --no-speculation."


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        return int(getattr(logging, self.name))


# -- the pair ----------------------------------------------------------------------------------------------------------

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="The target: a GGUF file, a Hugging Face directory, or 'demo' for the built-in model.",
        show_default=DEFAULTS.target,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="FILE",
        help="The drafter: a DFlash or DFlash2 GGUF file or Hugging Face directory. "
        "'demo' is the drafter of the built-in model, and no drafter with any other. " + _DRAFTING_ONLY,
    ),
]
Speculation = Annotated[
    bool,
    typer.Option(
        "--speculation/--no-speculation",
        help="Draft tokens and verify them, or decode one by one. Without speculation the drafter is not loaded.",
    ),
]
DraftBlockSize = Annotated[
    int | None,
    typer.Option(
        "--draft-block-size",
        metavar="N",
        help="Rows of the drafter's block, one more than tokens drafted per round; at most what it was trained with. "
        + _DRAFTING_ONLY,
        show_default="as trained",
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        metavar="N",
        help="The most drafts of a lane that a round verifies, of those in the block. Tokens do not depend on it. "
        + _DRAFTING_ONLY,
        show_default="all",
    ),
]
DraftPolicy = Annotated[
    str,
    typer.Option(
        "--draft-policy",
        metavar="|".join(DRAFT_POLICIES),
        help="auto verifies as many drafts as pay, down to none, from measured costs and acceptance; fixed always all. "
        "Tokens do not depend on it.",
    ),
]
DraftSwa = Annotated[
    int | None,
    typer.Option(
        "--draft-swa",
        metavar="N",
        help="Window, in tokens, of the drafter's sliding layers. Which layers slide stays as the file says. "
        + _DRAFTING_ONLY,
        show_default="from the file",
    ),
]

# -- the machine -------------------------------------------------------------------------------------------------------

Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where the models run; auto takes a GPU if there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Type of the products' inputs; sums are float32. auto: bfloat16 where the processor multiplies it natively, "
        "else float32.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", help="Threads of the CPU's products; tokens do not depend on it.", show_default="torch's"
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Capture the forwards of generated tokens and of short prompts at start-up and run each in one launch (GPU "
        "only). Tokens do not depend on it.",
    ),
]
RunAhead = Annotated[
    bool,
    typer.Option(
        "--run-ahead/--no-run-ahead",
        help="Launch the forwards of the next round before this one's results are read (GPU only, with graphs). Tokens do "
        "not depend on it.",
    ),
]
PromptsBeside = Annotated[
    bool,
    typer.Option(
        "--prompts-beside/--no-prompts-beside",
        help="Read prompts on a stream of their own, beside the lanes that decode (GPU only, with graphs). Tokens do not "
        "depend on it.",
    ),
]
ExpandWeights = Annotated[
    bool,
    typer.Option(
        "--expand-weights/--no-expand-weights",
        help="Keep quantised weights in 16 bits too, in memory that is left over, to read prompts faster (GPU only).",
    ),
]
Nvtx = Annotated[bool, typer.Option("--nvtx", help="Mark the stages of rounds for NVIDIA's profilers (GPU only).")]
SpecSynthLen = Annotated[
    float | None,
    typer.Option(
        "--spec-synth-len",
        metavar="TOKENS",
        help="For benchmarks only: acceptance is made up, with this mean length, and the text means nothing.",
    ),
]
MaxCtx = Annotated[
    int | None,
    typer.Option(
        "--max-ctx",
        metavar="TOKENS",
        help="Longest sequence, prompt and answer together.",
        show_default="the model's, or what fits for all lanes",
    ),
]
CacheTypeK = Annotated[
    str, typer.Option("--cache-type-k", metavar=_CACHES, help="Type in which the target's keys are stored.")
]
CacheTypeV = Annotated[
    str, typer.Option("--cache-type-v", metavar=_CACHES, help="Type in which the target's values are stored.")
]
Level = Annotated[LogLevel, typer.Option("--log-level", help="What is logged on stderr, one event a line.")]
