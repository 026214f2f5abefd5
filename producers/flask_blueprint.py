"""The same jobs in an application of Flask: a blueprint on the blocking client.

POST   /models/{name}:predict   {"inputs": {name: nested lists, or {dtype, shape, data | base64}}} -> outputs
POST   /jobs                    {"model", "inputs", ...} -> 202 with the id
GET    /jobs/{id}               the job as it is now
DELETE /jobs/{id}               cancels it

Fields, outputs, errors and `Idempotency-Key` are those of the HTTP gateway, in JSON.
"""

from __future__ import annotations

from typing import Any, Final

import flask
import msgspec

from penstock.producers.client import Client, JobHandle
from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.jobs import JobFields
from penstock.producers.gateway.predict import PredictFields
from penstock.producers.gateway.problems import as_problem_json, problem_of
from penstock.producers.gateway.request_headers import checked_key
from penstock.producers.gateway.tensors import decoded, plain_inputs, write_outputs
from penstock.producers.gateway.waiting import check_late
from penstock.registry.envelope import Retry
from penstock.registry.errors import InvalidInput, PenstockError, UnknownJob
from penstock.registry.tensors import Array

__all__ = ["blueprint"]

_JSON: Final = "application/json"
_PENDING: Final = ("queued", "running")


def blueprint(client: Client, *, name: str = "penstock", wait_s: float = 30.0) -> flask.Blueprint:
    """The routes of a client, for `app.register_blueprint`. wait_s: how long a prediction waits for its job.

    A server that forks its processes may share the client: it connects anew in each.
    """
    routes, calls = flask.Blueprint(name, __name__), _Calls(client, wait_s)
    routes.post("/models/<model>:predict")(calls.predict)
    routes.post("/jobs")(calls.submit)
    routes.get("/jobs/<job_id>")(calls.show)
    routes.delete("/jobs/<job_id>")(calls.cancel)
    for kind in (PenstockError, RequestRefused):
        routes.errorhandler(kind)(_refuse)
    return routes


class _Calls:
    """What the routes do with a client."""

    def __init__(self, client: Client, wait_s: float) -> None:
        self._client = client
        self._wait_s = wait_s

    def predict(self, model: str) -> flask.Response:
        """POST /models/{name}:predict."""
        key = _key()
        fields = decoded(_body(), PredictFields)
        timeout_ms = fields.timeout_ms
        if timeout_ms is not None and not timeout_ms > 0:
            raise InvalidInput(f"timeout_ms is {timeout_ms:g}. Expected a positive number of milliseconds")
        job = self._client.submit(
            model,
            plain_inputs(fields.inputs),
            version=fields.version,
            outputs=fields.outputs,
            priority=fields.priority,
            deadline_s=None if timeout_ms is None else timeout_ms / 1000,
            idempotency_key=key,
        )
        try:
            outputs = job.result(self._wait_s + (timeout_ms or 0) / 1000)
        except TimeoutError as error:
            # Nobody else knows its id. With a key, another request may wait for the same job.
            if key is None:
                job.cancel()
                check_late(error)
            raise
        return _answer_outputs(outputs, {"model": model, "version": job.info().version, "job_id": job.id})

    def submit(self) -> flask.Response:
        """POST /jobs."""
        key = _key()
        fields = decoded(_body(), JobFields)
        retry = fields.retry
        job = self._client.submit(
            fields.model,
            plain_inputs(fields.inputs),
            version=fields.version,
            outputs=fields.outputs,
            priority=fields.priority,
            deadline_s=fields.deadline_s,
            idempotency_key=key,
            retry=None if retry is None else Retry(retry.attempts, retry.backoff_s, retry.longest_s),
            webhook=fields.webhook,
            sticky_key=fields.sticky_key,
            endpoint=fields.endpoint,
        )
        return _answer({"id": job.id, "model": fields.model, "status": "queued"}, 202)

    def show(self, job_id: str) -> flask.Response:
        """GET /jobs/{id}."""
        job = self._job(job_id)
        facts: dict[str, Any] = {"id": job.id, "model": job.model, "status": job.status()}
        if facts["status"] in _PENDING:
            return _answer(facts)
        try:
            return _answer_outputs(job.result(0), facts)
        except PenstockError as error:
            problem = problem_of(error)
            facts["error"] = {"code": problem.code, "title": problem.title, "detail": problem.detail}
            return _answer(facts)

    def cancel(self, job_id: str) -> flask.Response:
        """DELETE /jobs/{id}."""
        job = self._job(job_id)
        return _answer({"id": job.id, "status": job.cancel()})

    def _job(self, job_id: str) -> JobHandle:
        """The handle of a job. Raises UnknownJob for an id that no job can have, as the gateway does."""
        try:
            return self._client.job(job_id)
        except InvalidInput as error:
            raise UnknownJob(str(error)) from None


def _key() -> str | None:
    """The key of `Idempotency-Key`; None without one. Raises RequestRefused."""
    text = flask.request.headers.get("Idempotency-Key")
    return None if text is None else checked_key(text)


def _body() -> bytes:
    """A body in JSON; no type at all is taken for it. Raises RequestRefused for another type."""
    if flask.request.mimetype not in ("", _JSON):
        raise RequestRefused(415, "An unknown content type. Expected `Content-Type: application/json`")
    return flask.request.get_data()


def _answer(facts: dict[str, Any], status: int = 200) -> flask.Response:
    return flask.Response(msgspec.json.encode(facts), status, content_type=_JSON)


def _answer_outputs(outputs: dict[str, Array], facts: dict[str, Any]) -> flask.Response:
    body, kind, _ = write_outputs(outputs, "json", facts, _JSON.encode())
    return flask.Response(body, content_type=kind.decode())


def _refuse(error: Exception) -> flask.Response:
    problem = problem_of(error)
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return flask.Response(as_problem_json(problem), problem.status, headers, content_type="application/problem+json")
