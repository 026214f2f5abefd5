"""Method and path -> route. A fixed path costs one look-up, another one a look at the routes of its first words.

Route("POST", "/v1/models/{name}:predict", predict) -> Routes.find("POST", "/v1/models/mlp:predict")
                                                       -> (route, {"name": "mlp"})
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from penstock.producers.gateway.callers import Needs
from penstock.producers.gateway.exchange import JSON, Exchange, RequestRefused
from penstock.producers.gateway.problems import PROBLEM_JSON, Problem, as_problem_json

__all__ = ["PROBLEM", "ErrorShape", "Handler", "Method", "Route", "Routes", "path_pattern"]

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
Method = Literal["GET", "POST", "DELETE"]
_WORD: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How the clients of a protocol expect an error. view: the type of its body, for the OpenAPI document."""

    write: Callable[[Problem], bytes]
    view: Any
    media_type: bytes = JSON

    def __call__(self, problem: Problem) -> tuple[bytes, bytes]:
        """(body, content type) of an error."""
        return self.write(problem), self.media_type


class ProblemView(msgspec.Struct):
    """How a request failed (RFC 9457). type: a name for programs. detail: what was expected."""

    type: str
    title: str
    status: int
    detail: str


PROBLEM: Final = ErrorShape(as_problem_json, ProblemView, PROBLEM_JSON)
"""An error of our own routes."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route. summary, takes, gives: what the OpenAPI document says of it; types are msgspec's.

    also_takes, also_gives: content types of the body and of the answer beside JSON. error: the shape of its errors.
    needs: what its caller must be allowed; None: to look for GET, else to submit.
    """

    method: Method
    path: str
    handler: Handler
    summary: str
    takes: Any = None
    gives: Any = None
    status: int = 200
    parameters: Mapping[str, str] | None = None
    """Query parameters and headers, each with its description. A header's name begins with a capital letter."""
    error: ErrorShape = PROBLEM
    also_takes: tuple[bytes, ...] = ()
    also_gives: tuple[bytes, ...] = ()
    """Where there is no type in `gives`, all content types of the answer."""
    other_statuses: tuple[int, ...] = ()
    """Further statuses whose answer has the type of `gives`."""
    needs: Needs | None = None
    form: Mapping[str, Any] | None = None
    """The JSON schema of the body, where it is a form (multipart/form-data)."""

    @property
    def right(self) -> Needs:
        """What its caller must be allowed."""
        return self.needs or ("look" if self.method == "GET" else "submit")

    @property
    def words(self) -> tuple[str, ...]:
        """The names in its path."""
        return tuple(_WORD.findall(self.path))

    def pattern(self) -> re.Pattern[str]:
        """What matches its path."""
        return path_pattern(self.path)


def path_pattern(path: str) -> re.Pattern[str]:
    """What matches a path with words, such as {name}."""
    parts = _WORD.split(path)
    # A word ends at a slash, and at the colon of a verb.
    texts = [re.escape(part) if index % 2 == 0 else f"(?P<{part}>[^/:]+)" for index, part in enumerate(parts)]
    return re.compile("".join(texts) + r"\Z")


class Routes:
    """All routes of the gateway."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        self._errors: dict[str, ErrorShape] = {}
        """By the first word of a path, the errors of its routes, if all are alike."""
        for route in routes:
            word = _first_word(route.path)
            is_alike = self._errors.setdefault(word, route.error) is route.error
            self._errors[word] = route.error if is_alike else PROBLEM
        self._fixed: dict[str, dict[str, Route]] = {}
        self._open: dict[str, list[tuple[re.Pattern[str], dict[str, Route]]]] = {}
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            if "{" not in path:
                self._fixed[path] = methods
            else:
                # /v1/models/{name} is looked for under "/v1/models".
                stem = "/".join(path.split("/", 3)[:3])
                self._open.setdefault(stem, []).append((next(iter(methods.values())).pattern(), methods))

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route, and the words of its path. Raises RequestRefused: 404, or 405 with the methods that exist."""
        methods, words = self._methods(path)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise RequestRefused(
                405, f"This path has no such method. Expected {allowed}", ((b"allow", allowed.encode("ascii")),)
            )
        return route, words

    def error_of(self, path: str) -> ErrorShape:
        """The shape of an error of a path without a route, as the clients of its protocol expect it."""
        return self._errors.get(_first_word(path), PROBLEM)

    def _methods(self, path: str) -> tuple[Mapping[str, Route], Mapping[str, str]]:
        if (fixed := self._fixed.get(path)) is not None:
            return fixed, {}
        for pattern, methods in self._open.get("/".join(path.split("/", 3)[:3]), ()):
            if (found := pattern.match(path)) is not None:
                return methods, found.groupdict()
        raise RequestRefused(404, "There is no such path. Expected one of the OpenAPI document at /openapi.json")


def _first_word(path: str) -> str:
    return path.split("/", 2)[1] if "/" in path else ""
