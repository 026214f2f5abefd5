"""A Celery application on the broker of its settings, whose messages fail in time while the broker does not answer."""

from __future__ import annotations

from typing import Any

from celery import Celery

__all__ = ["WorkerApplication"]


class WorkerApplication(Celery):  # type: ignore[misc]  # Celery is untyped
    """Limits the wait for a broker that takes connections and does not answer: kombu would wait for ever.

    Another worker takes over what the thread of results holds for too long, and both would send the same followers when
    the broker answers again.

    Celery prefers CELERY_BROKER_URL, which may be that of another program in the same environment, to the settings of
    an application. This one does not.

    Attributes:
        publish_timeout_s: kombu waits so long twice before it gives a message up.
    """

    publish_timeout_s = 4.0

    def connection(self, url: str | None = None, **options: Any) -> Any:
        """See Celery.connection."""
        return super().connection(url or self.conf.get("broker_url"), **options)

    def connection_for_read(self, url: str | None = None, **options: Any) -> Any:
        """See Celery.connection_for_read."""
        return super().connection_for_read(url or self.conf.get("broker_url"), **options)

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        """See Celery.connection_for_write."""
        limits = {"socket_timeout": self.publish_timeout_s, "socket_connect_timeout": self.publish_timeout_s}
        options["transport_options"] = {**limits, **(options.get("transport_options") or {})}
        return super().connection_for_write(url or self.conf.get("broker_url"), **options)
