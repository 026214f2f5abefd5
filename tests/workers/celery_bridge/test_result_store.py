"""The end of a Celery task: what of Celery's canvas and of its options works, against Celery's own workers' side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import denied_join_result
from kombu.exceptions import OperationalError

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.registry.errors import ForwardTimeout, ModelError, job_failure
from penstock.workers.celery_bridge.application import WorkerApplication
from penstock.workers.celery_bridge.result_store import CeleryResultStore
from tests.servers import RedisServer
from tests.workers.celery_bridge.endpoint import ROWS
from tests.workers.celery_bridge.jobs import application
from tests.workers.celery_bridge.program import Program

NO = Failure("ModelError", "ValueError: no")
CANCELLED = Failure("Cancelled", "The job was revoked before it ran")
EXPIRED = Failure("Expired", "The deadline passed before it ran")


def called(program: Program) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of the program's tasks: task and arguments."""
    return [(task, arguments) for task, arguments, _ in program.calls]


# Chains and links


def test_a_chain_goes_on_with_the_answer(program: Program):
    """The next step gets what `get` returns as its first argument, and the step after it follows in Celery's worker."""
    last = chain(program.infer(), program.after("second"), program.after(7), app=program.app).apply_async()
    first = program.infers()
    program.work()
    program.work()
    assert called(program) == [("after", (program.answer(first.id), "second")), ("after", ("second", 7))]
    assert program.ended(last) == ("SUCCESS", 7)
    assert program.waiting() == 0


def test_a_result_lists_its_followers(program: Program):
    """`AsyncResult.children`, and so `collect` and `get_leaf`, find the next step from the task."""
    last = chain(program.infer(), program.after(), app=program.app).apply_async()
    first = program.infers()
    assert program.meta(first.id)["children"] == [[[last.id, None], None]]


def test_a_chain_hands_inputs_to_a_later_model(program: Program):
    """A result of another task is the inputs."""
    last = chain(program.after(ROWS), program.infer(is_handed_on=True), app=program.app).apply_async()
    program.work()
    program.infers()
    assert program.ended(last) == ("SUCCESS", program.answer(last.id))


def test_a_chain_of_models_hands_on_the_outputs(program: Program):
    """An answer of `penstock.infer` is not the inputs itself: its outputs are."""
    second = program.infer(is_handed_on=True)
    last = chain(program.after({"x": [[0.0] * 4]}), program.infer(is_handed_on=True), app=program.app)
    assert last.tasks[1].kwargs == second.kwargs
    answer = {**program.answer("earlier"), "outputs": {"x": [[1.0, 2.0, 3.0, 4.0]]}}
    result = chain(program.after(answer), second, app=program.app).apply_async()
    program.work()
    program.infers()
    assert program.ended(result) == ("SUCCESS", program.answer(result.id))


@pytest.mark.parametrize(
    ("handed_on", "kwargs", "text"),
    [
        ([1.0, 2.0], {}, "Inputs are a list. Expected a mapping"),
        ("text", {}, "Inputs are a str. Expected a mapping"),
        ({"z": [[1.0]]}, {}, "Missing required input"),
        (ROWS, {"inputs": ROWS}, "A positional argument and `inputs` are given"),
    ],
)
def test_a_chain_hands_on_what_cannot_be_inputs(program: Program, handed_on: Any, kwargs: dict[str, Any], text: str):
    """The task fails at once and says what it expected; the steps after it fail with it."""
    model = program.infer(is_handed_on=True, kwargs=kwargs)
    last = chain(program.after(handed_on), model, program.after(), app=program.app).apply_async()
    program.work()
    program.take()
    for result in (last.parent, last):
        state, error = program.ended(result)
        assert state == "FAILURE"
        assert text in str(error)
    assert program.run_jobs() == []


def test_the_rest_of_a_chain_fails_with_its_task(program: Program):
    """No step runs after a failed job, and each of them has its error: `get` on the chain does not wait for ever."""
    last = chain(program.infer(), program.after(), program.after(), app=program.app).apply_async()
    program.infers(State.FAILED, NO)
    for result in (last.parent.parent, last.parent, last):
        state, error = program.ended(result)
        assert (state, type(error), str(error)) == ("FAILURE", ModelError, "ValueError: no")
    assert program.waiting() == 0


def test_links_are_called_with_the_answer(program: Program):
    """One link or several, a group among them: each is called once with the answer."""
    one = program.infer(link=program.after("one"))
    several = program.infer(
        link=[program.after("two"), program.after("three"), group([program.after("four")], app=program.app)]
    )
    for signature, count in ((one, 1), (several, 3)):
        result = signature.apply_async()
        program.infers()
        for _ in range(count):
            program.work()
        answers = [arguments for _, arguments in called(program)[-count:]]
        assert all(first == program.answer(result.id) for first, _ in answers)
    assert sorted(arguments[1] for _, arguments in called(program)) == ["four", "one", "three", "two"]
    assert program.waiting() == 0


def test_followers_may_be_groups_and_chords(program: Program):
    """The last but one step of a chain is a group: Celery makes it a chord, which runs in Celery's worker."""
    last = chain(
        program.infer(),
        group([program.after("a"), program.after("b")], app=program.app),
        program.after("end"),
        app=program.app,
    ).apply_async()
    program.infers()
    for _ in range(3):
        program.work()
    assert called(program)[-1] == ("after", (["a", "b"], "end"))
    assert program.ended(last) == ("SUCCESS", "end")


def test_a_follower_knows_where_it_comes_from(program: Program):
    """Root id, parent id, stamps and queue of a follower are those that Celery gives."""

    class Stamp(StampingVisitor):  # type: ignore[misc]  # Celery is untyped
        def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
            return {"order": "o-17"}

    elsewhere = f"{program.slot}-elsewhere"
    infer = program.infer(link=program.after(queue=elsewhere))
    infer.stamp(visitor=Stamp())
    infer.apply_async(root_id="the-root", parent_id="the-parent")
    infer = program.infers()
    assert program.meta(infer.id)["parent_id"] == "the-parent"
    assert (program.waiting(), program.waiting(elsewhere)) == (0, 1)
    program.work(elsewhere)
    ((_, _, request),) = program.calls
    assert (request.root_id, request.parent_id) == ("the-root", infer.id)
    assert (request.stamped_headers, request.stamps) == (["order"], {"order": "o-17"})


# Groups and chords


def test_a_group_gives_each_result(program: Program):
    """The results of a group know their group."""
    results = group([program.infer() for _ in range(3)], app=program.app).apply_async()
    for _ in range(3):
        program.infers()
    for result in results:
        assert program.ended(result) == ("SUCCESS", program.answer(result.id))
        assert program.meta(result.id)["group_id"] == results.id


def test_a_chord_runs_its_body_after_jobs_and_tasks(program: Program):
    """The header may mix models and the program's tasks. The body gets their results in the order of the header."""
    header = [program.infer(), program.after("mine"), program.infer()]
    body = chord(header, program.after("body"), app=program.app).apply_async()
    jobs = [program.infers(), program.infers()]
    program.work()
    program.work()
    expected = [program.answer(jobs[0].id), "mine", program.answer(jobs[1].id)]
    assert called(program)[-1] == ("after", (expected, "body"))
    assert program.ended(body) == ("SUCCESS", "body")


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_chord_fails_with_a_job_of_its_header(program: Program, is_refused: bool):
    """A failed or refused job ends the chord: the body does not run, has a ChordError, and its errback is called."""
    bad = program.infer(kwargs={"priority": "urgent"} if is_refused else {})
    after = program.after()
    after.link_error(program.on_error())
    body = chord([bad, program.infer()], after, app=program.app).apply_async()
    program.take()
    if not is_refused:
        program.run_jobs(State.FAILED, NO)
        program.forward()
    program.infers()
    state, error = program.ended(body)
    assert (state, type(error)) == ("FAILURE", ChordError)
    program.work()
    assert called(program) == [("on_error", (body.id,))]
    assert program.waiting() == 0


def test_a_model_is_no_body_of_a_chord(program: Program):
    """A body gets a list, which cannot be the inputs of a model: it fails and says so. A task between makes inputs."""
    body = chord([program.after("a")], program.infer(is_handed_on=True), app=program.app).apply_async()
    program.work()
    program.take()
    state, error = program.ended(body)
    assert state == "FAILURE"
    assert "Inputs are a list. Expected a mapping" in str(error)


def test_a_chord_in_a_chain_hands_inputs_to_a_model(program: Program):
    """A task between a chord and a model turns the list of results into inputs."""
    last = chain(
        group([program.infer(), program.infer()], app=program.app),
        program.after(ROWS),
        program.infer(is_handed_on=True),
        app=program.app,
    ).apply_async()
    program.infers()
    program.infers()
    program.work()
    program.infers()
    assert program.ended(last) == ("SUCCESS", program.answer(last.id))


# Failures and revocations


def test_an_errback_gets_the_id_of_the_failed_task(program: Program):
    """The worker does not have the program's code, so Celery sends the errback as a task, with the task's id."""
    for end in (lambda: program.infers(State.FAILED, NO), lambda: program.infers(State.DEAD, NO)):
        result = program.infer(link_error=program.on_error()).apply_async()
        end()
        program.work()
        assert called(program)[-1] == ("on_error", (result.id,))
        assert program.calls[-1][2].parent_id == result.id
    assert program.waiting() == 0


def test_an_errback_that_the_worker_has_gets_request_error_and_traceback(program: Program):
    """Celery's newer signature of errbacks takes code that the worker has imported, as in every Celery worker."""
    seen: list[tuple[str, str, str, Exception]] = []

    def note(request: Any, error: Exception, traceback: object) -> None:
        seen.append((request.id, request.task, request.root_id, error))

    program.worker_app.task(name="note", shared=False)(note)
    result = program.infer(link_error=program.app.signature("note")).apply_async()
    program.infers(State.FAILED, NO)
    ((task_id, name, root_id, error),) = seen
    assert (task_id, name, root_id) == (result.id, "penstock.infer", result.id)
    assert isinstance(error, ModelError)


def test_a_refused_task_calls_its_errback(program: Program):
    """A task that becomes no job fails in Celery's own tracer, and its errback goes to the program's queue."""
    result = program.infer(kwargs={"model": "missing"}, link_error=program.on_error()).apply_async()
    program.take()
    program.work()
    assert called(program) == [("on_error", (result.id,))]


@pytest.mark.parametrize(
    ("state", "failure", "reason"), [(State.CANCELLED, CANCELLED, "cancelled"), (State.EXPIRED, EXPIRED, "expired")]
)
def test_a_withdrawn_job_is_a_revoked_task(program: Program, state: State, failure: Failure, reason: str):
    """As for Celery's revoked tasks, no follower and no errback is called, and a chord is told."""
    result = program.infer(link=program.after(), link_error=program.on_error()).apply_async()
    body = chord([program.infer()], program.after(), app=program.app).apply_async()
    program.take()
    program.infers(state, failure)
    found, error = program.ended(result)
    assert (found, type(error), str(error)) == ("REVOKED", TaskRevokedError, reason)
    assert program.ended(body)[0] == "FAILURE"
    assert program.waiting() == 0


# Options of a message


def test_an_ignored_result_is_not_stored_and_its_followers_are_sent(program: Program):
    """`ignore_result` keeps results and failures out of the result backend; links and chords go on."""
    done = program.infer(ignore_result=True, link=program.after()).apply_async()
    body = chord([program.infer(ignore_result=True)], program.after("body"), app=program.app).apply_async()
    failed = program.infer(ignore_result=True, link_error=program.on_error()).apply_async()
    program.infers()
    program.infers()
    program.infers(State.FAILED, NO)
    for _ in range(3):
        program.work()
    assert [task for task, _ in called(program)] == ["after", "after", "on_error"]
    assert [program.meta(result.id)["status"] for result in (done, failed)] == ["PENDING", "PENDING"]
    assert program.ended(body) == ("SUCCESS", "body")


# What cannot be followed, and servers that are away


@pytest.mark.parametrize("request_field", ["callbacks", "chain"])
def test_a_follower_that_cannot_be_sent_fails_the_task(program: Program, request_field: str):
    """As in Celery. The next results are stored: a malformed signature does not come back for ever."""
    store = CeleryResultStore(program.worker_app)
    store.succeeded(f"{program.slot}-bad", {"outputs": {}}, {"id": "bad", request_field: [7]})
    assert program.meta(f"{program.slot}-bad")["status"] == "FAILURE"


@pytest.mark.parametrize("fields", [{"chord": 7, "group": "g"}, {"errbacks": [7]}, {"chain": [7]}])
def test_an_outcome_is_stored_although_its_request_cannot_be_followed(program: Program, fields: dict[str, Any]):
    """A malformed chord, errback or chain costs the followers, and not the failure of the task itself."""
    task_id = f"{program.slot}-bad"
    CeleryResultStore(program.worker_app).failed(task_id, ModelError("ValueError: no"), {"id": task_id, **fields})
    assert str(program.meta(task_id)["result"]) == "ValueError: no"


class Impatient(WorkerApplication):
    """Gives a message up soon."""

    publish_timeout_s = 0.1


@pytest.mark.parametrize(
    ("leave", "return_"), [(RedisServer.kill, RedisServer.restart), (RedisServer.freeze, RedisServer.thaw)]
)
def test_a_broker_that_is_away_fails_no_task(
    redis_server: RedisServer,
    shared_redis: RedisServer,
    slot: str,
    leave: Callable[[RedisServer], None],
    return_: Callable[[RedisServer], None],
):
    """Celery would fail the task, or wait for ever. Here the call raises and is repeated; nothing is stored before."""
    app = Impatient("test", broker=redis_server.celery_url, backend=shared_redis.celery_url, set_as_current=False)
    store, request = CeleryResultStore(app), {"id": slot, "callbacks": [dict(app.signature("after"))]}
    leave(redis_server)
    with denied_join_result():
        with pytest.raises(OperationalError):
            store.succeeded(slot, {"outputs": {}}, request)
        assert app.backend.get_task_meta(slot, cache=False)["status"] == "PENDING"
        return_(redis_server)
        store.succeeded(slot, {"outputs": {}}, request)
    assert app.backend.get_task_meta(slot, cache=False)["status"] == "SUCCESS"
    with redis_server.client() as client:
        assert client.llen("celery") >= 1
    app.close()


def test_a_stored_result_is_what_get_returns(app: Celery):
    """The result backend holds successes, failures by class and text, and revocations, as AsyncResult expects."""
    store = CeleryResultStore(app)
    store.succeeded("t-done", {"outputs": {"y": [[1.0]]}}, None)
    store.failed("t-failed", ModelError("ValueError: no"), None)
    store.revoked("t-revoked", "cancelled", None)

    def outcome(task_id: str) -> object:
        return app.AsyncResult(task_id).get(timeout=180, propagate=False)

    assert outcome("t-done") == {"outputs": {"y": [[1.0]]}}
    failure = outcome("t-failed")
    assert isinstance(failure, ModelError)
    assert str(failure) == "ValueError: no"
    assert isinstance(outcome("t-revoked"), TaskRevokedError)


def test_a_result_goes_to_the_queue_of_an_rpc_client(shared_redis: RedisServer, slot: str):
    """With the result backend `rpc://` a result is a message to the queue that the task's message names."""
    app = application(shared_redis)
    app.conf.result_backend = "rpc://"
    request = {"id": "t-rpc", "reply_to": f"{slot}-replies", "correlation_id": "t-rpc"}
    CeleryResultStore(app).succeeded("t-rpc", {"outputs": {}}, request)
    with app.connection_for_read() as connection, connection.SimpleQueue(f"{slot}-replies") as replies:
        reply = replies.get(timeout=180)
        reply.ack()
    assert (reply.payload["task_id"], reply.payload["result"]) == ("t-rpc", {"outputs": {}})
    assert reply.properties["correlation_id"] == "t-rpc"
    app.close()


def test_a_stored_failure_is_what_get_returns(program: Program):
    """AsyncResult has the class, the text and the traceback of a failure; where that stays in the worker, its place."""
    store = CeleryResultStore(program.worker_app)
    place = "model.py, line 7, in predict"
    store.failed(f"{program.slot}-plain", ModelError("ValueError: no"), None)
    store.failed(f"{program.slot}-slow", ForwardTimeout("The forward took longer than its limit of 30 s"), None)
    for name, traceback in (("placed", ""), ("traced", "the traceback")):
        error = job_failure("ModelError", "KeyError: 'k'", where=place, traceback=traceback)
        store.failed(f"{program.slot}-{name}", error, None)
    plain, slow, placed, traced = (
        program.app.AsyncResult(f"{program.slot}-{name}") for name in ("plain", "slow", "placed", "traced")
    )
    failure = plain.result
    assert isinstance(failure, ModelError)
    assert str(failure) == "ValueError: no"
    assert isinstance(slow.result, ForwardTimeout)
    assert (plain.traceback, traced.traceback) == (None, "the traceback")
    assert placed.traceback == f"Traceback (the last frame of the model):\n  {place}\nKeyError: 'k' ({place})"
