"""An exception of a model -> the line of the package's own code, and a traceback as text.

A traceback holds code and never values. The message of the exception may hold inputs: it is shortened, and the messages
of the exceptions that led to it are left out.
"""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType
from typing import Final, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "MESSAGE_CHARACTERS",
    "ModelTrace",
    "PackageSource",
    "message_of",
    "placed",
    "repr_of",
    "trace_of",
    "trace_of_frame",
]

MESSAGE_CHARACTERS: Final = 200
"""Of the message of an exception, at the end of its traceback and in a log line."""
_MOST_CHARACTERS: Final = 8_000
_FIRST_CHARACTERS: Final = 2_000
_MOST_EXCEPTIONS: Final = 5
_MOST_FRAMES: Final = 200


@runtime_checkable
class PackageSource(Protocol):
    """The loader of a module of a package."""

    @property
    def package_file(self) -> str:
        """The source of the module, relative to the package."""

    def get_filename(self, fullname: str, /) -> str:
        """The path of the source, as frames have it."""


class ModelTrace(NamedTuple):
    """Where a model raised an exception.

    where: `model.py, line 7, in predict`, the last frame in a file of the package; empty if no such frame exists. A
    framework may have replaced the exception of the package: then the frame is of the one that led to it.
    text: the traceback, from the first frame in a file of the package on if one exists.
    """

    where: str
    text: str


def trace_of(error: BaseException) -> ModelTrace:
    """The trace of an exception that a model raised. Holds no frame, so it keeps nothing of the forward alive."""
    earlier = _earlier(error)
    own = _own_frames(error.__traceback__)
    begin = own[0].traceback if own else error.__traceback__
    text = _frames(begin) + f"{type(error).__name__}: {message_of(error)}"
    for each in earlier:
        text = f"{_frames(each.error.__traceback__)}{type(each.error).__name__}\n\n{each.link}\n\n{text}"
        own = own or _own_frames(each.error.__traceback__)
    return ModelTrace(own[-1].place if own else "", _shortened(_encodable(text)))


def trace_of_frame(frame: FrameType) -> ModelTrace:
    """Where a thread that runs a model is now."""
    frames = [frame]
    while (caller := frames[-1].f_back) is not None and len(frames) < _MOST_FRAMES:
        frames.append(caller)
    own = [each for each in frames if _own_file(each)]
    lines = traceback.StackSummary.extract((each, each.f_lineno) for each in reversed(frames)).format()
    text = "Stack (most recent call last):\n" + "".join(lines)
    return ModelTrace(_place(own[0], own[0].f_lineno) if own else "", _shortened(_encodable(text.rstrip())))


def placed(error: BaseException) -> str:
    """` (model.py, line 7, in build)`, for the end of a message; empty without a frame in a file of the package."""
    where = trace_of(error).where
    return f" ({where})" if where else ""


def message_of(error: BaseException, characters: int = MESSAGE_CHARACTERS) -> str:
    """The message of an exception, shortened. A model's own exception may have no text that can be made."""
    try:
        return _encodable(str(error)[:characters])
    except Exception:  # the class is the model's, and may raise anything
        return "(its message cannot be read)"


def repr_of(error: BaseException) -> str:
    """The exception in one line, shortened."""
    try:
        return _encodable(repr(error)[:MESSAGE_CHARACTERS])
    except Exception:  # as in message_of
        return type(error).__name__


class _OwnFrame(NamedTuple):
    traceback: TracebackType
    place: str


def _own_frames(trace: TracebackType | None) -> list[_OwnFrame]:
    own = []
    while trace is not None:
        if _own_file(trace.tb_frame):
            own.append(_OwnFrame(trace, _place(trace.tb_frame, trace.tb_lineno)))
        trace = trace.tb_next
    return own


def _place(frame: FrameType, line: int) -> str:
    place = f"{_own_file(frame)}, line {line}, in {frame.f_code.co_name}"
    return _encodable(place[:MESSAGE_CHARACTERS])


def _own_file(frame: FrameType) -> str:
    """The file of a package that this frame runs, relative to the package; empty for all other code."""
    loader = getattr(frame.f_globals.get("__spec__"), "loader", None)
    if not isinstance(loader, PackageSource) or frame.f_code.co_filename != loader.get_filename(""):
        return ""
    return loader.package_file


class _Earlier(NamedTuple):
    error: BaseException
    link: str


def _earlier(error: BaseException) -> list[_Earlier]:
    """The exceptions that led to this one, latest first."""
    found: list[_Earlier] = []
    while len(found) < _MOST_EXCEPTIONS:
        earlier, link = error.__cause__, "The exception above was the direct cause of the following one:"
        if earlier is None and not error.__suppress_context__:
            earlier, link = error.__context__, "While the exception above was handled, the following one occurred:"
        if earlier is None or any(earlier is each.error for each in found):
            break
        found.append(_Earlier(earlier, link))
        error = earlier
    return found


def _frames(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    # From the end: that is where it was raised.
    lines = traceback.extract_tb(trace, limit=-_MOST_FRAMES).format()
    return "Traceback (most recent call last):\n" + "".join(lines)


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    last = _MOST_CHARACTERS - _FIRST_CHARACTERS
    return f"{text[:_FIRST_CHARACTERS]}\n[{len(text) - _MOST_CHARACTERS} characters left out]\n{text[-last:]}"


def _encodable(text: str) -> str:
    """Lone surrogates cannot be sent; they stand in paths that are no UTF-8, for example."""
    return text.encode("utf-8", "backslashreplace").decode()
