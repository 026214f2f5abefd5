"""The end of a stream behind its last chunk, whatever the model does about it."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from penstock.workers.runtime.base import DeviceLost, InstanceLost
from penstock.workers.runtime.tracebacks import name_of, trace_of

__all__ = ["close_stream"]

logger = logging.getLogger("penstock.runtime")


def close_stream(steps: Generator[Any, Any, Any]) -> None:
    """Close a generator. The model may catch that and yield, or raise anything: it is logged. Raises DeviceLost.

    The text of the exception is not logged: it may hold inputs.
    """
    try:
        steps.close()
    except InstanceLost as error:
        logger.warning("an instance ended while its stream was closed", extra={"incident": error.incident})
    except DeviceLost:
        raise
    except BaseException as error:  # a model may raise anything; its job has ended
        facts = {"error": name_of(error), "where": trace_of(error).where}
        logger.warning("a model refused to end its stream", extra=facts)
