"""``paceline bench``: measurements, and what they need. Each command calls into ``paceline.bench``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import measure
from paceline.cli.command import Command

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure speed, and make what measuring needs.")


@bench.command(cls=Command)
def synth_model(
    shape: Annotated[
        str, typer.Option("--shape", metavar="SHAPE", help="Whose geometry: 'qwen3.8-27b', or 'tiny' to try things out.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write the two files into.")],
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same files.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a GGUF pair of a published model's shape with random weights.

    Such a pair runs at the speed of the real one and generates noise.
    """
    from paceline.bench.synth_model import write_pair

    started = time.perf_counter()
    target, drafter = write_pair(shape, out, seed, force=force)
    for path in (target, drafter):
        print(f"{path}  {path.stat().st_size / 1e9:.2f} GB")
    print(f"Written in {time.perf_counter() - started:.1f} s. To serve it:")
    print(f"paceline serve {target} --draft {drafter}")


for command in (measure.serve, measure.screen, measure.report, measure.ops, measure.round):
    bench.command(cls=Command)(command)
