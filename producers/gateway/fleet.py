"""The client of the gateway: an AsyncClient that acts for the caller of the present task, and tells which models exist.

callers.py -- the caller of the task --> GatewayClient -- its tenant, its key, its models --> jobs of AsyncClient

A caller submits, finds and cancels jobs of its tenant only, whatever the protocol is: the job of another tenant is an
unknown job. Without a caller there are no jobs at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from penstock.producers.async_client import AsyncClient, AsyncJobHandle
from penstock.producers.core import Inputs, Item, Items, Refused, Untaken
from penstock.producers.gateway.callers import caller, entered
from penstock.producers.gathering import ENDS
from penstock.producers.job_state import HandleCore
from penstock.producers.submission import cancellation
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import Backlog, Usage
from penstock.registry.broker.meters import Charge, Lines, Spent
from penstock.registry.errors import (
    Corrupt,
    InvalidInput,
    JobFailed,
    JobLost,
    QueueFull,
    Rejected,
    ResultGone,
    UnknownJob,
    UnknownModel,
)
from penstock.registry.package import ModelSpec
from penstock.registry.settings_sections import LATEST
from penstock.registry.tensors import Array

__all__ = ["Answered", "GatewayClient", "ServedModel"]

Answered: TypeAlias = tuple[dict[str, Array], str] | JobFailed | JobLost | ResultGone | UnknownJob | Corrupt
"""The outputs of a job and the version that answered, or the error in their place."""


class ServedModel(NamedTuple):
    """A model whose jobs are accepted. loaded: its versions by the names of the workers that have them in memory."""

    spec: ModelSpec
    loaded: Mapping[str, tuple[str, ...]]
    since: int
    """When the oldest worker that has it in memory started, in Unix time; 0 without one."""
    content_hash: str
    """Of the version of the spec; empty while no worker has it in memory."""

    @property
    def is_loaded(self) -> bool:
        """Whether a worker has the version of the spec in memory."""
        return self.spec.version in self.loaded


class GatewayClient(AsyncClient):
    """An AsyncClient that shows models, too. Its jobs are those of the tenant of the present caller."""

    def job(self, job: str | HandleCore, *, tenant: str | None = None) -> AsyncJobHandle:
        """The handle of a job of the caller. tenant: not used.

        Raises UnknownJob for a model of other keys, and for an id that no job can have.
        """
        found = entered()
        try:
            handle = super().job(job, tenant=found.tenant)
        except InvalidInput as error:
            raise UnknownJob(str(error)) from None
        if not found.may_use(handle.model):
            raise UnknownJob(f"Unknown job {handle.id!r:.120}. Expected the id of a job that this API key may see")
        return handle

    async def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> AsyncJobHandle:
        return await super()._submit(model, inputs, _of_caller(model, options), key)

    async def _submit_many(
        self,
        model: str,
        items: Items,
        options: SubmitOptions,
        *,
        first_index: int = 0,
        refused: Refused = None,
        timeout_s: float | None = None,
        untaken: Untaken = None,
        job_ids: Sequence[str] | None = None,
        stranded: list[AsyncJobHandle] | None = None,
    ) -> list[AsyncJobHandle]:
        return await super()._submit_many(
            model,
            items,
            _of_caller(model, options),
            first_index=first_index,
            refused=refused,
            timeout_s=timeout_s,
            untaken=untaken,
            job_ids=job_ids,
            stranded=stranded,
        )

    async def abandon(self, handle: AsyncJobHandle) -> None:
        """Cancels a job of this client for which no other process waits. Raises BrokerUnavailable."""
        self._enter_loop()
        await self._broker.abandon(
            handle.id, handle.tenant, cancellation(handle.id, handle.tenant, self._builder.keyring)
        )

    async def spend(self, requests: Sequence[Sequence[Charge]], lines: Mapping[int, Lines]) -> list[Spent]:
        """Charges requests on their meters; see registry/broker/meters.py. Raises BrokerUnavailable."""
        self._enter_loop()
        return await self._broker.spend(requests, lines)

    async def charged_lines(self, batch_id: str) -> frozenset[int]:
        """The numbers of the lines of a batch that were charged. Raises BrokerUnavailable."""
        self._enter_loop()
        return await self._broker.charged(batch_id)

    async def spec_of(self, model: str, version: str | None = None) -> ModelSpec:
        """The spec of the active version, which is `latest`, too, or of the named one.

        Raises UnknownModel, and NotPermitted.
        """
        return self.spec_at_hand(model, version) or await self._spec(model, None if version == LATEST else version)

    def spec_at_hand(self, model: str, version: str | None = None) -> ModelSpec | None:
        """As `spec_of`, without a coroutine: a batch asks for each of its lines. None: it has to be read.

        Raises NotPermitted.
        """
        if (found := caller()) is not None:
            found.check_model(model)
        return None if version and version != LATEST else self._specs.fresh(model)

    async def submit_one(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> AsyncJobHandle:
        """Publishes one job, as `submit` does. key: its idempotency key."""
        return await self._submit(model, inputs, options, key)

    async def submit_items(
        self,
        model: str,
        inputs: Sequence[Inputs],
        job_ids: Sequence[str],
        options: SubmitOptions,
        refused: dict[int, InvalidInput],
        timeout_s: float,
    ) -> list[AsyncJobHandle]:
        """Publishes one job for each of the inputs, as `submit_many` does. A job that exists is not published again.

        job_ids: one for each of them, from DerivedIds. refused: takes the errors of inputs by their place; these have
        no job. timeout_s: the longest wait for room.
        """
        items: list[Item] = [(each, None) for each in inputs]
        return await self._submit_many(model, items, options, refused=refused, timeout_s=timeout_s, job_ids=job_ids)

    async def submit_each(
        self, model: str, items: Sequence[Item], options: SubmitOptions
    ) -> list[AsyncJobHandle | Rejected]:
        """Publishes one job for each pair of inputs and idempotency key, and gives its handle, or why it has none.

        All items are checked before the first is written; there is no wait for room. Raises the first of the reasons,
        such as QueueFull, where no item has a job.
        """
        untaken: dict[int, Rejected] = {}
        try:
            handles = await self._submit_many(model, items, options, timeout_s=0, untaken=untaken)
        except QueueFull as full:
            handles = [job for job in full.accepted if isinstance(job, AsyncJobHandle)]
        if not handles:
            raise untaken[min(untaken)]
        jobs = iter(handles)
        return [untaken.get(place) or next(jobs) for place in range(len(items))]

    async def await_answers(self, handles: Sequence[AsyncJobHandle], found: dict[str, Answered]) -> None:
        """Waits until all these jobs have ended, and adds how, by id. Raises BrokerUnavailable.

        Replies are awaited in the order of the handles: most have come when it is their turn, and cost no future.
        """
        others = []
        for handle in handles:
            if handle._state.record is None:
                if not handle._state.awaits_reply:
                    others.append(handle)
                    continue
                try:
                    await handle._await_end(None)
                except ENDS as error:
                    found[handle.id] = error
                    continue
            _add_answer(handle, found)
        # Jobs of an earlier process, whose replies do not come here.
        async for handle in self.as_completed(others):
            _add_answer(handle, found)

    def add_known(self, handles: Sequence[AsyncJobHandle], found: dict[str, Answered]) -> None:
        """Adds how those jobs ended whose end is known here, as `await_answers` does."""
        for handle in handles:
            if handle.id not in found and handle._state.record is not None:
                _add_answer(handle, found)

    async def forget(self, handle: AsyncJobHandle) -> None:
        """Deletes the result and the events of a job of the caller; not of one that has not ended.

        Raises UnknownJob and BrokerUnavailable.
        """
        if await self.job(handle.id).status() not in ("queued", "running"):
            await self._broker.forget(handle.id)

    async def models(self) -> list[ServedModel]:
        """The models whose jobs are accepted, by name. Raises BrokerUnavailable."""
        self._enter_loop()
        names, reports = await asyncio.gather(self._broker.models(), self._reports())
        by = caller()
        visible = names if by is None else filter(by.may_use, names)
        found = await asyncio.gather(*(self._served(name, reports) for name in visible))
        return [model for model in found if model is not None]

    async def model(self, name: str, version: str | None = None) -> ServedModel:
        """One model, or the named version of it. Raises UnknownModel."""
        spec = await self.spec_of(name, version)
        return _described(spec, await self._reports())

    async def ready_workers(self) -> list[Mapping[str, Any]]:
        """The reports of the workers that claim jobs. Raises BrokerUnavailable."""
        return [report for report in await self.reports() if report.get("ready")]

    async def reports(self) -> list[Mapping[str, Any]]:
        """What the live workers report of themselves. Raises BrokerUnavailable."""
        self._enter_loop()
        return await self._reports()

    async def backlog(self, model: str) -> Backlog:
        """The jobs of a model that have not ended, and how many were committed so far. Raises BrokerUnavailable."""
        self._enter_loop()
        return await self._broker.backlog(model)

    async def usage(self) -> dict[str, Usage]:
        """What was used of all models, by the id of the API key that pays. Raises BrokerUnavailable."""
        self._enter_loop()
        names = await self._broker.models()
        found: dict[str, Usage] = {}
        for of_model in await asyncio.gather(*map(self._broker.usage, names)):
            for (key_id, _), used in of_model.items():
                found[key_id] = Usage(*map(sum, zip(found.get(key_id, Usage()), used, strict=True)))
        return found

    async def _reports(self) -> list[Mapping[str, Any]]:
        return [json.loads(report) for report in await self._broker.workers()]

    async def _served(self, name: str, reports: list[Mapping[str, Any]]) -> ServedModel | None:
        try:
            return _described(self._specs.fresh(name) or await self._spec(name, None), reports)
        except UnknownModel:
            # A name that outlived its spec.
            return None


def _add_answer(handle: AsyncJobHandle, found: dict[str, Answered]) -> None:
    try:
        found[handle.id] = handle._state.answer()
    except ENDS as error:
        found[handle.id] = error


def _of_caller(model: str, options: SubmitOptions) -> SubmitOptions:
    """The options with the tenant and the key of the caller; the version `latest` is the active one.

    Raises NotPermitted for a model of other keys.
    """
    found = entered()
    found.check_model(model)
    version = None if options.version == LATEST else options.version
    return replace(options, tenant=found.tenant, account=found.key_id, version=version)


def _described(spec: ModelSpec, reports: list[Mapping[str, Any]]) -> ServedModel:
    loaded: dict[str, list[str]] = {}
    starts: list[float] = []
    content_hash = ""
    for report in reports:
        for version, entry in report.get("versions", {}).get(spec.name, {}).items():
            if entry["state"] == "ready":
                loaded.setdefault(version, []).append(report["name"])
                starts.append(report["started"])
                content_hash = entry["content_hash"] if version == spec.version else content_hash
    versions = {version: tuple(names) for version, names in loaded.items()}
    return ServedModel(spec, versions, int(min(starts, default=0)), content_hash)
