"""One engine: what is known of it from its rings and samples, and what the page Engines says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvscope import steps
from kvscope.frame import Engine
from kvscope.samples import Sample
from kvscope.text import printable, size, span, utc
from kvscope.tui.lines import Line
from kvscope.tui.pages import grid

RECORDING = "recording"
_STATES = (RECORDING, "stopped", "gone", "ended")
"""Of a ring, in the order in which engines are listed."""
STATE_STYLES = {"stopped": "bad", "gone": "bad", "ended": "dim"}
_OVER = ("gone", "ended")

BLOCKS = {
    "running": ("█", steps.COMPUTE),
    "staging": ("▒", steps.TRANSFER),
    "kept": ("░", steps.COORDINATION),
}
"""What holds KV blocks: the character and the style of each use in a bar."""
WRITERS = ("nixl-push-write", "nixl-handshake")
"""Threads of vLLM's connector, as the kernel cuts their names."""
_VERSIONS = ("vllm", "nixl", "kvscope")
MAX_PROCESSES = 32
"""Of one engine, shown."""

Labelled = Mapping[str, float]


class Samples:
    """The latest samples by what they are of."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._of: dict[tuple[str, str, int, str], dict[str, float]] = {}
        self._of_host: dict[tuple[str, str], dict[str, float]] = {}
        for one in samples:
            if one.engine:
                self._of.setdefault((one.engine, one.source, one.rank, one.name), {})[one.label] = one.value
            else:
                self._of_host.setdefault((one.host, one.name), {})[one.label] = one.value

    def of_host(self, host: str, name: str) -> Labelled:
        return self._of_host.get((host, name), {})

    def of_engine(self, engine: str, name: str) -> Labelled:
        """Of the whole engine."""
        return self._of.get((engine, "", 0, name), {})

    def of_process(self, ring: Engine, name: str) -> Labelled:
        return self._of.get((ring.engine, ring.source, ring.rank, name), {})


class Group(NamedTuple):
    """One engine: its processes and what is known of it as a whole."""

    name: str
    role: str
    """P, D, P+D; empty where nothing tells."""
    state: str
    """The gravest of its processes'."""
    rings: tuple[Engine, ...]
    """The latest of each process, the scheduler first."""
    samples: Samples
    differs: frozenset[str]
    """Versions (`vllm`, `nixl`, `kvscope`) that are not the same in all engines that run."""

    @property
    def over(self) -> bool:
        return self.state in _OVER

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.rings[0].fingerprint if self.rings else {}

    def sum_of(self, name: str) -> float | None:
        """Of the engine's samples of all labels; None where there is none."""
        found = self.samples.of_engine(self.name, name)
        return sum(found.values()) if found else None

    def processes(self, name: str) -> float | None:
        """Added up over its processes, one that has two rings once; None where none tells."""
        found: dict[tuple[str, int], float] = {}
        for ring in self.rings:
            values = self.samples.of_process(ring, name)
            if values:
                found[(ring.host, ring.pid)] = sum(values.values())
        return sum(found.values()) if found else None

    def of_any(self, name: str, choose: Callable[[Iterable[float]], float] = max) -> float | None:
        """Of the scheduler where it tells, else of the process that `choose` takes."""
        known = [
            (ring.source, value)
            for ring in self.rings
            for value in self.samples.of_process(ring, name).values()
        ]
        scheduler = [value for source, value in known if source == "scheduler"]
        values = scheduler or [value for _, value in known]
        return choose(values) if values else self.sum_of(name)

    def blocks(self) -> dict[str, float] | None:
        """KV blocks by use, with `total`; None where the total is not known."""
        total = self.sum_of("kv_blocks.total")
        if not total:
            return None
        uses = {use: self.sum_of(f"kv_blocks.{use}") for use in BLOCKS}
        return {"total": total, **{use: value for use, value in uses.items() if value is not None}}

    @property
    def lost(self) -> int:
        return sum(ring.lost for ring in self.rings)

    @property
    def hooks_missing(self) -> list[str]:
        return sorted({hook for ring in self.rings for hook in ring.hooks_missing})


def groups(
    engines: Sequence[Engine], samples: Iterable[Sample], pairs: Iterable[Mapping[str, Any]]
) -> list[Group]:
    """Engines with their processes: those that run first, those that are over last.

    Args:
        pairs: rows with `p_engine` and `d_engine`, which tell the engines' roles.
    """
    found = Samples(samples)
    prefill, decode = set(), set()
    for pair in pairs:
        prefill.add(pair.get("p_engine"))
        decode.add(pair.get("d_engine"))
    by_name: dict[str, dict[tuple[str, int], Engine]] = {}
    for ring in engines:
        processes = by_name.setdefault(ring.engine, {})
        other = processes.get((ring.source, ring.rank))
        if other is None or _later(ring, other):
            processes[(ring.source, ring.rank)] = ring
    running = [r for processes in by_name.values() for r in processes.values() if r.state not in _OVER]
    differs = frozenset(name for name in _VERSIONS if len({version(r, name) for r in running} - {""}) > 1)
    made = []
    for name, processes in by_name.items():
        rings = tuple(processes[key] for key in sorted(processes))
        states = [ring.state for ring in rings]
        state = next((s for s in ("stopped", "gone", RECORDING, "ended") if s in states), states[0])
        role = _role(name in prefill, name in decode, rings[0].fingerprint)
        made.append(Group(name, role, state, rings, found, differs))
    return sorted(made, key=order)


def order(group: Group) -> tuple[int, str, str]:
    state = _STATES.index(group.state) if group.state in _STATES else 0
    return (state if group.over else 0), group.role or "~", group.name


def _later(ring: Engine, other: Engine) -> bool:
    """Whether `ring` tells of the process as it is now."""
    return (ring.state not in _OVER, ring.started_at_ns) > (other.state not in _OVER, other.started_at_ns)


def _role(prefill: bool, decode: bool, fingerprint: Mapping[str, Any]) -> str:
    if prefill or decode:
        return "P+D" if prefill and decode else "P" if prefill else "D"
    return {"kv_producer": "P", "kv_consumer": "D"}.get(str(fingerprint.get("kv_role")), "")


def version(ring: Engine, name: str) -> str:
    return printable(ring.kvscope if name == "kvscope" else ring.fingerprint.get(name))


def held(blocks: Mapping[str, float] | None) -> float | None:
    """The share of blocks that something holds."""
    if not blocks or len(blocks) == 1:
        return None
    return min(1.0, sum(value for use, value in blocks.items() if use != "total") / blocks["total"])


def connector(fingerprint: Mapping[str, Any]) -> str:
    """Its class, and what it does where the class does not say."""
    extra = fingerprint.get("extra_config")
    name = printable(fingerprint.get("connector") or fingerprint.get("kv_connector"))
    if isinstance(extra, Mapping) and extra.get("bidirectional_kv_xfer"):
        return f"{name}, bidirectional"
    mode = printable(fingerprint.get("transfer_mode"))
    return f"{name}, {mode}" if mode and mode not in name.lower() else name


# --- the chosen engine -------------------------------------------------------------------------------

_SIZES = {
    "block_size": "block size",
    "num_blocks": "KV blocks",
    "kv_cache_dtype": "KV type",
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "async_scheduling": "async scheduling",
    "chunked_prefill": "chunked prefill",
    "prefix_caching": "prefix caching",
}
_CONNECTOR = {
    "kv_role": "role",
    "nixl_backends": "backends",
    "kv_load_failure_policy": "failed loads",
    "kv_buffer_device": "buffers on",
    "side_channel": "side channel",
}


def detail_lines(group: Group | None, width: int, leases: Iterable[grid.Row] = ()) -> list[Line]:
    """The chosen engine: what it runs, what it does, its host, its processes.

    Args:
        leases: rows of the question `leases`, of all engines.
    """
    if group is None:
        return []
    lines: list[Line] = []
    details = [*_details(group), _leases(group, leases)]
    for key, text, style in filter(lambda found: found[1], details):
        for at, line in enumerate(grid.wrapped(text, max(10, width - 11), style)):
            lines.append([(f"{'' if at else key:<11}", "dim"), *line])
    return [[], *_heading(group, width), *lines, [], *processes(group, width)]


def _heading(group: Group, width: int) -> list[Line]:
    role = {"P": "prefill", "D": "decode", "P+D": "prefill and decode"}.get(group.role, "role not known")
    ring = group.rings[0]
    since = utc(ring.started_at_ns)[:19]
    line: Line = [
        (printable(group.name), "title"),
        (f"  {role}, ", ""),
        (printable(group.state), STATE_STYLES.get(group.state, "")),
        (f", on {printable(ring.host)} since {since} UTC", ""),
    ]
    return [grid.padded(line, width)]


def _details(group: Group) -> Iterator[tuple[str, str, str]]:
    """(name, text, style) of what is known, in order."""
    prints, ring = group.fingerprint, group.rings[0]
    versions = ", ".join(
        f"{name} {version(ring, name)}{' ≠' if name in group.differs and not group.over else ''}"
        for name in (*_VERSIONS, "torch", "python")
        if version(ring, name)
    )
    yield "versions", versions, ""
    if group.differs and not group.over:
        yield "", f"≠ not the same in all engines: {', '.join(sorted(group.differs))}", "warn"
    if detail := next((r.state_detail for r in group.rings if r.state_detail), None):
        yield "state", printable(detail), "bad" if group.state in ("stopped", "gone") else ""
    if group.hooks_missing:
        yield (
            "hooks",
            f"missing: {printable(', '.join(group.hooks_missing))}; their steps are unknown",
            "warn",
        )
    yield (
        "model",
        printable(prints.get("model")) + (f", label {printable(ring.label)}" if ring.label else ""),
        "",
    )
    texts = [connector(prints), *_named(prints, _CONNECTOR)]
    yield "connector", ", ".join(filter(None, texts)), ""
    if extra := _settings(prints.get("extra_config")):
        yield "", extra, ""
    if environment := _settings(prints.get("environment")):
        yield "environ", environment, ""
    yield "sizes", ", ".join(_named(prints, _SIZES)), ""
    yield "KV blocks", _blocks_text(group), ""
    yield "requests", _requests_text(group), ""
    yield "steps", _steps_text(group), ""
    for host in dict.fromkeys(r.host for r in group.rings):
        yield from _host(group.samples, host)


def _leases(group: Group, leases: Iterable[grid.Row]) -> tuple[str, str, str]:
    """How the leases of the window ended on it, and the least time that was left until a deadline."""
    texts, expired = [], False
    for row in leases:
        if row.raw("engine") == group.name:
            margin = row.number("min_margin_ms")
            left = "" if margin is None else f" ({span(round(margin * 1e6))} left at least)"
            end = row.text("lease_end") or "held"
            expired = expired or end == "expired"
            texts.append(f"{grid.count(row.number('leases'))} {end}{'' if end == 'expired' else left}")
    return "leases", ", ".join(texts), "warn" if expired else ""


def _named(prints: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    return [
        f"{title} {_value(prints[name])}" for name, title in names.items() if prints.get(name) is not None
    ]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return "+".join(printable(item) for item in value)
    return printable(value)


def _settings(settings: object) -> str:
    if not isinstance(settings, Mapping):
        return ""
    return ", ".join(f"{printable(name)}={_value(value)}" for name, value in settings.items())


def _blocks_text(group: Group) -> str:
    blocks = group.blocks()
    texts = []
    if blocks:
        texts = [f"{blocks[use]:,.0f} {use}" for use in BLOCKS if use in blocks]
        if len(blocks) > 1:
            free = blocks["total"] - sum(value for use, value in blocks.items() if use != "total")
            texts.append(f"{max(0.0, free):,.0f} free or cached")
        texts = [
            f"{', '.join(texts)} of {blocks['total']:,.0f}" if texts else f"{blocks['total']:,.0f} in all"
        ]
    usage = group.sum_of("vllm.kv_cache_usage")
    if usage is not None:
        texts.append(f"vLLM says {usage:.0%} in use")
    return "; ".join(texts)


def _requests_text(group: Group) -> str:
    texts = []
    running = group.sum_of("vllm.running")
    if running is not None:
        texts.append(f"{running:.0f} running")
    for name, what in (("vllm.waiting", "waiting"), ("vllm.kv_fetch", "fetching KV")):
        found = group.samples.of_engine(group.name, name)
        if found:
            reasons = ", ".join(
                f"{v:.0f} {printable(k).replace('_', ' ')}" for k, v in found.items() if k and v
            )
            texts.append(f"{sum(found.values()):.0f} {what}" + (f" ({reasons})" if reasons else ""))
    preemptions = group.sum_of("vllm.preemptions_per_s")
    if preemptions:
        texts.append(f"{preemptions:.2g} preemptions/s")
    return ", ".join(texts)


def _steps_text(group: Group) -> str:
    rate, mean, tokens = (group.of_any(f"engine.{n}") for n in ("steps_per_s", "step_ns", "step_tokens"))
    texts = [
        None if rate is None else f"{rate:.1f}/s",
        None if mean is None else f"{mean / 1e6:.1f} ms each",
        None if tokens is None else f"{grid.rate(tokens)} tokens in each",
    ]
    return ", ".join(text for text in texts if text)


def _host(samples: Samples, host: str) -> Iterator[tuple[str, str, str]]:
    """CPU, run queue, memory and network of a host; a run queue longer than its cores is a warning."""

    def one(name: str) -> float | None:
        found = samples.of_host(host, name)
        return next(iter(found.values())) if found else None

    cpu, cores, queue, free = (
        one(f"host.{n}") for n in ("cpu", "cores", "run_queue", "memory_available_bytes")
    )
    of_cores = "" if cores is None else f" of {cores:.0f}"
    texts = [
        None if cpu is None else f"{cpu:.1f}{of_cores} cores busy",
        None if queue is None else f"run queue {queue:.0f}",
        None if free is None else f"{size(free)} memory to be had",
    ]
    text = ", ".join(t for t in texts if t)
    if text:
        yield "host", f"{printable(host)}: {text}", ""
    if queue is not None and cores is not None and queue > cores:
        yield (
            "",
            f"run queue {queue:.0f} on {cores:.0f} cores: engine steps and writers wait for a core",
            "warn",
        )
    received, sent = (
        samples.of_host(host, "host.nic_rx_bytes_per_s"),
        samples.of_host(host, "host.nic_tx_bytes_per_s"),
    )
    rates = [
        f"{printable(device)} {size(received.get(device, 0.0))}/s in, {size(sent.get(device, 0.0))}/s out"
        for device in sorted({*received, *sent})
        if received.get(device) or sent.get(device)
    ]
    if rates:
        yield "network", "; ".join(rates), ""


_PROCESSES = (
    grid.Column("process", right=False),
    grid.Column("pid", rank=4),
    grid.Column("state", right=False),
    grid.Column("CPU"),
    grid.Column("memory", rank=3),
    grid.Column("hooks"),
    grid.Column("switches/s", rank=6),
    grid.Column("last event", rank=5),
    grid.Column("read"),
    grid.Column("lost"),
    grid.Column("torn", rank=1),
    grid.Column("rejected", rank=2),
)


def processes(group: Group, width: int) -> list[Line]:
    """Its processes: what they use, and how much of their rings was read; then their busiest threads."""
    rows: list[list[grid.Cell]] = []
    for ring in group.rings[:MAX_PROCESSES]:
        cpu, memory, share, switches = (
            group.samples.of_process(ring, name)
            for name in ("process.cpu", "process.rss_bytes", "engine.hook_share", "process.switches_per_s")
        )
        rows.append(
            [
                f"{printable(ring.source)} {ring.rank}",
                str(ring.pid),
                [(printable(ring.state), STATE_STYLES.get(ring.state, ""))],
                f"{sum(cpu.values()):.2f}" if cpu else "",
                size(sum(memory.values())) if memory else "",
                f"{sum(share.values()):.2%}" if share else "",
                f"{sum(switches.values()):.0f}" if switches else "",
                "" if ring.last_event_at_ns is None else utc(ring.last_event_at_ns, date=False)[:8],
                f"{ring.read:,}",
                _alarming(ring.lost),
                _alarming(ring.torn),
                _alarming(ring.rejected),
            ]
        )
    lines = grid.table(_PROCESSES, rows, width)
    if len(group.rings) > MAX_PROCESSES:
        lines.append([(f"and {len(group.rings) - MAX_PROCESSES} processes more", "dim")])
    for ring in group.rings[:MAX_PROCESSES]:
        threads = group.samples.of_process(ring, "thread.cpu")
        if threads:
            first = [name for name in WRITERS if name in threads]
            rest = sorted((n for n in threads if n not in first), key=lambda n: -threads[n])
            text = ", ".join(f"{printable(n)} {threads[n]:.2f}" for n in [*first, *rest][:8])
            lines += grid.wrapped(
                f"threads of {printable(ring.source)} {ring.rank}, cores: {text}", width, "dim", "  "
            )
    return lines


def _alarming(count: int) -> Line:
    return [(f"{count:,}", "bad" if count else "dim")]
