"""Where the time of a decode round goes, by family of kernels: ``paceline bench round``.

An engine in this process serves C long requests. Once all C lanes decode, some rounds warm up, some are timed as they are,
and some run under torch's profiler. What a round takes beyond the time in which the device is busy is the host's. The busy
time is shared out among the kernels, whose durations overlap and add up to far more (``added``).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.bench.artefact import prompts, provenance, write
from paceline.bench.timing import ceiling
from paceline.config import DrafterConfig, EngineOptions, TargetConfig
from paceline.engine.arithmetic import resolve_device
from paceline.engine.build import resolve_paths
from paceline.engine.engine import Engine
from paceline.engine.plan import Round, RoundResult
from paceline.errors import ConfigError, EngineDead
from paceline.ops.kv import bytes_per_token
from paceline.types import Emission, Request, SamplingParams
from paceline.weights.load import Checkpoint, open_drafter, open_target

FAMILIES = {
    "products": r"_partial_sums|_add_partial_sums|product$|add_parts$|_prepare_rows|_expand|_undo_scaling"
    r"|.*(gemm|cutlass|nvjet|xmma|splitK)",
    "attention": r"_attend|attend$|_add_pieces|_prepare",
    "gated delta rule": r"_inputs|_verify|_replay|mixer$",
    "convolution": r"_causal_conv|_conv_history|_advance_history",
    "norms, gates": r"_add_norm|_norm|_rows_|_swiglu|_rotate",
    "K/V writes": r"_write",
    "embedding": r"_dequantize_rows",
    "drafter's own": r"_dynamic_conv|_walk|_scores",
    "top-k": r"_block_maxima|_select",
    "between forwards": r"_accept|_advance$|_advance_counts|_input_tokens|_row_slots|_copy_features",
    "sampling": r"_draw|_best_block|_gumbel|_block_masses|_cut_by|_search_pass",
    "copies": r"Memcpy|Memset",
    "torch": r"void at::|void \(anonymous namespace\)|at::|.*(elementwise|vectorized|reduce_kernel|index_)",
}
"""Family: its kernels' names, of which the first match counts. The drafter's products, norms and attention are run by the
same kernels as the target's. Prompts are read by other kernels, some of the same name; they do not run in decode rounds."""
_OTHER = "other"
_STAGES = ("draft", "verify", "commit")
_WARM_ROUNDS = 8
_PROFILED_ROUNDS = 8
_KERNELS_SHOWN = 40


class DeviceEvent(NamedTuple):
    """One kernel or copy; microseconds on the device's clock."""

    name: str
    start: float
    end: float


def family_of(name: str) -> str:
    return next((family for family, pattern in FAMILIES.items() if re.match(pattern, name)), _OTHER)


def added(events: Iterable[DeviceEvent]) -> Iterator[tuple[DeviceEvent, float]]:
    """The events in order of their ends, each with the microseconds that it adds to the device's busy time: those in which
    it ran and no event that ended before it did. So whenever several run, the time is that of the first one to end.

    A kernel that is launched early waits for the one before it, so its duration holds the end of that one's too. What it
    does before its turn counts for the one that it waits for.
    """
    taken: list[tuple[float, float]] = []  # what the events so far covered: disjoint, the latest at the end
    for event in sorted(events, key=lambda event: event.end):
        free, until = 0.0, event.end
        while taken and taken[-1][1] > event.start:
            begin, end = taken.pop()
            free, until = free + (until - end), begin
        taken.append((min(event.start, until), event.end))
        yield event, free + max(0.0, until - event.start)


def busy(events: Iterable[DeviceEvent]) -> float:
    """Microseconds in which at least one of them ran."""
    return sum(gain for _, gain in added(events))


def by_family(events: Sequence[DeviceEvent], rounds: int, bytes_of: dict[str, int], rate: float) -> list[dict[str, Any]]:
    """Per round and family: time added, its share of the busy time, durations with their waiting, launches and, where
    ``bytes_of`` says what a round must read, the rate and the time that this takes at ``rate`` bytes per second. The longest
    first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    durations: defaultdict[str, float] = defaultdict(float)
    launches = Counter[str]()
    for event, gain in added(events):
        family = family_of(event.name)
        seconds[family] += 1e-6 * gain / rounds
        durations[family] += 1e-3 * (event.end - event.start) / rounds
        launches[family] += 1
    whole = sum(seconds.values())
    result = []
    for family, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        row: dict[str, Any] = {"family": family, "ms": 1e3 * taken, "share": taken / whole}
        row |= {"durations_ms": durations[family], "launches": launches[family] / rounds}
        if family in bytes_of:
            row |= {
                "bytes": bytes_of[family],
                "tb_per_s": bytes_of[family] / taken / 1e12,
                "limit_ms": 1e3 * bytes_of[family] / rate,
            }
        result.append(row)
    return result


def by_kernel(events: Sequence[DeviceEvent], rounds: int) -> list[dict[str, Any]]:
    """The kernels that add most, per round."""
    times: defaultdict[str, float] = defaultdict(float)
    durations: defaultdict[str, float] = defaultdict(float)
    launches = Counter[str]()
    for event, gain in added(events):
        times[event.name] += gain / rounds
        durations[event.name] += (event.end - event.start) / rounds
        launches[event.name] += 1
    return [
        {
            "name": name,
            "family": family_of(name),
            "us": taken,
            "durations_us": durations[name],
            "launches": launches[name] / rounds,
        }
        for name, taken in sorted(times.items(), key=lambda item: -item[1])[:_KERNELS_SHOWN]
    ]


# -- what a round must read ------------------------------------------------------------------------------------------------


def must_read(
    target: Checkpoint[TargetConfig],
    drafter: Checkpoint[DrafterConfig] | None,
    options: EngineOptions,
    lanes: int,
    context: float,
) -> dict[str, int]:
    """Bytes by family that a round of ``lanes`` lanes with ``context`` tokens each moves at least: every weight once, the
    head once more for a drafter without one; the states, read by verify and by commit and written; the target's K/V."""
    config = target.config
    weights = _product_bytes(target)
    if drafter is not None:
        weights += _product_bytes(drafter)
        if not drafter.config.own_head_rows:
            weights += _head_bytes(target)
    state = 4 * config.gdn_value_heads * config.gdn_key_dim * config.gdn_value_dim
    per_token = sum(
        bytes_per_token(kind, config.num_kv_heads, config.head_dim) for kind in (options.cache_type_k, options.cache_type_v)
    )
    return {
        "products": weights,
        "gated delta rule": 3 * lanes * config.layer_types.count("gdn") * state,
        "attention": round(lanes * context) * config.layer_types.count("attention") * per_token,
    }


def _product_bytes(checkpoint: Checkpoint[Any]) -> int:
    """Bytes of the matrices that are multiplied by; a tied head is the embedding."""
    tied = getattr(checkpoint.config, "tie_embeddings", False)
    beside = r"codebook|conv1d|base_kernel" + ("" if tied else r"|embed_tokens")
    return sum(
        tensor.nbytes
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == 2 and not re.search(beside, name)
    )


def _head_bytes(target: Checkpoint[TargetConfig]) -> int:
    name = "embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight"
    return target.tensors[name].nbytes


# -- watching an engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """How the watch waits for the device and profiles it: ``start`` and ``stop`` surround the profiled rounds."""

    wait: Callable[[], None]
    start: Callable[[], None]
    stop: Callable[[], None]


class Watch:
    """Called after every round in the engine's thread. Counts rounds in which all lanes decode and no prompt is read: first
    ``_WARM_ROUNDS``, then ``rounds`` that are timed, then ``_PROFILED_ROUNDS``. ``done`` is set after the last."""

    def __init__(self, lanes: int, rounds: int, probe: Probe) -> None:
        self.done = threading.Event()
        self.seconds = self.profiled_seconds = 0.0
        self.tokens = self.rows = 0
        self.context = 0.0
        self.stages = dict.fromkeys(_STAGES, 0.0)  # seconds of the timed rounds
        self._lanes, self._timed, self._probe = lanes, rounds, probe
        self._seen = 0
        self._started = 0.0

    def __call__(self, round: Round, result: RoundResult) -> None:
        if self.done.is_set() or round.prefill or len(round.verify) != self._lanes:
            return
        begin, middle = _WARM_ROUNDS, _WARM_ROUNDS + self._timed
        self._seen += 1
        if begin < self._seen <= middle:
            self.tokens += sum(map(len, result.verify))
            self.rows += sum(span.length for span in round.verify)
            for stage in _STAGES:
                self.stages[stage] += getattr(result.times, stage)
            self.context = sum(span.start + span.length for span in round.verify) / self._lanes
        if self._seen == 1:  # the first start of a profiler takes seconds
            self._probe.start()
            self._probe.stop()
        elif self._seen == begin:
            self._started = self._now()
        elif self._seen == middle:
            self.seconds = self._now() - self._started
            self._probe.start()
            self._started = self._now()
        elif self._seen == middle + _PROFILED_ROUNDS:
            self.profiled_seconds = self._now() - self._started
            self._probe.stop()
            self.done.set()

    def _now(self) -> float:
        self._probe.wait()
        return time.perf_counter()

    @property
    def needed(self) -> int:
        """Rounds until it is done."""
        return _WARM_ROUNDS + self._timed + _PROFILED_ROUNDS


class _Profiler:
    """torch's profiler, started anew each time; ``events`` are those of the last time."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self) -> None:
        assert self._profile is not None, "not started"
        torch.cuda.synchronize()
        self._profile.stop()

    def events(self) -> list[DeviceEvent]:
        assert self._profile is not None, "not started"
        return [
            DeviceEvent(event.name, event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if str(event.device_type).endswith("CUDA") and not getattr(event, "is_user_annotation", False)
        ]


def drive(engine: Engine, asked: Sequence[Sequence[int]], watch: Watch) -> None:
    """Let the engine serve these prompts, all at once, until the watch is done; what is still running is cancelled.
    ``EngineDead`` if the requests end before."""
    ended: list[Emission] = []
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [Request.create(prompt, params, engine.info) for prompt in asked]

    def sink(emission: Emission) -> None:
        if emission.finish_reason is not None:
            ended.append(emission)

    for request in requests:
        engine.submit(request, sink)
    while not watch.done.wait(0.05):
        if len(ended) == len(requests):
            last = ended[-1].error or f"finish reason {ended[-1].finish_reason!r}"
            raise EngineDead(f"the requests ended before {watch.needed} rounds of all lanes: {last}")
    for request in requests:
        engine.cancel(request.id)


# -- the whole -------------------------------------------------------------------------------------------------------------


def options_of(assignments: Iterable[str]) -> dict[str, Any]:
    """FIELD=VALUE, the value as JSON or else text."""
    options: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or name not in EngineOptions.__dataclass_fields__:
            known = ", ".join(EngineOptions.__dataclass_fields__)
            raise ConfigError(f"--option must be FIELD=VALUE with one of {known}, got {text!r}", param="option")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def run(options: EngineOptions, rounds: int, prompt_tokens: int, out: Path, say: Callable[[str], None] = print) -> int:
    """Profile, print the table and write the record. ``options.max_concurrency`` lanes decode."""
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}", param="rounds")
    device = resolve_device(options.device)
    if device.type != "cuda":
        raise ConfigError("this benchmark shows the time of GPU kernels and needs an NVIDIA GPU", param="device")
    lanes = options.max_concurrency
    profiler = _Profiler()
    watch = Watch(lanes, rounds, Probe(torch.cuda.synchronize, profiler.start, profiler.stop))
    target_path, drafter_path = resolve_paths(options)
    target, drafter = open_target(target_path), open_drafter(drafter_path) if drafter_path else None
    engine = Engine(options, observe=watch)
    try:
        drive(engine, prompts(target.tokenizer(), lanes, prompt_tokens), watch)
        info = engine.info
    finally:
        engine.close()
    limit = ceiling(device)
    bytes_of = must_read(target, drafter, options, lanes, watch.context)
    figures = summary(watch, rounds, lanes, profiler.events(), bytes_of, limit.bytes_per_second)
    settings = {"lanes": lanes, "rounds": rounds, "prompt_tokens": prompt_tokens, "speculation": info.speculation}
    write(out, {"benchmark": "rounds", **provenance(info), **settings, **figures})
    say(table(figures))
    say(f"written to {out}")
    return 0


def summary(
    watch: Watch, rounds: int, lanes: int, events: Sequence[DeviceEvent], bytes_of: dict[str, int], rate: float
) -> dict[str, Any]:
    """The figures of one round. The device's time is that of the profiled rounds, the round's that of the others."""
    taken, working = watch.seconds / rounds, 1e-6 * busy(events) / _PROFILED_ROUNDS
    return {
        "round_ms": 1e3 * taken,
        "profiled_round_ms": 1e3 * watch.profiled_seconds / _PROFILED_ROUNDS,
        "device_busy_ms": 1e3 * working,
        "host_gap_ms": 1e3 * (taken - working),
        "limit_ms": 1e3 * sum(bytes_of.values()) / rate,
        "tokens_per_second": watch.tokens / watch.seconds,
        "acceptance_length": watch.tokens / (rounds * lanes),
        "rows": watch.rows / rounds,
        "context": watch.context,
        "stages": [{"stage": stage, "ms": 1e3 * seconds / rounds} for stage, seconds in watch.stages.items()],
        "families": by_family(events, _PROFILED_ROUNDS, bytes_of, rate),
        "kernels": by_kernel(events, _PROFILED_ROUNDS),
    }


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['round_ms']:.2f} ms a round of {figures['rows']:.0f} rows at context {figures['context']:.0f}: "
        f"{figures['tokens_per_second']:.0f} tok/s, acceptance length {figures['acceptance_length']:.2f}",
        f"device busy {figures['device_busy_ms']:.2f} ms, host {figures['host_gap_ms']:.2f} ms; "
        f"what must be read takes {figures['limit_ms']:.2f} ms",
        ", ".join(f"{row['stage']} {row['ms']:.2f} ms" for row in figures["stages"]),
        f"{'family':<20}{'ms':>9}{'share':>8}{'launches':>10}{'TB/s':>8}{'at best ms':>12}",
    ]
    for row in figures["families"]:
        rate = f"{row['tb_per_s']:>8.2f}{row['limit_ms']:>12.3f}" if "bytes" in row else ""
        lines.append(f"{row['family']:<20}{row['ms']:>9.3f}{100 * row['share']:>6.1f} %{row['launches']:>10.1f}{rate}")
    return "\n".join(lines)
