"""Sends spans with the OpenTelemetry SDK's exporter. Loaded only where traces are exported."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvscope import __version__
from kvscope.collectors.otlp import NotTaken
from kvscope.text import printable

if TYPE_CHECKING:
    from kvscope.spans import Span

MAX_RESOURCES = 1000
_RETRY = (408, 429)
"""Answers below 500 after which trying again may help."""
_SCOPE = InstrumentationScope("kvscope", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SdkSender:
    """Sends to the receiver at `url`, protobuf over HTTP."""

    def __init__(self, url: str) -> None:
        # It would tell of every failure and every retry; the daemon tells once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._session = _Session()
        self._exporter = OTLPSpanExporter(url, session=self._session)
        self._resources: dict[str, Resource] = {}
        self._closed = False

    def send(self, batch: Sequence[Span]) -> None:
        """Raises:
        NotTaken: the receiver did not take them, within the SDK's own retries and time-out.
        """
        session = self._session
        session.status, session.reason = 0, "they can't be encoded"
        try:
            result = self._exporter.export([self._readable(span) for span in batch])
        except Exception as error:  # as older versions of the SDK do where no connection is made
            raise NotTaken(_why(error), again=True) from None
        if result is not SpanExportResult.SUCCESS:
            raise NotTaken(session.reason, again=not 400 <= session.status < 500 or session.status in _RETRY)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self._resource(span.service),
            attributes=span.attributes,
            links=[
                Link(_context(one.trace_id, one.span_id), {"kvscope.link": one.what}) for one in span.links
            ],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )

    def _resource(self, service: str) -> Resource:
        if service not in self._resources:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            self._resources[service] = Resource({"service.name": service})
        return self._resources[service]


class _Session(requests.Session):
    """Remembers how the last call ended; the SDK's exporter only says whether it did well."""

    status = 0
    reason = ""

    def request(self, *arguments: Any, **more: Any) -> requests.Response:
        self.status = 0
        try:
            answer = super().request(*arguments, **more)
        except requests.RequestException as error:
            self.reason = _why(error)
            raise
        self.status = answer.status_code
        self.reason = f"HTTP {answer.status_code} {printable(answer.reason)[:80]}"
        return answer


def _why(error: BaseException) -> str:
    """The innermost reason, without the address, which is known."""
    reason = type(error).__name__
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            reason = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return printable(reason)[:200]


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), False, _SAMPLED)
