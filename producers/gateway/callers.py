"""Who calls: a credential -> the Caller, what it may do, and what it may still spend. No protocol here.

    Access.enter(texts that the caller sent, what the route needs, address, route)
      -> authenticate -> Caller        BadApiKey: 401
      -> role                          NotPermitted: 403
      -> limits.py                     RateLimited: 429
      -> Entry, the context of the task: GatewayClient submits and finds only jobs of the caller's tenant

Every protocol enters here, before it does anything else. Without an entry GatewayClient refuses every job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.producers.gateway.key_copy import KeyCopy
from penstock.producers.gateway.limits import Owner, RateLimits, admitted, check_attainable, totals
from penstock.producers.gateway.revocations import REVOKED, Revocations
from penstock.registry.api_keys import UNKNOWN_DIGEST, ApiKey, KeyLimits, KeyRole, digest_of, parse_api_key
from penstock.registry.broker.meters import Charge, Lines, Reading
from penstock.registry.errors import BadApiKey, NotPermitted, RateLimited
from penstock.registry.settings import Settings

__all__ = ["NOBODY", "Access", "Caller", "Credentials", "Entry", "Needs", "caller", "entered"]

Needs: TypeAlias = Literal["nothing", "look", "submit", "admin"]
"""What a route needs. `nothing`: it is open to everybody, and has no caller."""

_RANK: Final[dict[str, int]] = {"look": 0, "readonly": 0, "submit": 1, "user": 1, "admin": 2}
_EXPECTED: Final = "Expected `Authorization: Bearer KEY` or `X-API-Key: KEY`"
_UNKNOWN: Final = ApiKey(
    id="", label="", digest=UNKNOWN_DIGEST, role="readonly", tenant="", models=(), limits=KeyLimits(), created_at=0
)


class Credentials(NamedTuple):
    """What a caller sent, as text; empty where it sent nothing. The first one that is there counts.

    authorization: the whole header, such as `Bearer pk_...`. query_key: the parameter `api_key`.
    """

    authorization: str = ""
    api_key: str = ""
    query_key: str = ""

    def text(self) -> str:
        """The key that was sent; empty without one."""
        if self.authorization:
            scheme, _, text = self.authorization.partition(" ")
            return text.strip() if scheme.lower() == "bearer" else ""
        return self.api_key or self.query_key


class Caller(NamedTuple):
    """Who calls. key_id: empty where no key is asked for. models: those that the caller may use; empty: all."""

    key_id: str
    tenant: str
    role: KeyRole
    models: tuple[str, ...]
    limits: KeyLimits

    def may_use(self, model: str) -> bool:
        """Whether the caller may use the model."""
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raises NotPermitted for a model that the caller may not use, whether it exists or not."""
        if not self.may_use(model):
            raise NotPermitted(f"This API key may not use {model!r:.80}. Expected one of: {', '.join(self.models)}")


NOBODY: Final = Caller("", "", "readonly", (), KeyLimits())
"""The caller of a route that is open to everybody. It has no jobs."""


@dataclass(slots=True)
class Entry:
    """One admitted request. readings: what is left of its limits."""

    caller: Caller
    readings: tuple[Reading, ...] = ()
    _charges: tuple[Charge, ...] = ()
    _limits: RateLimits | None = field(default=None, repr=False)
    _key: ApiKey | None = field(default=None, repr=False)
    _revocations: Revocations | None = field(default=None, repr=False)

    def on_revoked(self, end: Callable[[], object]) -> Callable[[], object]:
        """Calls `end` about a second after the key of the caller stops working. Returns what ends this watch."""
        if self._key is None or self._revocations is None:
            return _nothing
        return self._revocations.watch(self._key, end)

    @contextmanager
    def until_revoked(self) -> Iterator[None]:
        """Inside of the block the task ends about a second after the key of the caller. Raises BadApiKey."""
        task, is_revoked = asyncio.current_task(), False

        def end() -> None:
            nonlocal is_revoked
            is_revoked = True
            if task is not None:
                task.cancel()

        end_watch = self.on_revoked(end)
        try:
            yield
        except asyncio.CancelledError:
            if not is_revoked or task is None:
                raise
            task.uncancel()
            raise BadApiKey(REVOKED) from None
        finally:
            end_watch()

    async def spend(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Charges what became known after the entry: further jobs of the request, or its tokens. Once per request.

        Raises RateLimited, and InvalidInput for a request above a whole limit. Then the charge of the entry is taken
        back, too.
        """
        costs = totals(self._charges, requests, tokens)
        if self._limits is None or not costs:
            return
        try:
            self._note(await self._limits.admit(costs))
        except RateLimited as refused:
            self._note(refused.readings)
            check_attainable(costs)
            raise

    def _note(self, readings: Sequence[Reading]) -> None:
        latest = {reading.meter.key: reading for reading in readings}
        self.readings = tuple(latest.get(before.meter.key, before) for before in self.readings)

    async def spend_for_lines(self, tokens: Sequence[int], lines: Lines) -> int:
        """Charges lines of a batch, from the first one on: as many as the limits have room for. tokens: of each.

        Raises RateLimited when there is no room for the first one.
        """
        if self._limits is None:
            return len(tokens)
        return await self._limits.admit_most(self._charges, tokens, lines)


def _nothing() -> None:
    pass


_entry: ContextVar[Entry | None] = ContextVar("penstock_gateway_entry", default=None)


def caller() -> Caller | None:
    """The caller of the present task; None on a route that is open to everybody."""
    entry = _entry.get()
    return None if entry is None else entry.caller


def entered() -> Caller:
    """The caller of the present task. Raises BadApiKey where no request was admitted."""
    found = caller()
    if found is None:
        raise BadApiKey(f"No caller. {_EXPECTED}")
    return found


class Access:
    """The door of one gateway process. For its event loop."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyCopy,
        limits: RateLimits,
        clock: Callable[[], float] = time.time,
        count: Callable[[str, str], None] = lambda _key_id, _outcome: None,
    ) -> None:
        """clock: unix seconds, for the expiry of keys. count: takes the id of a key and what became of its request."""
        server = settings.inference.server
        self._mode = server.api_keys
        self._is_exposed = server.is_exposed
        self._keys = keys
        self._limits = limits
        self._clock = clock
        self._count = count
        self._revocations = Revocations(keys, clock)
        self._anybody = Caller("", settings.tenant_id, "admin", (), KeyLimits())

    async def authenticate(self, credentials: Credentials, *, is_remote: bool = False) -> Caller:
        """The caller. Raises BadApiKey, and RegistryUnavailable while the keys cannot be read.

        is_remote: whether the connection did not come over the loopback: servers of other people's choice listen where
        no setting says. An unknown id costs the same work as a wrong secret.
        """
        key = await self._key_of(credentials, is_remote=is_remote)
        return self._anybody if key is None else _caller_of(key)

    async def aclose(self) -> None:
        """Ends nothing any more when a key is revoked."""
        await self._revocations.aclose()

    async def _key_of(self, credentials: Credentials, *, is_remote: bool) -> ApiKey | None:
        """See authenticate. None: no key is asked for."""
        if self._mode == "off":
            return None
        keys = await self._keys.fresh()
        if self._mode == "auto" and not keys and not (self._is_exposed or is_remote):
            return None
        text = credentials.text()
        if not text:
            raise BadApiKey(f"No API key. {_EXPECTED}")
        key = keys.get(parse_api_key(text) or "", _UNKNOWN)
        if not key.opens(digest_of(text), self._clock()):
            raise BadApiKey(f"The API key is unknown, revoked or expired. {_EXPECTED}")
        return key

    async def enter(
        self, credentials: Credentials, needs: Needs, address: str, route: str, *, is_remote: bool = False
    ) -> Entry:
        """Admits one request of the present task, which from now on acts for its caller.

        needs: not `nothing`. address: of the caller, without its port. route: its path with names in braces. is_remote:
        see `authenticate`.
        Raises BadApiKey, NotPermitted, RateLimited, RegistryUnavailable and BrokerUnavailable.
        """
        _entry.set(None)
        key = await self._key_of(credentials, is_remote=is_remote)
        found = self._anybody if key is None else _caller_of(key)
        if _RANK[found.role] < _RANK[needs]:
            self._count(found.key_id, "denied")
            raise NotPermitted(
                f"An API key with the role {found.role} may not do this. Expected the role {_role(needs)}"
            )
        owner = Owner(found.key_id, found.tenant if found.key_id else "", found.limits, address)
        charges = self._limits.charges(owner, route)
        entry = Entry(found, _key=key, _revocations=self._revocations)
        if charges:
            try:
                readings = await self._limits.admit(charges)
                charges = admitted(charges, readings)
                entry = Entry(found, readings, charges, self._limits, key, self._revocations)
            except RateLimited:
                if found.key_id:
                    self._count(found.key_id, "limited")
                raise
        if found.key_id:
            self._count(found.key_id, "admitted")
        _entry.set(entry)
        return entry

    async def resume(self, key_id: str, tenant: str) -> Entry:
        """The present task goes on for a caller whose request has ended: for that of a batch, whose lines it charges.

        key_id: of that caller; empty where no key was asked for: then the lines are charged nowhere. Raises BadApiKey
        for a key that was revoked or has expired since, and RegistryUnavailable.
        """
        _entry.set(None)
        if not key_id:
            entry = Entry(self._anybody._replace(tenant=tenant))
            _entry.set(entry)
            return entry
        key = (await self._keys.fresh()).get(key_id, _UNKNOWN)
        if key.id != key_id or key.status(self._clock()) != "active":
            raise BadApiKey("The API key of this batch was revoked, or has expired. Expected a new batch")
        found = Caller(key.id, tenant, key.role, key.models, key.limits)
        charges = self._limits.line_charges(Owner(key.id, tenant, key.limits, ""))
        entry = Entry(found, (), charges, self._limits if charges else None)
        _entry.set(entry)
        return entry

    def leave(self) -> None:
        """Ends the entry of the present task."""
        _entry.set(None)


def _caller_of(key: ApiKey) -> Caller:
    return Caller(key.id, key.tenant, key.role, key.models, key.limits)


def _role(needs: Needs) -> str:
    return "admin" if needs == "admin" else "user"
