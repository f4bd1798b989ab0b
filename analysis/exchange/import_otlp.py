"""vLLM's own traces as requests: what the span `llm_request` tells of each leg.

Files are as an OpenTelemetry collector's file exporter writes them: OTLP/JSON lines, or protobuf messages
with their length before each. vLLM makes one span per leg: when the API server had the request, how long it
took to the first token, to the end, in the queue and from being scheduled to the first token. That is less
than kvscope records, and on D the queue contains the whole wait for the KV, so much of TTFT is `unknown`.

Legs are joined by the client's request id, where exactly one span of it is a prefill (it may generate one
token) and the others are of other engines; never by time.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import msgspec

from kvscope import schema
from kvscope.analysis.exchange.import_lines import MAX_LINE_BYTES, Notes, lines
from kvscope.analysis.exchange.import_store import Store
from kvscope.analysis.exchange.partial import Mark, name_id, request_row, row, split
from kvscope.errors import KvscopeError
from kvscope.join import client_id
from kvscope.steps import TELEMETRY
from kvscope.text import printable

SPAN = "llm_request"
OWN_SPANS = "spans of kvscope itself"
"""What is left out of a file that `kvscope export otlp` wrote: it tells less than was stored."""
HELD = 100_000
"""Requests whose legs are waited for; beyond it the oldest is stored as it is."""
MAX_LEGS = 64
"""Of a request; more are left out."""
MAX_NS = 7 * 86400 * 10**9
"""No leg takes longer."""
_FAILED = 2
_TRACE_FIELDS = ("resourceSpans", "resource_spans")


class Span(NamedTuple):
    """What a span tells of a leg; None is "not told"."""

    engine: str
    host: str
    trace_id: str
    span_id: str
    request: str
    """vLLM's external request id."""
    start_ns: int
    ttft_ns: int | None
    e2e_ns: int | None
    queue_ns: int | None
    """In the queue; on D with the wait for the KV."""
    run_ns: int | None
    """From being scheduled to the first token."""
    prompt_tokens: int | None
    output_tokens: int | None
    max_tokens: int | None
    model: str
    error: str

    @property
    def is_prefill(self) -> bool:
        """Whether it may generate one token only, as a router has P do."""
        return self.max_tokens == 1


class Joining:
    """Holds legs until their partners have come."""

    def __init__(self, store: Store, notes: Notes, label: str) -> None:
        self._store, self._notes, self._label = store, notes, label
        self._held: OrderedDict[str, list[Span]] = OrderedDict()
        self._engines: set[str] = set()

    def add(self, span: Span) -> None:
        legs = self._held.setdefault(client_id(span.request, False) or span.span_id, [])
        if any((leg.trace_id, leg.span_id) == (span.trace_id, span.span_id) for leg in legs):
            return
        if len(legs) >= MAX_LEGS:
            self._notes.count("legs beyond the 64th of one request id")
            return
        legs.append(span)
        if len(self._held) > HELD:
            self._notes.count("requests stored before all files were read: their legs may be stored apart")
            self._tell(*self._held.popitem(last=False))

    def finish(self) -> None:
        """No more spans come."""
        while self._held:
            self._tell(*self._held.popitem(last=False))

    def _tell(self, client: str, legs: Sequence[Span]) -> None:
        prefills = [leg for leg in legs if leg.is_prefill]
        decodes = [leg for leg in legs if not leg.is_prefill]
        if (
            len(prefills) == 1
            and decodes
            and {leg.engine for leg in decodes}.isdisjoint({prefills[0].engine})
        ):
            self._store_request(client, prefills[0], decodes, "client id")
            return
        for leg in legs:
            self._store_request(client, None, [leg], "unjoined")

    def _store_request(self, client: str, p: Span | None, decodes: Sequence[Span], joined_by: str) -> None:
        """The decode leg that had the first token first tells of the request."""
        d = min(
            decodes, key=lambda leg: (leg.ttft_ns is None, leg.start_ns + (leg.ttft_ns or 0), leg.span_id)
        )
        first = p or d
        t0 = min(first.start_ns, d.start_ns)
        legs = [d, p] if p else [d]
        end = None if d.ttft_ns is None else d.start_ns + d.ttft_ns
        parts = split(t0, list(_marks(p, d)), end)
        failed = next((leg.error for leg in legs if leg.error), "")
        if d.output_tokens == 0:
            failed = failed or "no token generated"
        for leg in legs:
            self._engine(leg)
        self._store.add(
            schema.REQUESTS.name,
            request_row(
                parts,
                None if d.ttft_ns is None or d.e2e_ns is None else max(0, d.e2e_ns - d.ttft_ns),
                id=name_id("otlp", first.trace_id, first.span_id),
                client_id=client,
                arrived_at_ns=t0,
                label=self._label,
                model=d.model or (p.model if p else "") or None,
                outcome="error" if failed else "finished",
                outcome_detail=failed or None,
                joined_by=joined_by,
                p_engine=p.engine if p else None,
                d_engine=d.engine,
                d_legs=len(decodes),
                trace_id=d.trace_id or None,
                prompt_tokens=d.prompt_tokens,
                output_tokens=d.output_tokens,
                ttft_ns=None if end is None else max(0, end - t0),
                clock_error_ns=0 if p is None or p.host == d.host != "" else None,
            ),
        )
        self._notes.requests += 1
        self._notes.joined += p is not None

    def _engine(self, leg: Span) -> None:
        """A row of `engines`, once."""
        if leg.engine in self._engines:
            return
        self._engines.add(leg.engine)
        self._store.add(
            schema.ENGINES.name,
            row(
                schema.ENGINES,
                id=name_id("otlp", self._label, leg.engine),
                ring=f"imported {leg.engine}",
                engine=leg.engine,
                source="scheduler",
                rank=0,
                host=leg.host or None,
                label=self._label,
                hooks_missing=[],
                fingerprint='{"imported_from":"vLLM traces"}',
                state="ended",
                state_detail="imported from vLLM's traces: not recorded by kvscope",
            ),
        )


def _marks(p: Span | None, d: Span) -> Iterator[Mark]:
    """P's queue and prefill, the hand-over, D's first step. When within its leg each took place is not told
    but for the end: the first token. Of a leg alone it is not known which of the two it is."""
    if p is None:
        return
    if p.ttft_ns is not None:
        prefilled = p.start_ns + p.ttft_ns
        if p.run_ns is not None and p.queue_ns is not None:
            scheduled = prefilled - p.run_ns
            yield Mark("unknown", max(p.start_ns, scheduled - p.queue_ns))
            yield Mark("prefill.queue", scheduled, TELEMETRY)
        elif p.run_ns is not None:
            yield Mark("unknown", prefilled - p.run_ns)
        yield Mark("prefill.compute" if p.run_ns is not None else "unknown", prefilled, TELEMETRY)
        if d.start_ns >= prefilled:
            yield Mark("registration.route", d.start_ns, TELEMETRY)
    if d.ttft_ns is not None and d.run_ns is not None:
        yield Mark("unknown", d.start_ns + d.ttft_ns - d.run_ns)
        yield Mark("decode.first_step", d.start_ns + d.ttft_ns, TELEMETRY)


def read(file: IO[bytes], into: Joining, notes: Notes) -> None:
    """All spans of a file. What can't be read is counted."""
    if not is_binary(_head(file)):
        for line in lines(file, notes):
            spans = list(_of_json(line, notes))
            for span in spans:
                into.add(span)
    else:
        for message in _messages(file, notes):
            for span in _of_protobuf(message, notes):
                into.add(span)


# --- JSON ---------------------------------------------------------------------------------------------


def _of_json(line: bytes, notes: Notes) -> Iterator[Span]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        notes.broken("lines that are no JSON")
        return
    if not isinstance(found, dict) or not any(field in found for field in _TRACE_FIELDS):
        notes.broken("lines without resourceSpans")
        return
    for resource in _list(found, *_TRACE_FIELDS):
        about = _json_attributes(_object(_get(resource, "resource")))
        for scope in _list(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans"):
            own = _object(_get(scope, "scope")).get("name") == "kvscope"
            for span in _list(scope, "spans"):
                if _get(span, "name") != SPAN:
                    notes.count(OWN_SPANS if own else f"spans that are no {SPAN}")
                    continue
                told = _span(
                    about,
                    _json_attributes(span),
                    _text(_get(span, "traceId", "trace_id")),
                    _text(_get(span, "spanId", "span_id")),
                    _whole(_get(span, "startTimeUnixNano", "start_time_unix_nano")),
                    _object(_get(span, "status")),
                )
                if told is None:
                    notes.broken(f"spans {SPAN} without id or start")
                else:
                    yield told


def _json_attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for attribute in _list(holder, "attributes"):
        key, value = _get(attribute, "key"), _object(_get(attribute, "value"))
        for name in ("stringValue", "intValue", "doubleValue", "boolValue"):
            if isinstance(key, str) and name in value:
                found[key] = value[name]
    return found


def _get(holder: Any, *names: str) -> Any:
    return next((holder[n] for n in names if n in holder), None) if isinstance(holder, dict) else None


def _list(holder: Any, *names: str) -> list[Any]:
    found = _get(holder, *names)
    return found if isinstance(found, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- protobuf -----------------------------------------------------------------------------------------


def _messages(file: IO[bytes], notes: Notes) -> Iterator[bytes]:
    """The messages of a file: each after its length, in 4 bytes as the collector writes them or as a varint;
    or one message alone."""
    head = _head(file)
    if head[:1] == b"\n" and not _is_delimited(head):
        whole = file.read(MAX_LINE_BYTES + 1)
        if len(whole) > MAX_LINE_BYTES:
            notes.broken("messages of more than 64 MiB")
        else:
            yield whole
        return
    fixed = head[:1] == b"\0"
    while True:
        size = _fixed(file) if fixed else _varint(file)
        if size is None:
            return
        message = file.read(min(size, MAX_LINE_BYTES + 1))
        if size > MAX_LINE_BYTES or len(message) < size:
            notes.broken("messages cut short, or after which the file can't be read on")
            return
        yield message


def is_binary(head: bytes) -> bool:
    """Whether a file that begins so is no text."""
    return any(byte < 9 or 13 < byte < 32 for byte in head[:512])


def _head(file: IO[bytes]) -> bytes:
    """What is read next, without reading it."""
    found: bytes = file.peek(512) if hasattr(file, "peek") else b""
    return found


def _is_delimited(head: bytes) -> bool:
    """Whether a file that begins with byte 10 begins with a length, rather than with field 1 of a message."""
    return len(head) > 11 and head[1] == 10 and head[2] == 8


def _fixed(file: IO[bytes]) -> int | None:
    size = file.read(4)
    return int.from_bytes(size, "big") if len(size) == 4 else None


def _varint(file: IO[bytes]) -> int | None:
    size = shift = 0
    while shift < 35 and (byte := file.read(1)):
        size |= (byte[0] & 127) << shift
        if not byte[0] & 128:
            return size
        shift += 7
    return None


def _of_protobuf(message: bytes, notes: Notes) -> Iterator[Span]:
    try:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
    except ImportError:
        raise KvscopeError(
            "protobuf traces need OpenTelemetry: pip install 'kvscope[otlp]', or let the collector write JSON"
        ) from None
    try:
        # The same bytes as an ExportTraceServiceRequest.
        found = TracesData.FromString(message)
    except DecodeError:
        notes.broken("messages that are no traces")
        return
    for resource in found.resource_spans:
        about = _proto_attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                if span.name != SPAN:
                    own = scope.scope.name == "kvscope"
                    notes.count(OWN_SPANS if own else f"spans that are no {SPAN}")
                    continue
                told = _span(
                    about,
                    _proto_attributes(span.attributes),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.start_time_unix_nano,
                    {"code": span.status.code, "message": span.status.message},
                )
                if told is None:
                    notes.broken(f"spans {SPAN} without id or start")
                else:
                    yield told


def _proto_attributes(attributes: Iterable[Any]) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        which = attribute.value.WhichOneof("value")
        if which in ("string_value", "int_value", "double_value", "bool_value"):
            found[attribute.key] = getattr(attribute.value, which)
    return found


# --- a span -------------------------------------------------------------------------------------------


def _span(
    about: Mapping[str, Any],
    attributes: Mapping[str, Any],
    trace_id: str,
    span_id: str,
    start_ns: int | None,
    status: Mapping[str, Any],
) -> Span | None:
    request = _text(attributes.get("gen_ai.request.id"))
    if start_ns is None or not 0 < start_ns < 2**62 or not (request or span_id):
        return None
    failed = status.get("code") in (_FAILED, "STATUS_CODE_ERROR")
    output_tokens = _whole(attributes.get("gen_ai.usage.completion_tokens"))
    ttft_ns = _seconds(attributes.get("gen_ai.latency.time_to_first_token"))
    return Span(
        engine=_engine_of(about),
        host=_text(about.get("host.name")),
        trace_id=trace_id.lower(),
        span_id=span_id.lower(),
        request=request,
        start_ns=start_ns,
        ttft_ns=None if output_tokens == 0 else ttft_ns,  # vLLM stamps the end of one that failed, too
        e2e_ns=_seconds(attributes.get("gen_ai.latency.e2e")),
        queue_ns=_seconds(attributes.get("gen_ai.latency.time_in_queue")),
        run_ns=_seconds(attributes.get("gen_ai.latency.time_in_model_prefill")),
        prompt_tokens=_whole(attributes.get("gen_ai.usage.prompt_tokens")),
        output_tokens=output_tokens,
        max_tokens=_whole(attributes.get("gen_ai.request.max_tokens")),
        model=_text(attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")),
        error=(_text(status.get("message")) or "error") if failed else "",
    )


def _engine_of(about: Mapping[str, Any]) -> str:
    """An engine's name: service and instance or process. vLLM does not tell NIXL engine ids."""
    service = _text(about.get("service.name")) or "vllm"
    names = ("k8s.pod.name", "service.instance.id", "vllm.process_id")
    instance = next((_text(about[name]) for name in names if about.get(name)), "")
    if _UUID.fullmatch(instance):
        instance = instance[:8]
    return f"{service}/{instance[:100]}" if instance else service


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _text(value: Any) -> str:
    return printable(value)[:512] if isinstance(value, (str, int)) else ""


def _whole(value: Any) -> int | None:
    """A count; OTLP/JSON writes 64-bit numbers as texts."""
    try:
        number = int(value) if not isinstance(value, float) or math.isfinite(value) else -1
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 2**63 else None


def _seconds(value: Any) -> int | None:
    """Nanoseconds of a duration in seconds."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    ns = round(seconds * 1e9) if math.isfinite(seconds) and abs(seconds) < 1e9 else -1
    return ns if 0 <= ns <= MAX_NS else None
