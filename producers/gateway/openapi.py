"""The routes -> one OpenAPI document, and a page of it that needs no network.

Route (method, path, msgspec types) -> /openapi.json -> generators of clients
                                   `-> /docs: plain HTML, without a script
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from typing import Any, Final

import msgspec

from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.routing import Route

__all__ = ["DocumentRoutes", "document"]

_HTML: Final = b"text/html; charset=utf-8"
_CREDENTIALS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "query": {"type": "apiKey", "in": "query", "name": "api_key"},
}
"""The ways to send an API key. Without keys, none is needed."""
_REFERENCE: Final = "#/components/schemas/{name}"
_ABOUT: Final = "Inference jobs over HTTP. The WebSocket /predict/stream, which OpenAPI cannot describe, is beside them"
_BYTES: Final = {"type": "string", "format": "binary"}
_TEXT: Final = "text/"
_NO_CONTENT: Final = 204
_STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,pre{font:13px monospace;background:#8882}pre{padding:.6em;overflow:auto}summary{cursor:pointer;padding:.3em}"
)


class DocumentRoutes:
    """The two routes that describe the others, and themselves."""

    def __init__(self, others: Sequence[Route]) -> None:
        self.routes = [
            Route(
                "GET", "/openapi.json", self.show_document, "This description, as an OpenAPI document", needs="nothing"
            ),
            Route(
                "GET",
                "/docs",
                self.show_page,
                "This description, as a page",
                needs="nothing",
                also_gives=(b"text/html",),
            ),
        ]
        described = document([*others, *self.routes])
        self._described = described
        self._document = msgspec.json.encode(described)
        self._page = _page(described).encode()

    async def show_document(self, exchange: Exchange) -> None:
        """GET /openapi.json."""
        found = self._document
        if mount_path := exchange.mount_path:
            # Without servers, the paths of a document begin at the root of its host.
            found = msgspec.json.encode({**self._described, "servers": [{"url": mount_path}]})
        await exchange.answer(200, found)

    async def show_page(self, exchange: Exchange) -> None:
        """GET /docs."""
        policy = (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")
        await exchange.answer(200, self._page, _HTML, (policy,))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of routes, as plain data."""
    types = [kind for route in routes for kind in (route.takes, route.gives, route.error.view) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    info = {"title": "Penstock", "version": version("penstock"), "description": _ABOUT}
    return {
        "openapi": "3.1.0",
        "info": info,
        "security": [{}, *({name: []} for name in _CREDENTIALS)],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _CREDENTIALS},
    }


def _operation(route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _identifier(route),
        "parameters": [*map(_word, route.words), *(_parameter(*each) for each in (route.parameters or {}).items())],
        "responses": {
            **{str(status): _answer(route, status, schemas) for status in (route.status, *route.other_statuses)},
            "default": _refusal(route, schemas),
        },
    }
    if route.takes is not None:
        content = _content(schemas[route.takes], route.also_takes)
        operation["requestBody"] = {"required": True, "content": content}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": route.form}}}
    return operation


def _answer(route: Route, status: int, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if status == _NO_CONTENT:
        return {"description": "There is no answer any more"}
    if route.gives is None and route.also_gives:
        return {"description": "The answer", "content": _content(None, route.also_gives)}
    return {"description": "The answer", "content": _content(schemas.get(route.gives, {}), route.also_gives)}


def _refusal(route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The errors of a route, in the shape that the clients of its protocol know."""
    content = {route.error.media_type.decode(): {"schema": schemas[route.error.view]}}
    return {"description": "Refused: its reason, and what was expected", "content": content}


def _content(schema: dict[str, Any] | None, others: Sequence[bytes]) -> dict[str, Any]:
    """The content types of a body. schema: of JSON; None: JSON is none of them.

    MessagePack is described as bytes: generated clients take a second use of the type of JSON for JSON.
    """
    found: dict[str, Any] = {} if schema is None else {"application/json": {"schema": schema}}
    for kind in map(bytes.decode, others):
        found[kind] = {"schema": {"type": "string"} if kind.startswith(_TEXT) else _BYTES}
    return found


def _identifier(route: Route) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in route.path).split()
    return "_".join((route.method.lower(), *words))


def _word(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameter(name: str, description: str) -> dict[str, Any]:
    place = "header" if name[0].isupper() else "query"
    return {"name": name, "in": place, "description": description, "schema": {"type": "string"}}


def _page(described: dict[str, Any]) -> str:
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Penstock</title><style>{_STYLE}</style>",
        "<h1>Penstock</h1><p><a href=openapi.json>OpenAPI document</a></p>",
    ]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            shown = {name: operation[name] for name in ("parameters", "requestBody", "responses") if name in operation}
            parts.append(
                f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
                f"</summary><pre>{_pretty(shown)}</pre></details>"
            )
    parts.append("<h2>Types</h2>")
    for name, schema in described["components"]["schemas"].items():
        parts.append(f"<details><summary><code>{escape(name)}</code></summary><pre>{_pretty(schema)}</pre></details>")
    return "".join(parts)


def _pretty(value: Any) -> str:
    return escape(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
