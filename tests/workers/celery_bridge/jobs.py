"""What the tests of the Celery bridge share: an application, jobs, and how they ended."""

from __future__ import annotations

from celery import Celery

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure, JobHeader, Options
from penstock.registry.queues import new_job_id
from penstock.registry.tensors import Tensor
from penstock.workers.observe.listener import Ended
from tests.servers import RedisServer

HOST = "cpu0@test"


def application(server: RedisServer) -> Celery:
    """A Celery application on this server."""
    app = Celery("test", broker=server.celery_url, backend=server.celery_url, set_as_current=False)
    app.conf.broker_transport_options = {"socket_timeout": 5}
    return app


def job(model: str = "mlp", *, is_task: bool = False, local_id: str = "") -> JobHeader:
    """A job of one input; `is_task`: a Celery task brought it."""
    content = (Tensor("x", "float32", (1, 384)),)
    job_id = f"{model}.{local_id}" if local_id else new_job_id(model)
    return JobHeader(job_id, "acme", model, "high", content, options=Options(lane=is_task))


def ended(header: JobHeader, state: State = State.COMPLETED, error: Failure | None = None) -> Ended:
    """The end of a job after a quarter of a second."""
    return Ended(header, state, 0.25, error, "1")
