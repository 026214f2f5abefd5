"""Redis Streams as the broker, with all four ends, for processes that need several of them.

redis_connection.py   commands, time-outs, errors
  redis_producer.py   publish, read, cancel
  redis_worker.py     claim, commit, leases        redis_specs.py   specs and active versions
  redis_operator.py   queues, pauses, dead letters
  redis_webhooks.py   webhooks of ended jobs
redis_scripts.py      the calls and answers of the Lua scripts: each step that must be atomic is one script
"""

from __future__ import annotations

from penstock.registry.broker.redis_operator import RedisOperator
from penstock.registry.broker.redis_producer import RedisProducer
from penstock.registry.broker.redis_webhooks import RedisWebhooks
from penstock.registry.broker.redis_worker import RedisWorker

__all__ = ["RedisStreams"]


class RedisStreams(RedisWorker, RedisProducer, RedisOperator, RedisWebhooks):
    """Broker on one Redis. Thread-safe, except that one thread owns exchange, arm, fileno, collect and disarm."""
