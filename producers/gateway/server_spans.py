"""A span for each request that needs an API key, and for each gRPC call. The jobs that it submits are its children.

    the caller's `traceparent`  ->  POST /v1/jobs  ->  process <model>, see workers/job_spans.py

The names of the attributes are those of OpenTelemetry's conventions for HTTP and RPC.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from penstock.producers.gateway.exchange import Exchange
from penstock.registry.open_telemetry.contexts import is_context, parent_of, traceparent_of

__all__ = ["ServerSpans"]

_HEADER: Final = b"traceparent"
_FIRST_SERVER_ERROR: Final = 500


class ServerSpans:
    """The spans of one process."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer: Final = tracer

    def begin_request(self, exchange: Exchange, route: str) -> Span:
        """The span of an HTTP request. From now on its header `traceparent` names this span, if it is recorded.

        route: the path with names in braces. A header that is no trace context stays: the job is refused, whether the
        span is recorded or not.
        """
        method = exchange.method
        attributes = {"http.request.method": method, "http.route": route, "url.path": exchange.path}
        given = exchange.header(_HEADER)
        span = self._begin(f"{method} {route}", attributes, given)
        if own := _own(span, given):
            exchange.headers[_HEADER] = own.encode()
        return span

    def end_request(self, span: Span, status: int, error_type: str = "") -> None:
        """The request has ended, with this status; 499: its client had gone. error_type: of what ended the answer
        behind its head."""
        span.set_attribute("http.response.status_code", status)
        _end(span, error_type or (str(status) if status >= _FIRST_SERVER_ERROR else ""))

    def begin_call(self, name: str, traceparent: str) -> tuple[Span, str]:
        """The span of a gRPC call, and the trace context for its jobs. name: /service/method."""
        service, _, method = name.removeprefix("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        span = self._begin(f"{service}/{method}", attributes, traceparent)
        return span, _own(span, traceparent) or traceparent

    def end_call(self, span: Span, code: int, *, is_error: bool) -> None:
        """The call has ended, with this status code. is_error: whether it is one of the server's."""
        span.set_attribute("rpc.grpc.status_code", code)
        _end(span, str(code) if is_error else "")

    def _begin(self, name: str, attributes: dict[str, str], traceparent: str) -> Span:
        return self._tracer.start_span(name, parent_of(traceparent), kind=SpanKind.SERVER, attributes=attributes)


def _own(span: Span, given: str) -> str:
    """The trace context of a span that is recorded; empty for another one, and where the caller gave none that is."""
    if not span.is_recording() or (given and not is_context(given)):
        return ""
    return traceparent_of(span.get_span_context())


def _end(span: Span, error: str) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end()
