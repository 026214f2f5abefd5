"""Opens the experiments of a command: registry, workers, and the audit log that records each decision first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import connected, load_settings
from penstock.registry.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.compose.experiments.changes import AuditDecision, Experiments

__all__ = ["opened", "progress", "via_option"]

_TIMEOUT_S: Final = 5.0
via_option: Final = click.option(
    "--via", default="", metavar="WORKER", help="Work through this worker, or through `any`: see `penstock models`."
)


@contextmanager
def opened(
    access: RegistryAccess, on_alert: Callable[[str, str], None] = lambda hook, outcome: None
) -> Iterator[Experiments]:
    """The experiments of the registry of this shell. on_alert: see open_alerts.

    A shell that works through a worker may know no broker: then it reads no breaker, and the workers alone obey them.
    """
    from penstock.compose.experiments.changes import Experiments
    from penstock.registry.broker.redis_breakers import RedisBreakers
    from penstock.safety.alert_hooks import open_alerts

    settings = load_settings(access.environ) if access.via else connected(access.environ)
    with access.deployer() as deployer, _audited(access) as audit, ExitStack() as ends:
        alerts = ends.enter_context(closing(open_alerts(settings, on_alert)))
        breakers = None
        if settings.redis_url:
            breakers = ends.enter_context(closing(RedisBreakers.from_url(settings.redis_url, timeout_s=_TIMEOUT_S)))
        yield Experiments(deployer, audit, breakers=breakers, alerts=alerts.alerts)


def progress(line: str) -> None:
    """Print one line of progress."""
    click.echo(line, err=True)


@contextmanager
def _audited(access: RegistryAccess) -> Iterator[AuditDecision | None]:
    settings = load_settings(access.environ)
    if not settings.inference.privacy.audit_log_enabled:
        yield None
        return
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.rollout import ROLLOUT_DECISION

    def record(model: str, result: str, details: Mapping[str, Any]) -> None:
        try:
            log.log_event(ROLLOUT_DECISION, model, result=result, details=details)
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}), and nothing was decided. Expected room for it"
            ) from None

    with audit_logger(settings, "rollout", reaches_stores=not access.via) as log:
        yield record
