"""`python -m penstock.workers -n cpu0@%h`: one worker process, as `penstock worker` and `penstock up` start it.

It is `celery -q -A penstock.workers.app worker -P solo -c 1`. A package that is missing ends it in one line with exit
status 78, where Celery's own command prints a traceback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from penstock.registry import garbage
from penstock.workers.process.exit_status import exit_with

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Run the worker with these options of Celery's `worker` command."""
    garbage.collect_seldom()
    if "--loglevel=debug" in arguments:
        # Celery reads the option later, and an import may fail before.
        logging.getLogger("penstock").setLevel(logging.DEBUG)
    try:
        from penstock.workers.app import run
    except ImportError as error:
        exit_with(error)
    run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
