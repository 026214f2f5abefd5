"""Tracebacks of models: the line of the package's own code, code and no inputs, and never too long to send."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.envelope import MAX_HEADER_BYTES
from penstock.workers.runtime.tracebacks import (
    WITHHELD,
    RaisedElsewhere,
    error_text,
    frames_of,
    message_of,
    name_of,
    placed,
    trace_of,
    trace_of_frame,
)
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
    assert error_text(error).line.encode()


class Unreadable(Exception):
    """An exception of a model that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_exception_that_cannot_be_shown_is_named_by_its_class():
    """A model's own exception may raise while its text is made."""
    error = Unreadable()
    assert message_of(error) == "(its message cannot be read)"
    assert error_text(error).line == "Unreadable: (its message cannot be read)"
    assert trace_of(error).text == "Unreadable: (its message cannot be read)"
    assert placed(error) == ""


def test_exceptions_that_name_each_other_are_shown_once():
    """A circle of causes ends."""
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert trace_of(first).text.count("KeyError") == 1


class Text(str):
    """Text with methods of its own."""

    def __getitem__(self, place: object) -> str:
        raise KeyboardInterrupt

    def encode(self, *_: object) -> bytes:
        raise SystemExit


class NameOfItsOwn(type):
    """A metaclass whose classes have no usable name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # as a model may do
        raise GeneratorExit


class Uncooperative(Exception, metaclass=NameOfItsOwn):
    """Refuses every look at it."""

    def __str__(self) -> str:
        return Text("\ud800" * 1000)

    def _refuse(self) -> object:
        raise KeyboardInterrupt

    __cause__ = __context__ = __traceback__ = __suppress_context__ = args = property(_refuse)


def test_no_exception_can_refuse_its_text(models_root: Path):
    """Properties, a metaclass and a text with methods of their own: class and frames are told, and can be sent."""
    error = Uncooperative()
    try:
        raise error
    except Uncooperative:
        text = error_text(error)
    assert text.name == name_of(error) == "Uncooperative"
    assert text.message.startswith("\\ud800")
    assert len(text.message) == 500
    assert f'{Path(__file__).name}", line' in text.traceback
    assert "".join(text).encode()


def test_an_interrupt_is_not_the_end_of_a_report():
    """`__str__` raises what is no Exception: the class is named."""

    class Interrupting(BaseException):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert error_text(Interrupting()).line == "Interrupting: (its message cannot be read)"


class HostileLoader:
    """A module's loader, as code of a model may leave it behind."""

    def get_filename(self, fullname: str) -> str:
        return "anywhere"

    @property
    def package_file(self) -> str:
        raise SystemExit


def test_a_module_with_a_hostile_loader_has_no_place():
    """The look at its frames raises: class and message are left, of a hung forward nothing."""

    class Spec:
        loader = HostileLoader()

    code = compile("import sys\ndef fail():\n    raise ValueError(sys._getframe())", "anywhere", "exec")
    names: dict[str, Any] = {"__spec__": Spec()}
    exec(code, names)  # noqa: S102 - the module of the test
    with pytest.raises(ValueError, match="frame at") as raised:
        names["fail"]()
    text = error_text(raised.value)
    assert (text.where, text.traceback) == ("", f"ValueError: {raised.value}")
    assert trace_of_frame(raised.value.args[0]) == ("", "")


def test_a_withheld_message_is_nowhere(models_root: Path):
    """Neither in the message nor at the end of the traceback; class, line and code stay."""
    error = raised(models_root, "raise ValueError(f\"{inputs['x'][0, 0]:.0f}\")")
    text = error_text(error, withholds_message=True)
    assert (text.name, text.message, text.where) == ("ValueError", WITHHELD, "model.py, line 5, in predict")
    assert text.traceback.endswith(f"ValueError: {WITHHELD}")
    assert "4711" not in "".join(text)
    assert "4711" in "".join(error_text(error))


def test_frames_of_another_process_stand_for_those_of_this_one(models_root: Path):
    """The place and the frames are the other's; the last line is of the exception that is raised here. They are cut."""
    there = frames_of(raised(models_root, "raise ValueError('there')"))
    here = KeyError("here")
    here.__cause__ = RaisedElsewhere(*there)
    where, text = trace_of(here)
    assert where == "model.py, line 5, in predict"
    assert "raise ValueError('there')" in text
    assert text.endswith("\nKeyError: 'here'")
    here.__cause__ = RaisedElsewhere("\udcff" * 1000, "x\udcff" * 100_000)
    where, text = trace_of(here)
    assert len(where) == 200
    assert len((where + text).encode()) < MAX_HEADER_BYTES / 2
