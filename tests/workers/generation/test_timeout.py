"""A request with a time to end: it ends as it is, and the others go on. The clock is an argument."""

from __future__ import annotations

from dataclasses import replace

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Config, Engine
from penstock.workers.generation.backend import Delivered
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.runtime.base import DeadlinePassed
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import prompts_of


def test_a_request_ends_at_its_time():
    """ES-061: with the tokens that it has, whether it runs or waits; its pages come back."""
    now = [100.0]
    config = Config.from_options({"max_num_seqs": 1, "kv_cache_mb": 2, "packed_linears": "off"})
    engine = Engine(wrap_decoder(decoder("Llama"), None, None), config, clock=lambda: now[0])
    (prompt,) = prompts_of(9)
    params = {"temperature": 0, "max_tokens": 20}
    (whole,) = engine.generate([prompt], params)
    for name in ("runs", "waits"):
        engine.add_request(name, prompt, SamplingParams.from_mapping({**params, "timeout_s": 5}))
    engine.add_request("free", prompt, params)
    now[0] = 104.9
    for _ in range(3):
        engine.step()
    now[0] = 105.0
    ended = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0]
    assert {name: each.finish_reason for name, each in ended.items()} == {
        "runs": "timeout",
        "waits": "timeout",
        "free": "length",
    }
    assert ended["runs"].token_ids == whole.outputs[0].token_ids[:3]
    assert ended["waits"].token_ids == ()
    assert ended["free"].token_ids == whole.outputs[0].token_ids
    assert engine.stats().pages_used == 0


def test_a_text_without_a_token_is_never_the_best():
    """best_of with fewer seats than texts: those that wait when the time is up have nothing to be compared by."""
    now = [100.0]
    config = Config.from_options({"max_num_seqs": 2, "kv_cache_mb": 2, "packed_linears": "off"})
    engine = Engine(wrap_decoder(decoder("Llama"), None, None), config, clock=lambda: now[0])
    engine.add_request("job", prompts_of(9)[0], SamplingParams(best_of=3, seed=1, max_tokens=20, timeout_s=5))
    for _ in range(8):
        engine.step()
    now[0] = 106.0
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "timeout"
    assert len(output.outputs[0].token_ids) > 0
    assert output.usage.completion_tokens > len(output.outputs[0].token_ids)


def test_the_time_of_a_continued_request_counts_from_its_first_start():
    """ES-061: another engine gives it the rest only, or nothing but what was delivered."""
    now = [100.0]
    config = Config.from_options({"kv_cache_mb": 2, "packed_linears": "off"})
    engine = Engine(wrap_decoder(decoder("Llama"), None, None), config, clock=lambda: now[0])
    (prompt,) = prompts_of(9)
    params = SamplingParams(temperature=0, max_tokens=20, timeout_s=5)
    whole = engine.generate([prompt], params)[0].outputs[0].token_ids
    requests = {}
    for elapsed_s in (0.0, 3.0, 5.0):
        request = engine.prepare(f"after {elapsed_s:g}", prompt, params, Delivered(whole[:4], elapsed_s=elapsed_s))
        engine.admit(request)
        requests[elapsed_s] = request
    engine.advance()
    assert [each.finish_reason for each in requests.values()] == [None, None, "timeout"]
    now[0] = 102.0
    engine.advance()
    assert [each.finish_reason for each in requests.values()] == [None, "timeout", "timeout"]
    assert [tuple(each.token_ids) for each in requests.values()] == [whole[:6], whole[:5], whole[:4]]
    now[0] = 105.0
    engine.advance()
    assert requests[0.0].finish_reason == "timeout"
    assert engine.stats().pages_used == 0


def test_a_request_whose_deadline_passes_fails_before_the_next_step():
    """It runs, waits, or has lost its seat: its pages come back, and the others go on. Nothing more is computed of it.

    A `timeout_s` that has passed earlier ends its text as it is.
    """
    now = [100.0]
    config = Config.from_options({"max_num_seqs": 2, "kv_cache_mb": 2, "packed_linears": "off"})
    engine = Engine(wrap_decoder(decoder("Llama"), None, None), config, clock=lambda: now[0])
    (prompt,) = prompts_of(9)
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = engine.generate([prompt], params)[0].outputs[0].token_ids
    early = replace(params, timeout_s=4)
    wishes = {"runs": (params, 5.0), "preempted": (params, 5.0), "waits": (params, 5.0), "early": (early, 5.0)}
    requests = {name: engine.prepare(name, prompt, one, None, left_s) for name, (one, left_s) in wishes.items()}
    requests["free"] = engine.prepare("free", prompt, params)
    engine.admit(requests["runs"], priority="high")
    engine.admit(requests["preempted"])
    for _ in range(3):
        engine.advance()
    urgent = engine.prepare("urgent", prompt, params)
    engine.admit(urgent, priority="critical")
    for name in ("waits", "early", "free"):
        engine.admit(requests[name], priority="low")
    now[0] = 104.9
    engine.advance()
    assert [each.request_id for each in engine.scheduler.waiting] == ["preempted", "waits", "free"]
    written = {name: requests[name].num_generated for name in ("runs", "preempted", "waits")}
    now[0] = 105.0
    while urgent.finish_reason is None or requests["free"].finish_reason is None:
        engine.advance()
    failures = {name: requests[name].failure for name in ("runs", "preempted", "waits")}
    assert all(isinstance(failure, DeadlinePassed) for failure in failures.values())
    begun = {name: failure.has_begun for name, failure in failures.items() if isinstance(failure, DeadlinePassed)}
    assert begun == {"runs": True, "preempted": True, "waits": False}
    assert (
        {name: requests[name].num_generated for name in written} == written == {"runs": 4, "preempted": 3, "waits": 0}
    )
    assert (requests["early"].finish_reason, requests["early"].failure) == ("timeout", None)
    assert tuple(urgent.token_ids) == tuple(requests["free"].token_ids) == whole
    assert engine.stats().pages_used == 0
