"""Celery's settings for `celery -A penstock.workers.app`: values only, derived from registry/settings.py.

A worker is one process without a pool: CUDA does not survive a fork, and the drain has threads of its own.
"""

from penstock.registry.celery_url import celery_url
from penstock.registry.queues import CELERY_QUEUE, CELERY_TASK
from penstock.registry.settings import Settings
from penstock.registry.stack_file import with_broker

_settings = with_broker(Settings.load())

broker_url = celery_url(_settings.celery_url or "")
# Other brokers than Redis store no results; then Penstock's Redis stores them.
result_backend = celery_url(
    _settings.celery_result_url or (broker_url if broker_url.startswith("redis") else _settings.redis_url or "")
)
result_expires = _settings.inference.queue.result_ttl_s

worker_pool = "solo"
worker_concurrency = 1
worker_prefetch_multiplier = 1
worker_consumer = "penstock.workers.celery_bridge.consumer:ResilientConsumer"
worker_send_task_events = _settings.inference.celery.events
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False

# The worker consumes this queue only. Callbacks, chain steps and chord bodies go to the queues of their own workers.
task_queues = {CELERY_QUEUE: {"exchange": CELERY_QUEUE, "routing_key": CELERY_QUEUE}}
task_default_queue = _settings.inference.celery.default_queue
task_routes = {CELERY_TASK: {"queue": CELERY_QUEUE}}
task_acks_late = True
task_reject_on_worker_lost = True
task_serializer = "json"
result_serializer = "json"
event_serializer = "json"
accept_content = ["json"]
result_accept_content = ["json"]

broker_connection_retry = True
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
broker_channel_error_retry = True
broker_transport_options = {
    "visibility_timeout": 60,
    # kombu looks for such messages at each of its turns of 10 s; its default is every tenth turn.
    "unacked_restore_throttle": 1,
    # kombu redelivers every message in these tables that is older than the visibility time-out, also one that a worker
    # of another program still handles. With tables of its own, Penstock leaves those messages alone.
    "unacked_key": f"{CELERY_QUEUE}:unacked",
    "unacked_index_key": f"{CELERY_QUEUE}:unacked_index",
    "unacked_mutex_key": f"{CELERY_QUEUE}:unacked_mutex",
    "socket_connect_timeout": 5.0,
    "socket_keepalive": True,
}
result_backend_transport_options = {"retry_policy": {"timeout": 5.0}}
redis_socket_timeout = 5.0
redis_socket_connect_timeout = 5.0
