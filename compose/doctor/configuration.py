"""Checks of the settings against each other, of the home folder, and of the packages under the models root."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.compose.doctor.findings import Finding
from penstock.compose.storage import home_problem
from penstock.registry.errors import ConfigurationError, MissingRequirement
from penstock.registry.package import Package, discover, load_package
from penstock.registry.settings import Settings
from penstock.workers.runtime.requirements import REQUIREMENTS_FILE, check_lines

__all__ = ["check_contradictions", "check_home", "check_packages"]


def check_contradictions(settings: Settings) -> Iterator[Finding]:
    """A warning for each pair of settings that do not fit together."""
    found = [
        Finding("settings", "warning", what, fix)
        for is_contradictory, what, fix in _pairs(settings)
        if is_contradictory
    ]
    yield from found or [Finding("settings", "ok", "no unknown name, no contradiction")]


def check_packages(settings: Settings) -> Iterator[Finding]:
    """The packages under the models root: those that load, and each that does not."""
    root = settings.inference.repo_root
    if not root.is_dir():
        yield Finding("models", "ok", "no models root here: this machine can submit, but it cannot run a worker")
        return
    names = []
    for found in discover(root):
        try:
            package = load_package(found.path, trusted_roots=settings.trusted_roots)
        except ConfigurationError as error:
            yield Finding("models", "broken", str(error), "correct that package, or move it out of the models root")
        else:
            names.append(package.spec.reference)
            yield from _check_requirements(package)
    yield Finding("models", "ok", f"packages that load: {', '.join(names) or 'none'}")


def _check_requirements(package: Package) -> Iterator[Finding]:
    """A warning where this environment does not meet the package's requirements.txt: the worker may run elsewhere."""
    file = package.folder / REQUIREMENTS_FILE
    try:
        if file.is_file():
            check_lines(file.read_text(errors="replace"), package.spec.reference)
    except MissingRequirement as error:
        what, _, fix = str(error).partition(". Expected: ")
        yield Finding("models", "warning", f"a worker here could not load {what}", fix)
    except ConfigurationError as error:
        yield Finding("models", "broken", str(error), "correct that line")


def check_home(settings: Settings) -> Iterator[Finding]:
    """The folder of PENSTOCK_HOME: whether this user can write there, and whether the disk has room."""
    home = settings.home
    if problem := home_problem(home):
        # Keys, locks and the registry of a stack, a worker or an operator lie there; a client needs none of them.
        is_client = bool(settings.redis_url) and not settings.inference.repo_root.is_dir()
        fix = "PENSTOCK_HOME=<a folder of this user, on a disk with room>"
        yield Finding("settings", "warning" if is_client else "broken", problem, fix)
    else:
        state = "can be written to" if home.is_dir() else "is not made yet, and can be"
        yield Finding("settings", "ok", f"PENSTOCK_HOME {state}")


def _pairs(settings: Settings) -> list[tuple[bool, str, str]]:
    """For each pair: whether it is contradictory, the consequence, and the fix."""
    inference = settings.inference
    queue, batching, limit_s = inference.queue, inference.batching, inference.timeout_seconds
    wait_ms, target_ms = batching.max_wait_ms, batching.target_latency_ms
    rows, held = batching.max_batch_size, batching.max_queue_depth
    mode, cache_mode, applies = inference.privacy.mode, inference.cache.privacy_mode, inference.effective_mode
    laxer = "PRIVACY_MODE" if mode != applies else "CACHE_PRIVACY_MODE"
    return [
        (
            queue.lease_s < 1,
            f"a lease of {queue.lease_s:g} s lapses after a short delay of its worker: jobs run twice",
            "PENSTOCK_INFERENCE_QUEUE_LEASE_S=5",
        ),
        (
            queue.job_ttl_s < limit_s,
            f"jobs live {queue.job_ttl_s:g} s, less than one forward may take ({limit_s:g} s)",
            "PENSTOCK_INFERENCE_QUEUE_JOB_TTL_S=86400",
        ),
        (
            batching.enabled and wait_ms > target_ms,
            f"the batching delay may be {wait_ms:g} ms, more than the target latency ({target_ms:g} ms)",
            f"PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS={target_ms / 2:g}",
        ),
        (
            rows > held,
            f"batches of {rows} rows can never fill: a worker holds {held} jobs",
            f"PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_DEPTH={rows * 2}",
        ),
        (
            bool(settings.celery_url) and settings.redis_url is None,
            "PENSTOCK_CELERY_URL is set, but the broker of the jobs is not",
            "PENSTOCK_REDIS_URL=redis://host:6379/0",
        ),
        (
            mode != cache_mode,
            f"two privacy modes are set ({', '.join(sorted((mode, cache_mode)))}): the stricter one applies, {applies}",
            f"PENSTOCK_INFERENCE_{laxer}={applies}",
        ),
    ]
