"""The health service follows readiness, and reflection describes every service of the port."""

from __future__ import annotations

import threading

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.producers.gateway.rpc.health import MOST_WATCHES
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import PATIENCE_S, PREDICT, TWICE, Caller, predict_request
from tests.servers import wait_until

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVICES = ("inference.GRPCInferenceService", "inference.InferenceService")


def check(rpc: Caller, service: str) -> str:
    """The status of a service."""
    request = health_pb2.HealthCheckRequest(service=service)
    data = rpc.channel.unary_unary(CHECK)(request.SerializeToString(), timeout=PATIENCE_S)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(
        health_pb2.HealthCheckResponse.FromString(data).status
    )
    return name


def test_the_server_and_its_services_are_checked(rpc: Caller):
    """SERVING while a worker claims jobs; a service that is not there is NOT_FOUND."""
    assert {check(rpc, service) for service in ("", *SERVICES)} == {"SERVING"}
    with pytest.raises(grpc.RpcError) as refused:
        check(rpc, "nothing")
    assert refused.value.code().name == "NOT_FOUND"
    assert "Expected one of: inference.GRPCInferenceService" in refused.value.details()


def test_watch_tells_that_the_server_stops(start_gateway: StartGateway, open_caller):
    """SERVING first; when the gateway stops, NOT_SERVING, and the end of the stream before the end of its grace."""
    gateway = start_gateway()
    statuses: list[int] = []
    first = threading.Event()
    data = health_pb2.HealthCheckRequest().SerializeToString()
    watching = open_caller(gateway.rpc).channel.unary_stream(WATCH)(data, timeout=PATIENCE_S, wait_for_ready=True)

    def watch() -> None:
        for each in watching:
            statuses.append(health_pb2.HealthCheckResponse.FromString(each).status)
            first.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert first.wait(180)
    gateway.terminate()
    thread.join(60)
    assert statuses == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    assert watching.code().name == "OK"
    assert gateway.wait(180) == 0


def test_watches_are_bounded_apart_from_calls(start_gateway: StartGateway, open_caller):
    """Clients without a key may watch, only so many at a time, and calls are answered meanwhile."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_WAITING="512")
    rpc = open_caller(gateway.rpc)
    watch = rpc.channel.unary_stream(WATCH)
    watching = [watch(b"", timeout=PATIENCE_S, wait_for_ready=True) for _ in range(MOST_WATCHES)]
    for each in watching:
        next(each)
    with pytest.raises(grpc.RpcError) as refused:
        next(watch(b"", timeout=PATIENCE_S))
    assert refused.value.code().name == "RESOURCE_EXHAUSTED"
    assert rpc.call(PREDICT, predict_request())[0].predictions == TWICE
    watching.pop().cancel()

    def begins() -> bool:
        try:
            next(watch(b"", timeout=PATIENCE_S))
        except grpc.RpcError:
            return False
        return True

    wait_until(begins, 60, "a place is free")
    for each in watching:
        each.cancel()


def test_an_unknown_service_is_watched_as_unknown(rpc: Caller):
    """As the protocol wants it: the stream stays, the status says so."""
    data = health_pb2.HealthCheckRequest(service="nothing").SerializeToString()
    watching = rpc.channel.unary_stream(WATCH)(data, timeout=PATIENCE_S)
    status = health_pb2.HealthCheckResponse.FromString(next(watching)).status
    watching.cancel()
    assert status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_reflection_describes_all_services(stack: GatewayStack, rpc: Caller):
    """Tools without our .proto files list the services, and get the files of each."""
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in SERVICES),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    call = rpc.channel.stream_stream(REFLECT)((each.SerializeToString() for each in asked), timeout=PATIENCE_S)
    listed, *files = [reflection_pb2.ServerReflectionResponse.FromString(each) for each in call]
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {*SERVICES, "grpc.health.v1.Health"}
    methods = {}
    for found in files:
        (data,) = found.file_descriptor_response.file_descriptor_proto
        for service in descriptor_pb2.FileDescriptorProto.FromString(data).service:
            methods[service.name] = {method.name for method in service.method}
    assert methods["InferenceService"] == {"Predict", "PredictStream"}
    assert {"ModelInfer", "ModelStreamInfer"} <= methods["GRPCInferenceService"]
    assert methods["Health"] >= {"Check", "Watch"}
