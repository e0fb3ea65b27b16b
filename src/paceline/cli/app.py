"""The commands put together, and what becomes of their errors: one line on stderr, never a traceback for a user's mistake.

Modules of this package import torch and the server only inside functions: help and bad options must answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

from paceline.cli.bench import bench
from paceline.cli.command import Command
from paceline.cli.demo import demo
from paceline.cli.generate import generate
from paceline.cli.inspect import inspect
from paceline.cli.selfcheck import selfcheck
from paceline.cli.serve import serve
from paceline.config import build_name
from paceline.errors import PacelineError

FAILED = 1
INTERRUPTED = 130
"""The exit status of a program that SIGINT ended: 128 + 2."""


def _version(wanted: bool) -> None:
    if wanted:
        print(build_name())
        raise typer.Exit


def _paceline(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """LLM inference with batched DFlash2 speculative decoding, and an OpenAI-compatible server."""


def _application() -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_paceline)
    for command in (serve, generate, inspect, selfcheck, demo):
        app.command(cls=Command)(command)
    app.add_typer(bench, name="bench")
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run ``paceline`` with these arguments, or the process's. Returns the exit status: 0; 1 for an error; 2 for an option
    that does not exist or whose value cannot work; 130 after an interrupt."""
    if sys.stderr is None:  # the shell's 2>&-: print would take stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        return typer.main.get_command(_application()).main(arguments, prog_name="paceline", standalone_mode=False) or 0
    except PacelineError as error:
        return _fail(error.message)
    except typer.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python would report it once more while it flushes stdout on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, MemoryError) as error:
        named = getattr(error, "filename", None)
        return _fail(f"{named}: {error.strerror}" if named else str(error) or "out of memory")  # type: ignore[union-attr]
    except Exception as error:
        # Usage errors. Their base class is click's or typer's own, depending on typer's version.
        if not hasattr(error, "format_message"):
            raise
        return _usage(error)


def _usage(error: Exception) -> int:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if message.startswith("Usage:"):
        print(message)  # no command was given: the help text
    else:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "paceline"
        message = re.sub(r"^Invalid value(?: for '([^']+)')?: ", lambda found: f"{found[1]}: " if found[1] else "", message)
        _fail(f"{message.rstrip('.')} (see {command} --help)")
    return int(error.exit_code)  # type: ignore[attr-defined]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return FAILED
