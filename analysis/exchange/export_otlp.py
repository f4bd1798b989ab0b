"""Requests as OTLP/JSON: one `ExportTraceServiceRequest` a line, as a collector's file exporter writes them.

The spans are those of `kvscope.spans`. A turn of a session links to the one before it where both are written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import msgspec

from kvscope import __version__, spans
from kvscope.analysis.paging import Row, Source, Window, requests
from kvscope.analysis.traffic import engines, is_simulated
from kvscope.spans import Link, Span

BATCH_REQUESTS = 64
"""In a line: about 1,500 spans and 1 MB."""
REMEMBERED_SESSIONS = 100_000
_KINDS = {spans.INTERNAL: 1, spans.SERVER: 2, spans.CLIENT: 3}
_ERROR = 2


def write(
    source: Source, about: Window, file: IO[bytes], tell: Callable[[int], None]
) -> tuple[int, int, int, bool]:
    """Returns how many requests and spans were written, how many requests can't be told, and whether any is
    simulated."""
    turns = _Turns()
    simulated = is_simulated(engines(source, about.parameters()), about.label)
    written = events = untold = 0
    for page in requests(source, about):
        for start in range(0, len(page), BATCH_REQUESTS):
            batch: list[Span] = []
            for row in page[start : start + BATCH_REQUESTS]:
                made = spans.of_request(row, turns.previous(row))
                written += bool(made)
                untold += not made
                batch += made
            if batch:
                file.write(line(batch))
                events += len(batch)
        tell(written)
    return written, events, untold, simulated


class _Turns:
    """Remembers the last turn of each session, for links."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[int, Link]] = OrderedDict()

    def previous(self, row: Row) -> Link | None:
        """The root of the turn before this one, where it was told; remembers this one."""
        if not row["session"]:
            return None
        turn = row["turn"] or 1
        before = self._last.pop(row["session"], None)
        self._last[row["session"]] = (turn, spans.root_link(row))
        if len(self._last) > REMEMBERED_SESSIONS:
            self._last.popitem(last=False)
        return before[1] if before is not None and before[0] == turn - 1 else None


def line(batch: Sequence[Span]) -> bytes:
    """One line of the file, with its end."""
    by_service: dict[str, list[dict[str, Any]]] = {}
    for span in batch:
        by_service.setdefault(span.service, []).append(_span(span))
    resources = [
        {
            "resource": {"attributes": _attributes({"service.name": service}.items())},
            "scopeSpans": [{"scope": {"name": "kvscope", "version": __version__}, "spans": made}],
        }
        for service, made in by_service.items()
    ]
    return msgspec.json.encode({"resourceSpans": resources}) + b"\n"


def _span(span: Span) -> dict[str, Any]:
    made: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes.items()),
    }
    if span.parent_id:
        made["parentSpanId"] = span.parent_id
    if span.links:
        made["links"] = [
            {
                "traceId": link.trace_id,
                "spanId": link.span_id,
                "attributes": _attributes({"kvscope.link": link.what}.items()),
            }
            for link in span.links
        ]
    if span.error:
        made["status"] = {"code": _ERROR, "message": span.error}
    return made


def _attributes(items: Iterable[tuple[str, str | int]]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for key, value in items
    ]
