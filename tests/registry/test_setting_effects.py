"""Every setting has an effect: something reads it, and a test shows what it changes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from penstock.registry.admission import JobBuilder
from penstock.registry.errors import InvalidInput
from penstock.registry.package import load_package
from penstock.registry.settings import Settings, catalogue
from penstock.safety.audit import AuditConfig, AuditLogger
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.registry.setting_reads import keys_that_are_read
from tests.servers import ROOT, RedisServer
from tests.workers.stepped import SteppedHarness, open_harness

KEYS = [setting.key for setting in catalogue()]
HERE = "registry/test_setting_effects.py"
GATEWAY = "producers/gateway/test_server.py"
LIMITS = "producers/gateway/test_limits.py"
API_KEYS = "producers/gateway/test_keys.py"
WEBSOCKET = "producers/gateway/test_websocket.py"
FORMS = "workers/levels/test_form_breakers.py"
DRIFT = "workers/shadow/test_drift.py"
CONFIGURED = "flow/test_configured_worker.py"
OPENING = "workers/cache/test_opening.py"
COST = "workers/observe/test_cost.py"

OF_THE_CHECKS = {"privacy.accept_shared_cache"}
"""Read by the checks at the start of a worker only: that is their whole effect."""
PROOFS = {
    "enabled": "workers/cache/test_cached_answers.py::test_answers_are_not_cached_where_caching_is_off",
    "max_level": "workers/versions/test_version.py::test_jobs_share_a_forward_from_level_2_on",
    "frameworks": "flow/test_formats.py::test_worker_without_a_framework_refuses_its_models_and_never_loads_it",
    "runtime_hosts": "workers/versions/test_version.py::test_a_text_server_must_be_named_by_the_operator",
    "device": "flow/test_configured_worker.py::test_worker_without_a_gpu_falls_back_to_the_cpu",
    "repo_root": "compose/commands/test_run.py::test_worker_command_serves_and_drains",
    "model_version": "workers/versions/test_repository.py::test_models_and_versions_in_the_settings_must_exist",
    "preload": "workers/versions/test_lifecycle.py::test_nothing_is_loaded_at_start_without_preload",
    "load_timeout_s": "workers/test_followed_settings.py::test_loading_has_a_limit_at_start_too",
    "model_memory_mb": "workers/versions/test_version_mishaps.py::test_the_memory_limit_holds_from_the_start",
    "precision": "workers/versions/test_policy.py::test_settings_apply_to_a_package_without_own_values",
    "timeout_seconds": "flow/test_limits.py::test_a_forward_beyond_its_limit_ends_only_its_own_process",
    "max_request_size_mb": f"{HERE}::test_requests_have_the_size_of_the_setting",
    "metrics_buckets": "flow/test_scaling.py::test_counts_of_two_workers_equal_the_jobs_sent",
    "state_redis_url": "compose/rollout/test_ends.py::test_the_store_may_be_another_redis",
    "state_prefix": "flow/test_shared_state.py::test_workers_converge_and_outlive_the_store",
    "state_reconcile_enabled": "compose/rollout/test_ends.py::test_without_reconciliation_there_is_no_store",
    "state_reconcile_interval_s": "flow/test_shared_state.py::test_workers_converge_and_outlive_the_store",
    "batching.enabled": "flow/test_batching.py::test_without_batching_every_forward_has_one_row",
    "batching.max_batch_size": "flow/test_batching.py::test_each_model_has_limits_of_its_own",
    "batching.max_queue_depth": "flow/test_batching.py::test_worker_holds_no_more_than_its_limit",
    "batching.max_queue_bytes": "flow/test_batching.py::test_worker_holds_no_more_bytes_than_its_credit",
    "batching.max_wait_ms": "flow/test_batching.py::test_lone_request_is_not_kept_waiting",
    "batching.target_latency_ms": (
        "flow/test_latency_target.py::test_batches_fall_while_urgent_jobs_would_miss_the_target"
    ),
    "batching.gpu_headroom_pct": "workers/test_followed_settings.py::test_calibration_leaves_the_headroom_that_is_set",
    "batching.single_flight": "workers/versions/test_policy.py::test_equal_jobs_share_answers_where_answers_repeat",
    "compilation.enabled": "workers/levels/test_optimizer_settings.py::test_nothing_is_compiled_where_that_is_off",
    "compilation.backend": "workers/compilation/test_compiler.py::test_cudagraphs_on_a_cpu_are_refused",
    "compilation.cache_dir": "workers/compilation/test_compiler.py::test_cache_folder_follows_its_variable",
    "compilation.warmup_requests": (
        "workers/test_followed_settings.py::test_model_is_run_so_often_before_the_worker_is_ready"
    ),
    "compilation.tolerance": "workers/levels/test_optimizer_settings.py::test_the_tolerance_is_the_one_that_is_set",
    "cache.enabled": "workers/cache/test_cached_answers.py::test_answers_are_not_cached_where_caching_is_off",
    "cache.l1_size": "workers/cache/test_cached_answers.py::test_least_recently_used_answers_leave",
    "cache.l1_max_bytes": f"{HERE}::test_cached_answers_have_the_bytes_of_the_setting",
    "cache.ttl_seconds": f"{HERE}::test_cached_answers_live_as_long_as_the_setting_says",
    "cache.privacy_mode": "workers/test_model_errors.py::test_a_privacy_mode_keeps_texts_of_exceptions_back",
    "privacy.mode": "workers/test_hashes_only.py::test_inputs_are_kept_as_digests_only",
    "privacy.redact_patterns": "workers/test_model_errors.py::test_texts_of_exceptions_are_redacted",
    "privacy.redact_detectors": f"{HERE}::test_detectors_keep_samples_out",
    "open_telemetry.traces": "flow/test_open_telemetry_settings.py::test_spans_are_sent_where_that_is_on",
    "open_telemetry.metrics": "flow/test_open_telemetry_settings.py::test_metrics_are_sent_where_that_is_on",
    "privacy.presidio_entities": "safety/test_presidio.py::test_entities_of_the_settings_need_presidio",
    "privacy.cache_tenant_isolation": (
        "workers/cache/test_cached_answers.py::test_tenants_share_answers_only_if_allowed"
    ),
    "privacy.accept_shared_cache": "workers/process/test_security_start.py::test_worker_with_a_warning_serves",
    "privacy.audit_log_enabled": f"{HERE}::test_changes_are_audited_where_the_settings_say",
    "privacy.audit_log_path": f"{HERE}::test_changes_are_audited_where_the_settings_say",
    "privacy.audit_cache_accesses": "flow/test_audit.py::test_cache_accesses_are_recorded_as_the_setting_says",
    "privacy.audit_group_ms": f"{HERE}::test_audit_entries_wait_for_others_as_long_as_the_setting_says",
    "privacy.seal_payloads": "safety/test_payload_keys.py::test_payloads_are_sealed_in_the_private_modes",
    "privacy.encrypt_at_rest": f"{OPENING}::test_values_are_readable_on_disk_only_where_the_setting_says_so",
    "privacy.encryption_key_source": "safety/test_keys.py::test_every_source_opens_the_same_row",
    "privacy.encryption_key_file": "safety/test_keys.py::test_every_source_opens_the_same_row",
    "privacy.pkcs11_module": "safety/test_hsm.py::test_missing_parts_are_named",
    "privacy.pkcs11_token": "safety/test_hsm.py::test_missing_parts_are_named",
    "privacy.pkcs11_key": "safety/test_hsm.py::test_a_retired_wrapping_key_still_opens",
    "pkcs11_pin": "safety/test_hsm.py::test_a_wrong_pin_is_refused",
    "l2_encryption_key": "safety/test_keys.py::test_the_first_key_of_a_source_seals",
    "audit_key": "safety/test_audit_key.py::test_keys_are_hex_or_base64",
    "cache.redis_url": f"{OPENING}::test_tiers_exist_where_answers_may_outlive_the_process",
    "cache.l2_path": f"{OPENING}::test_the_file_is_where_the_setting_says_and_has_its_bound",
    "cache.l2_max_bytes": f"{OPENING}::test_the_file_is_where_the_setting_says_and_has_its_bound",
    "cache.key_prefix": "workers/cache/test_l3.py::test_the_tier_of_the_settings",
    "cache.socket_timeout_s": "workers/cache/test_l3.py::test_the_tier_of_the_settings",
    "cache.lookup_timeout_ms": (
        "workers/cache/test_shared_tiers.py::test_a_tier_that_hangs_delays_no_job_beyond_the_limit"
    ),
    "cache.producer_lookup": "producers/test_cached_answers.py::test_a_hit_costs_no_message",
    "queue.lease_s": "workers/test_leases.py::test_a_worker_that_loads_what_answers_stays_in_touch",
    "queue.max_crashes": "workers/test_poison.py::test_the_setting_says_after_how_many_crashes",
    "queue.progress_timeout_s": (
        "faults/test_lost_descriptors.py::test_a_drain_without_progress_is_replaced_whatever_the_reason"
    ),
    "queue.drain_grace_s": "faults/test_streaming_models.py::test_drained_stream_goes_to_another_worker",
    "queue.ageing_s": "flow/test_priorities.py::test_low_job_is_not_starved_by_a_flood_of_high_ones",
    "queue.max_depth": "registry/test_admission.py::test_asyncio_submit_many_waits_for_room_too",
    "queue.tenant_max_in_flight": "registry/test_admission.py::test_one_tenant_cannot_fill_the_queue",
    "queue.job_ttl_s": "producers/test_deadlines.py::test_lifetime_is_a_deadline",
    "queue.result_ttl_s": "producers/test_lost_jobs.py::test_after_the_retention_a_lost_job_is_gone",
    "queue.max_event_bytes": "workers/test_streams.py::test_refused_chunk_fails_a_job_whose_model_goes_on",
    "queue.client_tracebacks": (
        "workers/test_model_errors.py::test_a_client_gets_the_traceback_where_the_settings_say_so"
    ),
    "celery.lane": "flow/test_celery.py::test_the_task_endpoint_is_closed_while_jobs_are_signed",
    "celery.default_queue": f"{HERE}::test_followers_without_a_queue_go_to_the_one_of_the_settings",
    "celery.events": "flow/test_configured_worker.py::test_settings_of_the_folder_reach_the_worker",
    "celery.events_interval_ms": "flow/test_celery.py::test_events_wait_for_others_as_long_as_the_setting_says",
    "celery.remote_control": "flow/test_celery.py::test_commands_that_stop_or_change_a_worker_are_refused",
    "safeguards.rate_limit.enabled": f"{LIMITS}::test_limits_are_those_of_the_key_or_settings",
    "safeguards.rate_limit.requests_per_minute": f"{LIMITS}::test_limits_are_those_of_the_key_or_settings",
    "safeguards.rate_limit.tenant_requests_per_minute": f"{API_KEYS}::test_every_limit_is_exact_over_two_gateways",
    "safeguards.rate_limit.address_requests_per_minute": f"{API_KEYS}::test_every_limit_is_exact_over_two_gateways",
    "safeguards.rate_limit.routes": f"{API_KEYS}::test_every_limit_is_exact_over_two_gateways",
    "server.api_keys": "producers/gateway/test_callers.py::test_who_needs_a_key",
    "server.address_header": f"{LIMITS}::test_an_address_has_a_limit_of_its_own",
    "safeguards.input_validation.enabled": (
        "workers/versions/test_repository.py::test_no_input_is_longer_than_the_setting_allows"
    ),
    "safeguards.input_validation.max_sequence_length": (
        "workers/versions/test_repository.py::test_no_input_is_longer_than_the_setting_allows"
    ),
    "server.host": f"{GATEWAY}::test_settings_of_the_server",
    "server.port": f"{GATEWAY}::test_settings_of_the_server",
    "server.grpc_enabled": "producers/gateway/rpc/test_server.py::test_grpc_can_be_left_out",
    "server.grpc_port": "producers/gateway/rpc/test_server.py::test_settings_of_the_port",
    "server.workers": f"{GATEWAY}::test_two_processes_share_port_and_figures",
    "server.max_waiting": f"{GATEWAY}::test_more_requests_than_may_wait_are_503",
    "server.max_streams": "producers/gateway/test_open_streams.py::test_more_streams_than_may_be_open_are_refused",
    "server.client_timeout_s": f"{GATEWAY}::test_slow_and_silent_clients_are_disconnected",
    "server.stop_grace_s": f"{GATEWAY}::test_requests_beyond_the_grace_are_cut_off",
    "batches.path": "producers/gateway/test_openai_files.py::test_another_tenants_files_and_batches_do_not_exist",
    "batches.max_file_mb": "producers/gateway/test_openai_files.py::test_limits_of_files",
    "batches.max_stored_mb": "producers/gateway/test_openai_files.py::test_limits_of_files",
    "batches.keep_s": "producers/gateway/batches/test_opening.py::test_files_live_as_long_as_the_setting_says",
    "batches.max_outstanding": (
        "producers/gateway/test_openai_batches.py::test_outstanding_jobs_of_a_batch_are_bounded"
    ),
    "server.model_control": "producers/gateway/test_model_control.py::test_versions_are_loaded_and_unloaded",
    "server.metrics": "producers/gateway/test_models.py::test_metrics_can_be_left_out",
    "server.websocket_idle_s": f"{WEBSOCKET}::test_the_limits_of_a_connection",
    "server.websocket_requests": f"{WEBSOCKET}::test_the_limits_of_a_connection",
    "server.websocket_messages_per_s": f"{WEBSOCKET}::test_the_limits_of_a_connection",
    "server.allowed_origins": "producers/gateway/test_web_pages.py::test_settings_let_pages_and_names_in",
    "server.allowed_hosts": "producers/gateway/test_web_pages.py::test_settings_let_pages_and_names_in",
    "uvicorn_access_log": f"{GATEWAY}::test_access_lines_are_written_where_the_setting_says",
    "webhooks.allow": "compose/test_webhooks.py::test_stack_delivers_with_the_secret_of_its_home",
    "webhooks.connect_timeout_s": (
        "compose/commands/test_webhooks.py::test_test_connects_within_the_limit_of_the_setting"
    ),
    "webhooks.timeout_s": "compose/commands/test_webhooks.py::test_test_waits_within_the_limit_of_the_setting",
    "webhooks.in_flight": "compose/test_webhooks.py::test_tries_at_a_time_are_those_of_the_settings",
    "webhooks.per_host": "compose/test_webhooks.py::test_tries_at_a_time_are_those_of_the_settings",
    "safety.spot_check_share": (
        "workers/levels/test_spot_check.py::test_there_are_no_checks_without_a_share_or_of_random_models"
    ),
    "safety.min_off_s": f"{FORMS}::test_shortest_time_off_is_that_of_the_settings",
    "safety.max_off_s": f"{FORMS}::test_time_off_doubles_up_to_the_longest_of_the_settings",
    "safety.min_on_s": "workers/levels/test_spot_check.py::test_shortest_time_on_is_that_of_the_settings",
    "safety.min_passes": f"{FORMS}::test_trials_of_a_probe_are_those_of_the_settings",
    "safety.breaker_failures": f"{FORMS}::test_failures_that_open_a_breaker_are_those_of_the_settings",
    "safety.breaker_window_s": f"{FORMS}::test_failures_that_open_a_breaker_are_those_of_the_settings",
    "safety.probe_lease_s": f"{FORMS}::test_lease_of_a_probe_is_that_of_the_settings",
    "safety.drift_smoothing": f"{DRIFT}::test_the_smoothing_is_that_of_the_settings",
    "safety.drift_width": f"{DRIFT}::test_the_width_of_the_control_limit_is_that_of_the_settings",
    "safety.drift_reference_size": f"{DRIFT}::test_the_reference_window_is_that_of_the_settings",
    "safety.drift_adwin_delta": f"{DRIFT}::test_adwin_of_the_settings_finds_a_small_change",
    "cost.hourly_rate": f"{COST}::test_rate_is_that_of_the_settings",
    "cost.gpu_name": f"{COST}::test_rate_is_that_of_the_settings",
    "cost.hourly_rates": f"{COST}::test_rate_is_that_of_the_settings",
    "cost.currency": f"{COST}::test_rate_is_that_of_the_settings",
    "safety.alert_webhooks": "safety/test_alert_hooks.py::test_each_hook_hears_of_each_alert_once",
    "redis_url": "registry/test_stack_file.py::test_an_explicit_url_wins_over_the_running_stack",
    "celery_url": "flow/test_celery.py::test_the_drain_does_not_depend_on_celerys_broker",
    "celery_result_url": "flow/test_celery.py::test_a_result_backend_of_its_own_gets_the_results",
    "home": "compose/test_webhooks.py::test_secret_of_a_home_is_made_once",
    "registry_url": "compose/doctor/test_deployments.py::test_a_registry_that_does_not_open_is_broken",
    "operator_key_file": "compose/commands/test_models.py::test_untrusted_keys_change_nothing",
    "operator_public_keys": "compose/rollout/test_ends.py::test_an_operator_whom_no_worker_trusts_is_refused",
    "tenant_id": "registry/test_admission.py::test_header_carries_what_the_caller_said",
    "trusted_roots": "workers/versions/test_repository.py::test_code_outside_the_trusted_roots_is_not_loaded",
    "signing_keys": "flow/test_celery.py::test_the_task_endpoint_is_closed_while_jobs_are_signed",
    "webhook_secrets": "compose/test_webhooks.py::test_secret_of_a_home_is_made_once",
    "worker.index": "compose/stack/test_fleet.py::test_a_cpu_worker_sees_no_gpu",
    "worker.models": "workers/test_assembly.py::test_a_worker_that_was_started_for_some_models_accepts_no_others",
    "worker.heartbeat_fd": f"{CONFIGURED}::test_worker_that_cannot_work_says_so_in_one_line",
    "worker.metrics_host": f"{CONFIGURED}::test_metrics_are_where_the_settings_say_for_readers_with_their_token",
    "worker.metrics_port": "flow/test_configured_worker.py::test_metrics_port_in_use_is_one_line",
    "worker.metrics_bearer_file": (
        f"{CONFIGURED}::test_metrics_are_where_the_settings_say_for_readers_with_their_token"
    ),
}
"""The test, below tests/, that shows the effect of a setting, by its key."""


# The walk


def test_every_setting_has_a_proof():
    """A new setting needs a test of its effect."""
    assert set(KEYS) == PROOFS.keys()


@pytest.mark.parametrize("key", PROOFS)
def test_proof_exists_and_names_the_setting(key: str):
    """The test is there, and the test, what it is parametrised with or what it calls in its file sets the setting."""
    path, _, name = PROOFS[key].partition("::")
    parts = _parts(ROOT / "tests" / path)
    assert name in parts, f"{PROOFS[key]} is gone. Expected another test that shows the effect of {key}"
    (setting,) = [each for each in catalogue() if each.key == key]
    words = (setting.variable, setting.variable.removeprefix("PENSTOCK_INFERENCE_"), key.rpartition(".")[2])
    assert any(word in text for word in words for text in _reached(parts, name))


@cache
def _parts(file: Path) -> dict[str, str]:
    """The source of each function, class and constant of a file, decorators included."""
    source = file.read_text()
    lines = source.splitlines()
    parts: dict[str, str] = {}
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        begin = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        parts |= dict.fromkeys(names, "\n".join(lines[begin - 1 : node.end_lineno]))
    return parts


def _reached(parts: dict[str, str], name: str) -> Iterator[str]:
    """The source of a test, and of all that it names in its file."""
    waiting, done = {name}, set()
    while waiting:
        done |= waiting
        texts = [parts[each] for each in waiting]
        yield from texts
        waiting = {other for other in parts if other not in done and any(other in text for text in texts)}


def test_every_setting_is_read():
    """A setting that nothing reads is a promise without effect. Comparing it or showing it is no effect."""
    assert set(KEYS) - keys_that_are_read() == OF_THE_CHECKS


def test_settings_of_the_checks_are_read_by_the_checks():
    """Their whole effect is whether a worker starts."""
    assert keys_that_are_read(shown=True) >= OF_THE_CHECKS


# Effects that no other test shows


@pytest.fixture
def harness_of(models_root: Path):
    """Opens harnesses with a model `double`."""
    write_double(models_root)
    opened: list[Iterator[SteppedHarness]] = []

    def open_with(**settings: object) -> SteppedHarness:
        opened.append(open_harness(models_root, **settings))
        return next(opened[-1])

    yield open_with
    for each in opened:
        next(each, None)


@pytest.mark.parametrize(("group_ms", "pauses"), [(0.0, []), (20.0, [0.02])])
def test_audit_entries_wait_for_others_as_long_as_the_setting_says(
    tmp_path: Path, group_ms: float, pauses: list[float]
):
    """privacy.audit_group_ms: entries of so many milliseconds share one sync; 0: each has its own at once."""
    home = {"PENSTOCK_HOME": str(tmp_path)}
    settings = Settings.load(environ=home, cwd=tmp_path, overrides={"privacy.audit_group_ms": group_ms})
    paused: list[float] = []
    with closing(AuditLogger(config=AuditConfig.of(settings), pause=paused.append)) as log:
        log.log_event("gate_decision")
    assert paused == pauses


@pytest.mark.parametrize(("ttl_seconds", "forwards"), [(3.0, 2), (5.0, 1)])
def test_cached_answers_live_as_long_as_the_setting_says(harness_of, ttl_seconds: float, forwards: int):
    """CF-019: four seconds later an equal job is answered from the cache only if its answer lives longer."""
    harness = harness_of(cache={"ttl_seconds": ttl_seconds})
    worker = harness.start_worker()
    found = 0
    for _ in range(2):
        harness.publish("double", 7)
        harness.pass_time(0.5)
        found += len(worker.forwards())
        harness.pass_time(3.5)
    assert found == forwards


@pytest.mark.parametrize("entries", [8, 12])
def test_cached_answers_have_the_bytes_of_the_setting(harness_of, entries: int):
    """The cache in memory holds as many answers as fit; one takes 1296 bytes with what describes it."""
    harness = harness_of(cache={"l1_max_bytes": entries * 1296})
    worker = harness.start_worker()
    harness.publish("double", *range(1, 21))
    worker.forwards()
    memory = worker.drain.parts.answers.memory
    assert (len(memory), memory.nbytes) == (entries, entries * 1296)


@pytest.mark.parametrize(("mebibytes", "fits"), [(1, False), (2, True)])
def test_requests_have_the_size_of_the_setting(models_root: Path, tmp_path: Path, mebibytes: int, fits: bool):
    """A client refuses inputs that are larger than max_request_size_mb."""
    spec = load_package(write_double(models_root)).spec
    settings = Settings.load(environ={}, cwd=tmp_path, overrides={"max_request_size_mb": mebibytes})
    inputs = {"x": np.zeros((2**16 + 1, 4), np.float32)}
    if fits:
        assert JobBuilder.of(settings, settings.keyring).build(spec, inputs).sealed
    else:
        with pytest.raises(InvalidInput, match="Expected at most 1048576"):
            JobBuilder.of(settings, settings.keyring).build(spec, inputs)


@pytest.mark.parametrize("enabled", [True, False])
def test_changes_are_audited_where_the_settings_say(
    shared_redis: RedisServer, models_root: Path, tmp_path: Path, slot: str, enabled: bool
):
    """CF-025, CF-026: a change of the registry is in the folder of privacy.audit_log_path, or nowhere."""
    folder = tmp_path / "elsewhere"
    environ = {
        "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": str(enabled),
        "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_PATH": str(folder),
        "PENSTOCK_REDIS_URL": shared_redis.url,
    }
    package = write_double(models_root, slot)
    shown = penstock(tmp_path / "home", "models", "register", str(package), **environ)
    assert shown.exit_code == 0, shown.output
    written = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert any(slot in text for text in written) == enabled
    assert not (tmp_path / "home" / "audit").exists()


def test_followers_without_a_queue_go_to_the_one_of_the_settings(tmp_path: Path):
    """Celery's application of a worker sends what names no queue to celery.default_queue."""
    code = "from penstock import celeryconfig; print(celeryconfig.task_default_queue)"
    environ = {
        "PATH": "",
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_REDIS_URL": "redis://localhost:1/0",
        "PENSTOCK_INFERENCE_CELERY_DEFAULT_QUEUE": "followers",
    }
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=180
    )
    assert shown.stdout.strip() == "followers"


@pytest.mark.parametrize(("detectors", "samples"), [([], 1), (["email"], 1), (["ssn"], 0)])
def test_detectors_keep_samples_out(models_root: Path, tmp_path: Path, detectors: list[str], samples: int):
    """CF-034: privacy.redact_detectors reaches the reference samples of a served model."""
    from penstock.workers.levels.optimizer import InferenceOptimizer
    from penstock.workers.observe.metrics import InferenceMetrics
    from penstock.workers.runtime.open import open_runtime
    from penstock.workers.versions.tuner import AnsweredJob, BatchObservation

    settings = Settings.load(environ={}, cwd=tmp_path, overrides={"privacy.redact_detectors": detectors})
    optimizer = InferenceOptimizer(
        settings.inference,
        home=tmp_path,
        device="cpu",
        audit=lambda _: None,
        metrics=InferenceMetrics((0.1,)),
        compiler=None,
    )
    profiler = optimizer.attach("v", open_runtime(load_package(write_double(models_root))), "hash", 8)
    job = AnsweredJob("m.1", {"t": np.array(["SSN 123-45-6789"], object)}, {"y": np.ones((1, 4), np.float32)})
    profiler.observe(BatchObservation(1, 0, 0.1, lambda wants: [job] if wants(job.job_id) else []))
    assert profiler.goldens is not None
    assert len(profiler.goldens) == samples
