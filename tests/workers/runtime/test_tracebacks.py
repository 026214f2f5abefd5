"""Tracebacks of models: the line of the package's own code, code and no inputs, and never too long to send."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from penstock.registry.envelope import MAX_HEADER_BYTES
from penstock.workers.runtime.tracebacks import message_of, placed, repr_of, trace_of
from tests.packages import write_package
from tests.workers.runtime.formats import opened

MODEL = """
def build():
    def predict(inputs):
        if inputs["x"].any():
            {failure}
        return {{"y": inputs["x"]}}
    return predict
"""
"""Works in its warm-up, and then raises for inputs other than 0."""


def raised(root: Path, failure: str, beside: str = "") -> BaseException:
    """What a model raises at the line `failure`; `beside` is the source of a second module, `parts/maths.py`."""
    folder = write_package(root, "raiser", MODEL.format(failure=failure))
    if beside:
        (folder / "parts").mkdir()
        (folder / "parts" / "maths.py").write_text(textwrap.dedent(beside))
    runtime = opened(folder)
    try:
        runtime.run(runtime.prepare([{"x": np.full((1, 4), 47110815, np.float32)}]))
    except Exception as error:
        return error
    finally:
        runtime.close()
    raise AssertionError("the model raised nothing")


def test_a_trace_names_the_line_of_the_package_and_shows_its_code(models_root: Path):
    """The file is relative to the package; the text begins with the package's first frame and has no value in it."""
    trace = trace_of(raised(models_root, "return {'y': inputs['k']}"))
    assert trace.where == "model.py, line 5, in predict"
    first, file, code, *_, last = trace.text.splitlines()
    assert first == "Traceback (most recent call last):"
    assert file == f'  File "{models_root}/raiser/1/model.py", line 5, in predict'
    assert code.strip() == "return {'y': inputs['k']}"
    assert last == "KeyError: 'k'"
    assert "47110815" not in trace.text


def test_the_last_own_frame_counts(models_root: Path):
    """A module below the package's folder called the library that raised: its line is named, not the library's."""
    maths = """
    import json

    def read(text):
        return json.loads(text)
    """
    trace = trace_of(raised(models_root, "from .parts.maths import read; read('[')", maths))
    assert trace.where == "parts/maths.py, line 5, in read"
    assert "json/decoder.py" in trace.text


def test_an_exception_that_a_framework_replaced_keeps_its_place(models_root: Path):
    """Of an error outside of the package, the frame of the exception that led to it is named."""
    inner = raised(models_root, "raise ValueError('inner')")
    try:
        try:
            raise inner
        except ValueError as error:
            raise MemoryError("the device is full") from error
    except MemoryError as error:
        outer = error
    trace = trace_of(outer)
    assert trace.where == "model.py, line 5, in predict"
    assert trace.text.splitlines()[-1] == "MemoryError: the device is full"


def test_messages_of_earlier_exceptions_are_left_out(models_root: Path):
    """Only the message of the exception itself is shown, as everywhere; a message may hold inputs."""
    source = """
    def fail():
        try:
            raise KeyError("first secret")
        except KeyError as error:
            raise ValueError("last") from error
    """
    text = trace_of(raised(models_root, "from .parts.maths import fail; fail()", source)).text
    assert "KeyError\n\nThe exception above was the direct cause of the following one:" in text
    assert text.endswith("ValueError: last")
    # The line of code that raised it is code of the model.
    assert text.count("first secret") == text.count('raise KeyError("first secret")') == 1


def test_code_outside_of_packages_has_no_place():
    """An error of the framework alone has its whole traceback and names no file of a package."""
    try:
        np.concatenate([])
    except ValueError as error:
        trace = trace_of(error)
    assert trace.where == ""
    assert Path(__file__).name in trace.text
    assert trace.text.endswith("ValueError: need at least one array to concatenate")


def test_a_trace_can_always_be_sent(models_root: Path):
    """Endless recursion with a long message that UTF-8 cannot encode: shortened to a part of what a header may have."""
    source = """
    def even(n, text):
        return odd(n + 1, text)

    def odd(n, text):
        if n > 400:
            raise ValueError(text)
        return even(n + 1, text)
    """
    failure = "from .parts.maths import even; even(0, '\\ud800' * 100_000)"
    error = raised(models_root, failure, source)
    text = trace_of(error).text
    assert len(text.encode()) < MAX_HEADER_BYTES / 2
    assert "characters left out]" in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert message_of(error).startswith(r"\ud800\ud800")
    assert repr_of(error).encode()


class Unreadable(Exception):
    """An exception of a model that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_exception_that_cannot_be_shown_is_named_by_its_class():
    """A model's own exception may raise while its text is made."""
    error = Unreadable()
    assert message_of(error) == "(its message cannot be read)"
    assert repr_of(error) == "Unreadable"
    assert trace_of(error).text == "Unreadable: (its message cannot be read)"
    assert placed(error) == ""


def test_exceptions_that_name_each_other_are_shown_once():
    """A circle of causes ends."""
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert trace_of(first).text.count("KeyError") == 1
