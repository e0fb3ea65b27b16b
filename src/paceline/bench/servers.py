"""Servers under measurement: how they are described, started, waited for, read and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from paceline.errors import ConfigError

READY_MADE = Path(__file__).with_name("servers.toml")
_NAME = re.compile(r"[\w.+-]+")
_GRACE_SECONDS = 30.0


def flags_of(text: str, param: str) -> list[str]:
    """Flags as in a shell. ``ConfigError`` for a quotation that does not end names ``param``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{param}: cannot be read as flags: {error}: {text!r}", param=param) from None


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to run a server: the flags that it adds to the command, and whether it drafts."""

    name: str
    flags: tuple[str, ...]
    speculation: bool

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """From NAME=FLAGS, flags of ``paceline serve`` as in a shell."""
        name, equals, flags = text.partition("=")
        if not _NAME.fullmatch(name) or not equals:
            raise ConfigError(f"--config must be NAME=FLAGS, such as off=--no-speculation, got {text!r}", param="config")
        words = tuple(flags_of(flags, "config"))
        return cls(name, words, "--no-speculation" not in words)

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is made up, so that the text means nothing."""
        return any(flag.startswith("--spec-synth") for flag in self.flags)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server as its file describes it. Without a ``command`` it runs already, and ``url`` says where.

    ``command``, ``url`` and ``flags`` may have placeholders: {python}, {model}, {draft}, {port}, {lanes}, {trace}. ``ready``
    answers 200 when it serves, within ``timeout`` seconds, which also bound every answer. ``body`` is added to every
    request. ``exact``: equal requests must give equal tokens in all its cells.
    """

    name: str
    configurations: tuple[Configuration, ...]
    command: tuple[str, ...] = ()
    url: str = "http://127.0.0.1:{port}"
    ready: str = "/health"
    timeout: float = 600.0
    metrics: str = ""
    version: tuple[str, ...] = ()
    body: Mapping[str, Any] | None = None
    exact: bool = False


def read_servers(path: Path | None = None) -> dict[str, ServerKind]:
    """The ready-made servers and, in their place where names are equal, those of a file."""
    servers = _read(READY_MADE)
    return servers | _read(path) if path else servers


def _read(path: Path) -> dict[str, ServerKind]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not readable as TOML: {error}"
        raise ConfigError(f"{path}: {reason}", param="servers") from None
    return {name: _server(f"{path}: [{name}]", name, table) for name, table in tables.items()}


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "command": list,
    "url": str,
    "ready": str,
    "timeout": (int, float),
    "metrics": str,
    "version": list,
    "body": dict,
    "exact": bool,
}


def _server(where: str, name: str, table: Any) -> ServerKind:
    fields = _checked(where, table, _FIELDS | {"configurations": dict})
    if not fields.get("command") and "{port}" in fields.get("url", "{port}"):
        raise ConfigError(f"{where}: a server without a command runs already, and needs a url", param="servers")
    given = fields.pop("configurations", {"default": {"speculation": False}})
    configurations = [_configuration(f"{where} configurations.{key}", key, value) for key, value in given.items()]
    words: dict[str, Any] = {
        field: tuple(map(str, value)) if isinstance(value, list) else value for field, value in fields.items()
    }
    return ServerKind(name=name, configurations=tuple(configurations), **words)


def _configuration(where: str, name: str, table: Any) -> Configuration:
    fields = _checked(where, table, {"flags": list, "speculation": bool})
    if "speculation" not in fields:
        raise ConfigError(f"{where}: speculation must say whether it drafts, true or false", param="servers")
    return Configuration(name, tuple(map(str, fields.get("flags", ()))), fields["speculation"])


def _checked(where: str, table: Any, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The table, of whose fields all are known and of their types."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r}", param="servers")
    for field, value in table.items():
        if field not in fields:
            raise ConfigError(f"{where}: unknown field {field!r}; there are {', '.join(fields)}", param="servers")
        kinds = fields[field]
        if not isinstance(value, kinds):
            wanted = kinds.__name__ if isinstance(kinds, type) else "number"
            raise ConfigError(f"{where}: {field} must be a {wanted}, got {value!r}", param="servers")
    return dict(table)


# -- running ---------------------------------------------------------------------------------------------------------------


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders filled in; ``ConfigError`` for an unknown one."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in values)
            raise ConfigError(f"{text!r}: unknown placeholder {found[0]}; there are {known}", param="servers")
        return values[found[1]]

    return re.sub(r"\{(\w+)\}", value, text)


class Server:
    """One server, up and answering inside the ``with`` block. Its output goes to ``log``."""

    def __init__(self, kind: ServerKind, flags: Sequence[str], values: Mapping[str, str], log: Path, trace: Path) -> None:
        self.kind = kind
        self.trace = trace
        filled = {"python": sys.executable, "port": str(_free_port()), "trace": str(trace), **values}
        self.url = fill(kind.url, filled)
        parts = (*kind.command, *flags) if kind.command else ()
        self.command = [fill(part, filled) for part in parts]
        short = {name: Path(value).name for name, value in filled.items()}
        self.recorded_command = [fill(part, short) for part in parts]
        """As documents show it: with the names of files, wherever they lie here."""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.trace.unlink(missing_ok=True)
        if self.command:
            with self._log.open("w") as log:
                try:
                    self._process = subprocess.Popen(
                        self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                    )
                except OSError as error:
                    raise ConfigError(f"{self.kind.name}: cannot run {self.command[0]}: {error.strerror}") from None
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the session ends with whatever it started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def exit_status(self, within: float = 0.0) -> int | None:
        """None while it runs, and where it was not started here. ``within``: seconds in which it may still end."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return self._process.returncode

    def counters(self) -> dict[str, float]:
        """Its Prometheus samples by name and labels; none without metrics, or if it does not answer."""
        if not self.kind.metrics:
            return {}
        try:
            text = httpx.get(self.url + self.kind.metrics, timeout=60, trust_env=False).text
        except httpx.HTTPError:
            return {}
        samples = re.findall(r"^([a-zA-Z_]\w*(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def still_held(self, patience: float = 10.0) -> str | None:
        """Lanes and pages of Paceline that somebody still has, or waits for, after some seconds without requests."""
        deadline = time.monotonic() + patience
        while True:
            counters = self.counters()
            lanes, queued = counters.get("paceline_lanes"), counters.get("paceline_queue_depth")
            free, total = counters.get("paceline_kv_pages_free"), counters.get("paceline_kv_pages_total")
            if lanes == queued == 0 and free == total and free:
                return None
            if time.monotonic() > deadline:
                return f"lanes {lanes}, queued {queued}, pages free {free} of {total}"
            time.sleep(0.1)

    def rss_bytes(self) -> int:
        """The memory that its processes have now, added up."""
        assert self._process is not None, "the server was not started here"
        return sum(_memory_of(pid, "VmRSS") for pid in _session(self._process.pid))

    def peak_rss_bytes(self) -> int | None:
        """The high-water marks of its processes' memory, added up; None where there are none to be read."""
        if self._process is None:
            return None
        peaks = [_memory_of(pid, "VmHWM") for pid in _session(self._process.pid)]
        return sum(peaks) or None

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used."""
        return 0.0 if self._process is None else sum(map(_cpu_of, _session(self._process.pid)))

    def arithmetic(self, fingerprint: str | None) -> str | None:
        """What its log says about a fingerprint."""
        if fingerprint is None or not self._log.exists():
            return None
        found = re.search(rf"arithmetic {re.escape(fingerprint)}: (.*)", self._log.read_text(errors="replace"))
        return found[1] if found else None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.kind.timeout
        while time.monotonic() < deadline:
            if (status := self.exit_status()) is not None:
                last = (self._log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                raise ConfigError(f"{self.kind.name} ended with status {status}: {last} (log: {self._log})")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + self.kind.ready, timeout=10, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise ConfigError(f"{self.kind.name} was not ready at {self.url}{self.kind.ready} within {self.kind.timeout:g} s")


def version(kind: ServerKind) -> str | None:
    """What its version command prints."""
    if not kind.version:
        return None
    try:
        ended = subprocess.run(kind.version, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (ended.stdout + ended.stderr).strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session(leader: int) -> list[int]:
    """Process ids of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            behind_the_name = entry.read_text().rpartition(")")[2].split()
            if int(behind_the_name[3]) == leader:
                found.append(int(entry.parent.name))
    return found


def _cpu_of(pid: int) -> float:
    try:
        behind_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(behind_the_name[11]) + int(behind_the_name[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float | None:
    """Time that all processors together have been busy since the machine started, time that a hypervisor took among it; None
    where Linux does not tell."""
    try:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _memory_of(pid: int, name: str) -> int:
    """A line of what Linux says of a process's memory, in bytes."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
