"""Waits for an embedded stack that is starting: programs of the first hour start beside their stack.

    from_env -> the settings name a broker, or the stack is ready -> no StackStart
             -> the stack is starting -> StackStart: one log line, then a look at stack.json every 50 ms
                    -> ready -> the call goes on
                    -> the stack ended, or the time is over -> ConfigurationError, BrokerUnavailable

`Client.from_env` waits itself. `AsyncClient` waits in `async with`, or before its first submit, so that its event loop
goes on. The decision (`look`) reads one file and no clock.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.registry import stack_file
from penstock.registry.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from penstock.registry.settings import Settings

__all__ = ["LONGEST_START_S", "StackStart"]

LONGEST_START_S: Final = 180.0
"""As long as the stack itself waits for its workers."""
_LOOK_S: Final = 0.05
_logger: Final = logging.getLogger("penstock.client")


class StackStart:
    """The wait for the stack of `home`, for at most `timeout_s` seconds from its beginning."""

    def __init__(self, home: Path, timeout_s: float) -> None:
        self._home = home
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, settings: Settings, timeout_s: float) -> StackStart | None:
        """The wait that clients of these settings need: None where a broker is named, or no stack is starting."""
        if settings.redis_url:
            return None
        stack = stack_file.read(settings.home)
        if stack is None or stack.is_ready:
            return None
        # Without a configuration of logging, Python writes a warning to stderr.
        _logger.warning(
            "The embedded stack is starting. This program waits for it, at most %g s. It waits for %s",
            timeout_s,
            stack.awaits,
        )
        return cls(settings.home, timeout_s)

    def wait(self) -> None:
        """Return once the stack is ready. Raises what `look` raises."""
        until = time.monotonic() + self._timeout_s
        while not self.look(is_over=time.monotonic() >= until):
            time.sleep(_LOOK_S)

    async def wait_async(self) -> None:
        """As `wait`, and the event loop goes on meanwhile."""
        # Here: the blocking client needs no asyncio, and loads none.
        import asyncio

        until = time.monotonic() + self._timeout_s
        while not self.look(is_over=time.monotonic() >= until):
            await asyncio.sleep(_LOOK_S)

    def look(self, *, is_over: bool) -> bool:
        """Whether the stack is ready now.

        Raises ConfigurationError when it has ended, and BrokerUnavailable when it is not ready and the time is over.
        """
        stack = stack_file.read(self._home)
        if stack is None:
            raise ConfigurationError(
                "The embedded stack ended while it was starting. Expected a stack that starts: the output of "
                "`penstock up` says why it did not"
            )
        if not stack.is_ready and is_over:
            raise BrokerUnavailable(
                f"The embedded stack was not ready within {self._timeout_s:g} s: it waits for {stack.awaits}. "
                "Expected a stack that is ready: `penstock status` shows its workers"
            )
        return stack.is_ready
