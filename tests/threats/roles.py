"""A Redis as compose/ runs it: one user per role, made by the shipped start.sh and the shipped role files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from tests.servers import ROOT, RedisServer, wait_until

ROLES = ("producer", "gateway", "worker", "operator", "celery", "webhooks", "shadow", "flower")
"""The roles that have a password of their own; `health` has none and may PING."""


class GuardedServer(RedisServer):
    """redis-server behind compose/redis/start.sh, on a loopback port; `url` is the worker's.

    `overseer` may do everything: an extra user of the tests, who breaks things and reads the server's ACL log.
    """

    def __init__(self, binary: Path) -> None:
        super().__init__(binary, with_port=True)
        self.passwords = {role: f"{role}-{'x' * 24}" for role in ROLES}
        self._config = self.folder / "config"
        shutil.copytree(ROOT / "compose" / "redis", self._config)
        with (self._config / "users.sh").open("a") as script:
            script.write("echo 'user overseer on nopass ~* &* +@all'\n")

    def url_of(self, role: str) -> str:
        """The URL with which a role connects."""
        password = self.passwords.get(role, "")
        return f"redis://{role}:{password}@127.0.0.1:{self.port}/0"

    @property
    def url(self) -> str:
        """The drain's."""
        return self.url_of("worker")

    @property
    def celery_url(self) -> str:
        """That of the worker's Celery side."""
        return self.url_of("celery")

    def start(self) -> GuardedServer:
        """Start it as the container does, and wait until it answers."""
        binaries = self.folder / "bin"
        binaries.mkdir(exist_ok=True)
        program = binaries / "redis-server"
        program.unlink(missing_ok=True)
        program.symlink_to(self.binary)
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--loglevel", "warning"]
        self._spawn(
            ["sh", self._config / "start.sh", *options],
            {
                **self.password_variables(self.passwords),
                "PATH": f"{binaries}:{os.environ['PATH']}",
                "REDIS_DATA": str(self.folder),
                "REDIS_USERS_FILE": str(self.folder / "users.acl"),
            },
        )
        wait_until(self._answers, 20, "redis-server answers")
        return self

    @staticmethod
    def password_variables(passwords: Mapping[str, str]) -> dict[str, str]:
        """What the container gets from outside."""
        return {f"REDIS_{role.upper()}_PASSWORD": password for role, password in passwords.items()}

    def client(self, timeout_s: float = 30) -> redis.Redis:
        """The overseer's."""
        return redis.Redis.from_url(self.url_of("overseer"), socket_timeout=timeout_s)

    def client_of(self, role: str) -> redis.Redis:
        """A connection of a role."""
        return redis.Redis.from_url(self.url_of(role), socket_timeout=30)

    def denials(self) -> list[dict[str, Any]]:
        """The calls that Redis refused since `forget_denials`: user, reason and command."""
        with self.client() as client:
            return [
                {name: entry[name] for name in ("username", "reason", "context", "object")}
                for entry in client.acl_log()
                # Newer clients introduce themselves and do not mind a refusal.
                if entry["object"] not in ("client", "client|setinfo")
            ]

    def forget_denials(self) -> None:
        """Empty the server's ACL log."""
        with self.client() as client:
            client.acl_log_reset()
