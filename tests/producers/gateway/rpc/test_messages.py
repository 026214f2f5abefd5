"""descriptors.binpb is what protoc makes of the .proto files, and fields have the numbers of the protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from penstock.producers.gateway.rpc.messages import DESCRIPTORS, POOL, message, parsed
from penstock.registry.errors import InvalidInput
from tests.servers import require_module


def test_descriptors_are_those_of_the_files(tmp_path: Path):
    """Generated anew: python -m grpc_tools.protoc -I. --descriptor_set_out=descriptors.binpb *.proto, in the folder."""
    require_module("grpc_tools")
    made = tmp_path / "made.binpb"
    files = sorted(path.name for path in DESCRIPTORS.parent.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={made}", *files]
    subprocess.run(command, cwd=DESCRIPTORS.parent, check=True)
    read = descriptor_pb2.FileDescriptorSet.FromString
    assert read(DESCRIPTORS.read_bytes()) == read(made.read_bytes())


def test_fields_are_those_of_tritons_client():
    """Every field of ours has the name, the number and the type that Triton's client has."""
    theirs = require_module("tritonclient.grpc").service_pb2.DESCRIPTOR.message_types_by_name

    def same(ours, other) -> None:
        for field in ours.fields:
            found = other.fields_by_name[field.name]
            assert (field.number, field.type) == (found.number, found.type), field.full_name
        for nested in ours.nested_types:
            same(nested, other.nested_types_by_name[nested.name])

    file = POOL.FindFileByName("inference.proto")
    for name, ours in file.message_types_by_name.items():
        same(ours, theirs[name])
    assert len(file.message_types_by_name) >= 15


def test_bytes_that_are_no_message_are_refused():
    """With the message that was expected."""
    with pytest.raises(InvalidInput, match=r"Expected one of inference\.PredictRequest"):
        parsed(message("PredictRequest"), b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("PredictRequest", {"inputs": 1, "model_version": 2}),
        ("PredictResponse", {"predictions": 1, "model_version": 2, "latency_ms": 3}),
    ],
)
def test_numbers_of_predictions(name: str, numbers: dict[str, int]):
    """CX-035: clients that were generated from the original file know these."""
    fields = message(name).DESCRIPTOR.fields_by_name
    assert {field: fields[field].number for field in numbers} == numbers
