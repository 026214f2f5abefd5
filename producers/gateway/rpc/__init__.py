"""The gRPC side of the gateway: the same jobs as over HTTP, on a port of its own in the same process.

    bytes -> server (grpc.aio) -> calls.py -> one method -> calls.py: answer, trailing metadata, status
                                                 |
                  oip.py  predict.py  health.py  |-> tensors.py: messages <-> arrays
                                                 `-> ../waiting.py: submit, wait, cancel

inference.proto and predict.proto are the services. descriptors.binpb is made of them: see messages.py.
"""

from __future__ import annotations

__all__: list[str] = []
