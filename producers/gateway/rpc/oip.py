"""The Open Inference Protocol v2 over gRPC: `inference.GRPCInferenceService`. `tritonclient.grpc` works unchanged.

ModelInfer         tensors.py: a message -> one job -> its outputs
ModelStreamInfer   the same for each message; a model that streams answers with each chunk, then with an end
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Final

from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.health import HealthRoutes
from penstock.producers.gateway.oip_terms import (
    EXTENSIONS,
    SERVER_NAME,
    SERVER_VERSION,
    deadline_s_of,
    described,
    platform_of,
    priority_of,
    state_of,
    versions_of,
)
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import message
from penstock.producers.gateway.rpc.streams import Send, Streams
from penstock.producers.gateway.rpc.tensors import parameters_of, read_infer, write_infer
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.registry.errors import ResultGone, UnknownModel

__all__ = ["SERVICE", "OipService"]

SERVICE: Final = "inference.GRPCInferenceService"
_Live: Final = message("ServerLiveResponse")
_Ready: Final = message("ServerReadyResponse")
_ModelReady: Final = message("ModelReadyResponse")
_Server: Final = message("ServerMetadataResponse")
_Model: Final = message("ModelMetadataResponse")
_Index: Final = message("RepositoryIndexResponse")
_Streamed: Final = message("ModelStreamInferResponse")


class OipService:
    """The methods of the service."""

    def __init__(self, jobs: Jobs, health: HealthRoutes, calls: Calls, streams: Streams) -> None:
        self._jobs = jobs
        self._client = jobs.client
        self._health = health
        self._calls = calls
        self._streams = streams

    def handlers(self) -> dict[str, Any]:
        """The handlers of grpc.aio, by the method's name."""
        methods = {
            "ServerLive": self.show_live,
            "ServerReady": self.show_ready,
            "ModelReady": self.show_model_ready,
            "ServerMetadata": self.show_server,
            "ModelMetadata": self.show_model,
            "RepositoryIndex": self.show_index,
        }
        found = {
            name: self._calls.unary(f"/{SERVICE}/{name}", message(f"{name}Request"), method)
            for name, method in methods.items()
        }
        found["ModelInfer"] = self._calls.unary(
            f"/{SERVICE}/ModelInfer", message("ModelInferRequest"), self.infer, attrgetter("model_name")
        )
        streamed = "ModelStreamInfer"
        found[streamed] = self._streams.both_ways(
            f"/{SERVICE}/{streamed}", message("ModelInferRequest"), self.infer_streamed, self.refused
        )
        return found

    async def show_live(self, _call: Call, _request: Any) -> Any:
        """ServerLive."""
        return _Live(live=True)

    async def show_ready(self, _call: Call, _request: Any) -> Any:
        """ServerReady."""
        return _Ready(ready=not self._streams.stopping.is_set() and (await self._health.readiness()).ready)

    async def show_model_ready(self, _call: Call, request: Any) -> Any:
        """ModelReady. A model that is unknown is not ready."""
        try:
            model = await self._client.model(request.name, request.version or None)
        except UnknownModel:
            return _ModelReady(ready=False)
        return _ModelReady(ready=model.is_loaded)

    async def show_server(self, _call: Call, _request: Any) -> Any:
        """ServerMetadata."""
        return _Server(name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    async def show_model(self, _call: Call, request: Any) -> Any:
        """ModelMetadata."""
        model = await self._client.model(request.name, request.version or None)
        answer = _Model(name=model.spec.name, versions=versions_of(model), platform=platform_of(model))
        for listed, tensors in ((answer.inputs, model.spec.inputs), (answer.outputs, model.spec.outputs)):
            for tensor in tensors:
                datatype, shape = described(tensor)
                listed.add(name=tensor.name, datatype=datatype, shape=shape)
        return answer

    async def show_index(self, _call: Call, request: Any) -> Any:
        """RepositoryIndex."""
        answer = _Index()
        for model in await self._client.models():
            if model.is_loaded or not request.ready:
                answer.models.add(name=model.spec.name, version=model.spec.version, state=state_of(model))
        return answer

    async def infer(self, call: Call, request: Any) -> Any:
        """ModelInfer."""
        finished = await self._jobs.run(_job(call, request, call.idempotency_key()), call)
        return write_infer(request, finished.info.version, finished.outputs)

    async def infer_streamed(self, call: Call, request: Any, send: Send) -> None:
        """One request of ModelStreamInfer."""
        spec = await self._client.spec_of(request.model_name, request.model_version or None)
        if spec.streams:
            await self._stream_chunks(spec.version, call, request, send)
        else:
            await send(_Streamed(infer_response=await self.infer(call, request)))

    def refused(self, request: Any, error: Exception) -> Any:
        """The answer to a request of ModelStreamInfer that failed. The requests behind it go on."""
        status = self._calls.status_of(f"/{SERVICE}/ModelStreamInfer", error)
        failed = _Streamed(error_message=status.details)
        failed.infer_response.id = "" if request is None else request.id
        return failed

    async def _stream_chunks(self, version: str, call: Call, request: Any, send: Send) -> None:
        """The chunks of a job as they come, and its outputs. Triton's clients know the last one by a parameter."""
        async with aclosing(self._jobs.stream(_job(call, request, None), call)) as events:
            has_sent = False
            async for event in events:
                if event.type == "reset" and event.data == "trimmed":
                    raise ResultGone(
                        "The broker keeps chunks that were not taken in time no longer. Expected a faster reader, or "
                        "ModelInfer"
                    )
                if event.type == "reset" and has_sent:
                    raise RequestRefused(503, "The job began anew, so its chunks are void. Expected a new request")
                if isinstance(event.data, Mapping):
                    answer = write_infer(request, version, event.data)
                    answer.parameters["triton_final_response"].bool_param = event.type == "completed"
                    await send(_Streamed(infer_response=answer))
                    has_sent = True
                elif isinstance(event.data, Exception):
                    raise event.data


def _job(call: Call, request: Any, key: str | None) -> JobRequest:
    parameters = parameters_of(request)
    return JobRequest(
        request.model_name,
        read_infer(request),
        version=request.model_version or None,
        outputs=tuple(output.name for output in request.outputs),
        priority=priority_of(parameters),
        deadline_s=call.deadline_s(deadline_s_of(parameters)),
        idempotency_key=key,
        traceparent=call.traceparent,
    )
