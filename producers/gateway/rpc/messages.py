"""The message classes of inference.proto and predict.proto, made of their compiled descriptors.

    *.proto -> protoc --descriptor_set_out -> descriptors.binpb -> POOL -> message classes

The pool is our own: `tritonclient` registers other messages under the same names in protobuf's default pool, and one
process may import both. The descriptors fit every version of protobuf, which generated Python modules do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.registry.errors import InvalidInput

__all__ = ["DESCRIPTORS", "POOL", "message", "parsed"]

DESCRIPTORS: Final = Path(__file__).with_name("descriptors.binpb")
POOL: Final = descriptor_pool.DescriptorPool()
"""All services of the port, for reflection."""
for _file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
    POOL.Add(_file)
for _module in (health_pb2, reflection_pb2):
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)


def message(name: str) -> Any:
    """The class of a message of the package `inference`."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def parsed(kind: Any, data: bytes) -> Any:
    """A message of this class. Raises InvalidInput."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidInput(f"The bytes are no message. Expected one of {kind.DESCRIPTOR.full_name}") from None
