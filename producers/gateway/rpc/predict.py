"""Plain numbers over gRPC: `inference.InferenceService`.

Predict         one row -> one job -> the row of the model's first output
PredictStream   the same for each message, in their order; an error ends the stream with its status
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Any, Final

from penstock.producers.gateway.flat_rows import flat_rows, named_model, only_input
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import message
from penstock.producers.gateway.rpc.streams import Send, Streams
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import STRING

__all__ = ["SERVICE", "PredictService"]

SERVICE: Final = "inference.InferenceService"
_Request: Final = message("PredictRequest")
_Response: Final = message("PredictResponse")


class PredictService:
    """The methods of the service."""

    def __init__(self, jobs: Jobs, calls: Calls, streams: Streams) -> None:
        self._jobs = jobs
        self._client = jobs.client
        self._calls = calls
        self._streams = streams

    def handlers(self) -> dict[str, Any]:
        """The handlers of grpc.aio, by the method's name."""
        return {
            "Predict": self._calls.unary(f"/{SERVICE}/Predict", _Request, self.predict, attrgetter("model")),
            "PredictStream": self._streams.both_ways(f"/{SERVICE}/PredictStream", _Request, self.predict_streamed),
        }

    async def predict(self, call: Call, request: Any) -> Any:
        """Predict."""
        now = asyncio.get_running_loop().time
        begun, version = now(), request.model_version or None
        spec = await self._client.spec_of(await named_model(self._client, request.model, "model"), version)
        rows = flat_rows([list(request.inputs)])
        name, output = only_input(spec, rows), spec.outputs[0]
        if output.dtype == STRING:
            raise InvalidInput(f"{spec.name} answers with text. Expected ModelInfer of the Open Inference Protocol")
        job = JobRequest(
            spec.name,
            {name: rows},
            version=version,
            outputs=(output.name,),
            deadline_s=call.deadline_s(None),
            idempotency_key=call.idempotency_key(),
            traceparent=call.traceparent,
        )
        finished = await self._jobs.run(job, call)
        return _Response(
            predictions=finished.outputs[output.name].ravel().tolist(),
            model_version=finished.info.version,
            latency_ms=(now() - begun) * 1000,
        )

    async def predict_streamed(self, call: Call, request: Any, send: Send) -> None:
        """One request of PredictStream."""
        await send(await self.predict(call, request))
