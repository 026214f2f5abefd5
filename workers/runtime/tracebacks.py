"""An exception of a model -> its class, its message, the line of the package's own code, and a traceback, as text.

    error -- error_text --> ErrorText: cut, encodable, without the exception --> log, failure, another process

A traceback holds code and never values. The message of the exception may hold inputs: it is shortened, withheld where
the settings ask for that, and the messages of the exceptions that led to it are left out.

The class of an exception is the model's code: its methods and properties may raise anything, return anything, or have
any text. So attributes are read past the class, and no function of this module raises.
"""

from __future__ import annotations

import linecache
import traceback
from collections import deque
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "FAILURE_CHARACTERS",
    "MESSAGE_CHARACTERS",
    "WITHHELD",
    "ErrorText",
    "ModelTrace",
    "PackageSource",
    "RaisedElsewhere",
    "error_text",
    "frames_of",
    "message_of",
    "name_of",
    "placed",
    "trace_of",
    "trace_of_frame",
]

MESSAGE_CHARACTERS: Final = 200
"""Of the message of an exception, at the end of its traceback and in a log line."""
FAILURE_CHARACTERS: Final = 500
"""Of the message of an exception, for the client of its job."""
_REDACTED_CHARACTERS: Final = 8_000
"""Of the message of an exception, in which is searched for personal data."""
WITHHELD: Final = "(text withheld: privacy.mode)"
"""In the place of a message that the privacy mode keeps back."""
_UNREADABLE: Final = "(its message cannot be read)"
_MOST_CHARACTERS: Final = 8_000
_FIRST_CHARACTERS: Final = 2_000
_MOST_EXCEPTIONS: Final = 5
_MOST_FRAMES: Final = 200
_KNOWN_FRAMES: Final = 1024
"""Places in the code whose texts are kept."""


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


class ErrorText(NamedTuple):
    """An exception as text that can be sent and stored. where, traceback: see ModelTrace.

    name: of its class. message: at most FAILURE_CHARACTERS, or WITHHELD.
    """

    name: str
    message: str
    where: str
    traceback: str

    @property
    def line(self) -> str:
        """Class and message, for a log line."""
        return f"{self.name}: {self.message[:MESSAGE_CHARACTERS]}"


class RaisedElsewhere(Exception):
    """The cause of an exception that was raised in another process: where, and the frames that `frames_of` gave there.

    The other process is not trusted to have cut them.
    """

    def __init__(self, where: str, frames: str) -> None:
        self.where: Final = _plain(where, MESSAGE_CHARACTERS)
        self.frames: Final = _shortened(_plain(frames, 2 * _MOST_CHARACTERS))
        super().__init__(f'\n"""\n{self.frames}"""')


def error_text(
    error: BaseException, *, withholds_message: bool = False, redact: Callable[[str], str] | None = None
) -> ErrorText:
    """The text of an exception. withholds_message: keep it to class, file and line; also in the traceback.

    redact: changes the message before it is cut: a cut could leave a part that no pattern finds.
    """
    name = name_of(error)
    message = WITHHELD if withholds_message else message_of(error, FAILURE_CHARACTERS, redact)
    where, text = _trace(error, f"{name}: {message[:MESSAGE_CHARACTERS]}")
    return ErrorText(name, message, where, text)


def trace_of(error: BaseException) -> ModelTrace:
    """The trace of an exception that a model raised. Holds no frame, so it keeps nothing of the forward alive."""
    return _trace(error, f"{name_of(error)}: {message_of(error)}")


def frames_of(error: BaseException) -> ModelTrace:
    """As `trace_of`, without the last line of the text, which has the message."""
    return _trace(error, "")


def trace_of_frame(frame: FrameType) -> ModelTrace:
    """Where a thread that runs a model is now."""
    try:
        return _trace_of_frame(frame)
    except BaseException:  # the loader of its module may raise anything
        return ModelTrace("", "")


def _trace_of_frame(frame: FrameType) -> ModelTrace:
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


def message_of(
    error: BaseException, characters: int = MESSAGE_CHARACTERS, redact: Callable[[str], str] | None = None
) -> str:
    """The message of an exception, shortened. A model's own exception may have no text that can be made."""
    try:
        text = str(error)
        # Only the beginning: a model may put a whole input into its exception.
        whole = text if redact is None else redact(_plain(text, _REDACTED_CHARACTERS))
        return _plain(whole, characters)
    except BaseException:  # the class is the model's, and may raise anything
        return _UNREADABLE


def name_of(error: BaseException) -> str:
    """The name of the class of an exception, past a metaclass with a name of its own."""
    return _plain(type.__dict__["__name__"].__get__(type(error)), MESSAGE_CHARACTERS)


def _trace(error: BaseException, last_line: str) -> ModelTrace:
    try:
        return _model_trace(error, last_line)
    except BaseException:  # a property of the exception, or the loader of its module, may raise anything
        return ModelTrace("", last_line)


def _model_trace(error: BaseException, last_line: str) -> ModelTrace:
    if type(cause := _attribute(error, "__cause__")) is RaisedElsewhere:
        return ModelTrace(cause.where, cause.frames + last_line)
    earlier = _earlier(error)
    trace = _attribute(error, "__traceback__")
    own = _own_frames(trace)
    text = _frames(own[0].traceback if own else trace) + last_line
    for each in earlier:
        trace = _attribute(each.error, "__traceback__")
        text = f"{_frames(trace)}{name_of(each.error)}\n\n{each.link}\n\n{text}"
        own = own or _own_frames(trace)
    return ModelTrace(own[-1].place if own else "", _shortened(_encodable(text)))


def _attribute(error: BaseException, name: str) -> Any:
    """An attribute of BaseException itself, whatever the class of the exception puts in its place."""
    return BaseException.__dict__[name].__get__(error)


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
    if type(loader) is SourceFileLoader:
        # A module of the library: most frames are, and the question below takes long.
        return ""
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
        earlier, link = _attribute(error, "__cause__"), "The exception above was the direct cause of the following one:"
        if earlier is None and not _attribute(error, "__suppress_context__"):
            earlier = _attribute(error, "__context__")
            link = "While the exception above was handled, the following one occurred:"
        if earlier is None or any(earlier is each.error for each in found):
            break
        found.append(_Earlier(earlier, link))
        error = earlier
    return found


def _frames(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    # From the end: that is where it was raised.
    frames: deque[_Frame] = deque(maxlen=_MOST_FRAMES)
    while trace is not None:
        frame = trace.tb_frame
        # The loader of a package has the source, not the disk.
        linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
        frames.append(_frame_at(frame.f_code, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    return "Traceback (most recent call last):\n" + "".join(_Stack(frames).format())


class _Frame(traceback.FrameSummary):
    """A place in the code, with its text."""

    __slots__ = ("text",)
    text: str


class _Stack(traceback.StackSummary):
    """Frames whose texts are known; repeated ones are told once."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **_options: Any) -> str:
        """See StackSummary.format_frame_summary."""
        return frame_summary.text if isinstance(frame_summary, _Frame) else super().format_frame_summary(frame_summary)


_known: Final[dict[tuple[int, int], tuple[CodeType, _Frame]]] = {}
"""Frames by code and instruction. By the code itself: codes of two files can be equal."""


def _frame_at(code: CodeType, instruction: int, line: int) -> _Frame:
    """The frame of this instruction. A model that fails every job fails in few places, and each text takes 0.1 ms."""
    known = _known.get((id(code), instruction))
    if known is None:
        if len(_known) >= _KNOWN_FRAMES:
            _known.clear()
        known = _known[id(code), instruction] = (code, _new_frame(code, instruction, line))
    return known[1]


def _new_frame(code: CodeType, instruction: int, line: int) -> _Frame:
    linecache.checkcache(code.co_filename)
    _, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    frame = _Frame(
        code.co_filename,
        line,
        code.co_name,
        lookup_line=False,
        end_lineno=end_line,
        colno=column,
        end_colno=end_column,
    )
    frame.text = traceback.StackSummary().format_frame_summary(frame)
    return frame


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    last = _MOST_CHARACTERS - _FIRST_CHARACTERS
    return f"{text[:_FIRST_CHARACTERS]}\n[{len(text) - _MOST_CHARACTERS} characters left out]\n{text[-last:]}"


def _plain(text: str, characters: int) -> str:
    """The text, cut and encodable. Not by its own methods: it may be of a subclass of str."""
    cut = str.__getitem__(text, slice(characters))
    return _encodable(cut)[:characters]


def _encodable(text: str) -> str:
    """Lone surrogates cannot be sent; they stand in paths that are no UTF-8, for example."""
    return str.encode(text, "utf-8", "backslashreplace").decode()
