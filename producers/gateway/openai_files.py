"""OpenAI's files: what a batch reads and writes. The `openai` client works unchanged.

POST   /v1/files                 multipart: purpose=batch, file, expires_after[seconds]; streamed to the disk
GET    /v1/files[/{id}[/content]]
DELETE /v1/files/{id}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.producers.gateway.batches.block_file import BLOCK_BYTES
from penstock.producers.gateway.batches.file_store import FileStore, Upload
from penstock.producers.gateway.batches.records import File
from penstock.producers.gateway.callers import entered
from penstock.producers.gateway.exchange import Exchange, RequestRefused
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.multipart import boundary_of, read_form
from penstock.producers.gateway.openai import OPENAI_ERROR
from penstock.producers.gateway.request_headers import refuse_key
from penstock.producers.gateway.routing import Route
from penstock.registry.errors import InvalidInput

__all__ = ["FileRoutes", "kept", "page_of", "stored_page"]

_CONTENT: Final = b"application/octet-stream"
_LEAST_KEEP_S: Final = 3600
_MOST_FORM: Final = 64 * 1024
"""Bytes of a form beside its file."""
_MOST_NAME: Final = 255
_MOST_LISTED: Final = 10_000

_FORM: Final = {
    "type": "object",
    "title": "Upload",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary", "description": "The lines of a batch"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": _LEAST_KEEP_S,
            "description": "The lifetime of the file; with the anchor beside it",
        },
    },
}


class FileList(msgspec.Struct):
    """Files, in the order that was asked for."""

    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedFile(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    deleted: bool = True
    object: str = "file"


class FileRoutes:
    """The routes of files. store: None where the privacy mode keeps no inputs. max_bytes: of one file."""

    def __init__(self, store: FileStore | None, client: GatewayClient, max_bytes: int) -> None:
        self._store = store
        self._client = client
        self._max_bytes = max_bytes

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        listed = {
            "purpose": "batch or batch_output; not given: all",
            "after": "the id behind which the list begins",
            "limit": f"at most {_MOST_LISTED}",
            "order": "asc or desc, by the time of the upload; not given: desc",
        }
        return [
            _route("POST", "/v1/files", self.upload, "OpenAI: upload a file for a batch", gives=File, form=_FORM),
            _route("GET", "/v1/files", self.show_files, "OpenAI: the files", gives=FileList, parameters=listed),
            _route("GET", "/v1/files/{id}", self.show, "OpenAI: one file", gives=File),
            _route(
                "GET",
                "/v1/files/{id}/content",
                self.show_content,
                "OpenAI: the content of a file",
                also_gives=(_CONTENT,),
            ),
            _route("DELETE", "/v1/files/{id}", self.delete, "OpenAI: delete a file", gives=DeletedFile),
        ]

    async def upload(self, exchange: Exchange) -> None:
        """POST /v1/files."""
        refuse_key(exchange, "each upload is a file of its own")
        store, tenant = kept(self._store), entered().tenant
        boundary = boundary_of(exchange.header(b"content-type"))
        upload = await asyncio.to_thread(store.upload)
        try:
            sink = _Blocks(upload, self._max_bytes)
            texts, filename = await read_form(exchange.parts(self._max_bytes + _MOST_FORM), boundary, sink.add)
            keep_s = _keep_s(texts)
            if texts.get("purpose") != "batch":
                raise InvalidInput("Bad purpose. Expected batch")
            sink.flush()
            if not upload.nbytes:
                raise InvalidInput("The file is empty. Expected at least one line")
            file = await asyncio.to_thread(store.keep, upload, tenant, filename[:_MOST_NAME], "batch", keep_s)
        except BaseException:
            upload.discard()
            raise
        await exchange.answer(200, msgspec.json.encode(file))

    async def show_files(self, exchange: Exchange) -> None:
        """GET /v1/files."""
        store, tenant = kept(self._store), entered().tenant
        after, limit, query = page_of(exchange, _MOST_LISTED, _MOST_LISTED)
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidInput("Bad order. Expected asc or desc")
        newest = order == "desc"
        found = await asyncio.to_thread(store.files, tenant, query.get("purpose"), after, limit + 1, newest=newest)
        await exchange.answer(200, msgspec.json.encode(stored_page(FileList, found, limit)))

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/files/{id}."""
        file = await self._file(exchange)
        await exchange.answer(200, msgspec.json.encode(file))

    async def show_content(self, exchange: Exchange) -> None:
        """GET /v1/files/{id}/content."""
        file = await self._file(exchange)
        blocks = kept(self._store).content(file)
        block = await asyncio.to_thread(next, blocks, b"")
        await exchange.begin_stream(_CONTENT, ((b"content-length", b"%d" % file.bytes),))
        while block:
            await exchange.write(block)
            block = await asyncio.to_thread(next, blocks, b"")
        await exchange.end_stream()

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/files/{id}."""
        store, file_id = kept(self._store), exchange.words["id"]
        if not await asyncio.to_thread(store.delete, entered().tenant, file_id):
            raise RequestRefused(409, "A batch reads this file. Expected that it ends, or is cancelled, first")
        await exchange.answer(200, msgspec.json.encode(DeletedFile(file_id)))

    async def _file(self, exchange: Exchange) -> File:
        store, tenant = kept(self._store), entered().tenant
        return await asyncio.to_thread(store.file, tenant, exchange.words["id"])


class _Blocks:
    """Parts of a content -> blocks of an upload."""

    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self._upload = upload
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """Takes a part. Raises RequestRefused for a file that is too long."""
        self._parts.append(part)
        self._size += len(part)
        if self._upload.nbytes + self._size > self._max_bytes:
            raise RequestRefused(
                413, f"The file is too long. Expected at most {self._max_bytes} bytes", ((b"connection", b"close"),)
            )
        if self._size >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was taken."""
        if self._parts:
            self._upload.append(b"".join(self._parts))
        self._parts, self._size = [], 0


def page_of(exchange: Exchange, default: int, most: int) -> tuple[str | None, int, dict[str, str]]:
    """(after, limit, query) of a list. Raises InvalidInput."""
    query = exchange.query()
    text = query.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidInput(f"Bad limit. Expected 1 to {most}")
    return query.get("after") or None, int(text), query


def stored_page(kind: Callable[..., Any], found: list[Any], limit: int) -> Any:
    """A page of a list, from one object more than its limit."""
    data = found[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return kind(data, first, last, len(found) > limit)


def _route(method: Any, path: str, handler: Any, summary: str, **further: Any) -> Route:
    return Route(method, path, handler, summary, error=OPENAI_ERROR, **further)


def kept(store: FileStore | None) -> FileStore:
    """The store. Raises RequestRefused where there is none."""
    if store is None:
        raise RequestRefused(
            403, "No files are kept in the privacy mode hashes_only. Expected a request for each input, without a file"
        )
    return store


def _keep_s(texts: dict[str, str]) -> float | None:
    """The lifetime that the client asks for."""
    text = texts.get("expires_after[seconds]")
    if text is None:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if texts.get("expires_after[anchor]") != "created_at" or not is_number or int(text) < _LEAST_KEEP_S:
        raise InvalidInput(f"Bad expires_after. Expected the anchor created_at, and seconds from {_LEAST_KEEP_S} on")
    return int(text)
