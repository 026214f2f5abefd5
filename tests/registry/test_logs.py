"""Logs are JSON lines, from our loggers and from those of libraries."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from penstock.registry import logs
from penstock.safety.privacy import InputRedactor


@pytest.fixture
def lines() -> Iterator["Lines"]:
    """What is logged between configure() and the end of the test; logging is put back as it was."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    captured = Lines()
    logs.configure("INFO", captured.stream)
    yield captured
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])


class Lines:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    def read(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def one(self) -> dict[str, object]:
        (line,) = self.read()
        return line


def run_python(code: str) -> list[dict[str, object]]:
    """The lines that a fresh interpreter writes to stderr."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    return [json.loads(line) for line in ended.stderr.splitlines()]


def test_line_carries_time_level_logger_and_message(lines: Lines):
    """Every line has ts in UTC, level, logger and the formatted message, and nothing that was not asked for."""
    logger = logging.getLogger("penstock.server")
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "loaded %s in %.1f s", ("mlp", 0.25), None)
    record.created = 1_700_000_000.25
    logger.handle(record)
    line = lines.one()
    assert line | {"ts": ""} == {"ts": "", "level": "info", "logger": "server", "msg": "loaded mlp in 0.2 s"}
    assert list(line) == ["ts", "level", "logger", "msg"]
    written = datetime.fromisoformat(str(line["ts"]))
    assert written.utcoffset() == timedelta(0)
    assert written == datetime.fromtimestamp(record.created, UTC)


def test_extras_are_keys_of_the_line(lines: Lines):
    """A job can be followed by its id: extras are top-level keys, values of any type become text."""
    logging.getLogger("penstock.runtime").info(
        "batch", extra={"job_id": "mlp.1", "batch": 64, "share": np.float32(0.5)}
    )
    line = lines.one()
    assert (line["job_id"], line["batch"], line["share"]) == ("mlp.1", 64, "0.5")


def test_extras_do_not_replace_our_fields(lines: Lines):
    """An extra called like one of the four fields, leaves them as they are."""
    logging.getLogger("penstock.client").info(
        "real", extra={"ts": 0, "level": "none", "logger": "else", "event": "seen"}
    )
    line = lines.one()
    assert (line["level"], line["logger"], line["msg"], line["event"]) == ("info", "client", "real", "seen")


def test_exception_is_one_field_of_one_line(lines: Lines):
    """A traceback does not break the line apart."""
    try:
        raise KeyError("weights")
    except KeyError:
        logging.getLogger("penstock.server").exception("load failed")
    line = lines.one()
    assert line["level"] == "error"
    assert "Traceback" in str(line["exception"])
    assert "KeyError: 'weights'" in str(line["exception"])
    assert "exc_info" not in line


def test_libraries_write_json_too(lines: Lines):
    """Any library's logger goes through the same handler; a message of two lines stays one line."""
    logging.getLogger("kombu.connection").warning("line one\nline two")
    line = lines.one()
    assert (line["logger"], line["msg"]) == ("kombu.connection", "line one\nline two")


def test_warnings_are_lines_too():
    """Python's warnings are logged instead of printed."""
    (line,) = run_python("from penstock.registry import logs; logs.configure(); import warnings; warnings.warn('old')")
    assert line["logger"] == "py.warnings"
    assert "old" in str(line["msg"])


def test_level_filters(lines: Lines):
    """Lines below the level are not written, and not formatted."""
    logging.getLogger("penstock.server").debug("quiet")
    assert lines.read() == []
    logs.configure("DEBUG", lines.stream)
    logging.getLogger("penstock.server").debug("loud")
    assert lines.one()["msg"] == "loud"


def test_configuring_twice_writes_each_line_once(lines: Lines):
    """A second configure replaces the first."""
    logs.configure("INFO", lines.stream)
    logging.getLogger("penstock.server").info("once")
    assert lines.one()["msg"] == "once"


def test_text_that_is_not_unicode_is_still_one_line(lines: Lines):
    """A file name with undecodable bytes does not cost us the line."""
    logging.getLogger("penstock.server").info("bad name %s", "caf\udce9")
    assert lines.one()["msg"] == "bad name caf\udce9"


def test_a_line_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, lines: Lines):
    """A model closed the stream and stderr: the caller of the logger goes on."""
    lines.stream.close()
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr("sys.stderr", gone)
    logging.getLogger("penstock.server").info("lost")


def test_a_field_that_contains_itself_stops_nothing(lines: Lines):
    """A model may log one, and its forward goes on: Python's own formatter leaves extra fields out."""
    settings: dict[str, object] = {}
    settings["parent"] = settings
    logging.getLogger("model").warning("built", extra={"settings": settings})
    logging.getLogger("model").warning("ready")
    assert lines.one()["msg"] == "ready"


def test_messages_of_exceptions_can_be_withheld(lines: Lines):
    """Classes, frames and code of the exception and of its cause are told, their messages are not."""
    logs.configure("INFO", lines.stream, withholds_texts=True)
    try:
        try:
            int("a secret")
        except ValueError as error:
            raise KeyError("another secret") from error
    except KeyError:
        logging.getLogger("penstock.server").exception("failed")
    trace = str(lines.one()["exception"])
    assert trace.splitlines()[-1] == "KeyError"
    assert "ValueError" in trace.splitlines()
    assert f"{__name__.rpartition('.')[2]}.py" in trace
    # The lines of code hold both texts once.
    assert (trace.count("a secret"), trace.count("another secret")) == (1, 1)


def test_lines_are_redacted(lines: Lines):
    """CF-034: the message, extras at any depth, objects and tracebacks; time, level, logger and numbers stay."""
    redactor = InputRedactor(["secret", "server", "info"])
    logs.configure("INFO", lines.stream, redact=redactor.redact_all)
    facts = {"nested": [{"secret": "a secret"}], "error": ValueError("secret"), "number": 7, "path": "\udce9 secret"}
    try:
        raise ValueError("a " + "secret")
    except ValueError:
        logging.getLogger("penstock.server").info("no %s", "secret", extra=facts, exc_info=True)
    line = lines.one()
    assert (line["level"], line["logger"], line["msg"], line["number"]) == ("info", "server", "no [REDACTED]", 7)
    assert line["nested"] == [{"[REDACTED]": "a [REDACTED]"}]
    assert (line["error"], line["path"]) == ("[REDACTED]", "\udce9 [REDACTED]")
    assert str(line["exception"]).endswith("ValueError: a [REDACTED]")
    assert "secret" not in lines.stream.getvalue()


def test_celery_leaves_the_configuration_alone():
    """Connected to Celery's setup_logging signal, configure() keeps Celery's own lines in JSON and unduplicated."""
    code = (
        "import logging\n"
        "from celery import Celery, signals\n"
        "from penstock.registry import logs\n"
        "signals.setup_logging.connect(lambda **_: logs.configure(), weak=False)\n"
        "app = Celery('t')\n"
        "app.log.setup(loglevel='INFO', redirect_stdouts=False)\n"
        "logging.getLogger('celery.worker').info('from celery')\n"
        "logging.getLogger('penstock.server').info('from us')\n"
    )
    assert [(line["logger"], line["msg"]) for line in run_python(code)] == [
        ("celery.worker", "from celery"),
        ("server", "from us"),
    ]
