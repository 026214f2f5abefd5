"""Errors of redis-py -> errors of Penstock: what a server refuses, and why there is no connection. No I/O.

    final(error)      the server refuses this process, or the URL cannot work: BrokerRefused or ConfigurationError
    refusal(error)    an error in an answer: final, a state of the server that passes (BrokerUnavailable), or a key of
                      another type (BrokerDamaged)
    lost(error)       a connection that was lost, and nothing is repeated: BrokerUnavailable
    unanswered(error) no answer within the time-out: BrokerUnavailable

Every text names the address and the side to change. No text holds a user, a password, a path or a payload.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from penstock.registry.broker.broker_url import BrokerAddress
from penstock.registry.broker.foreign_keys import is_foreign
from penstock.registry.broker.redis_scripts import commands_of, keys_of, script_of
from penstock.registry.broker.redis_tls import ServerWithoutTls
from penstock.registry.errors import BrokerDamaged, BrokerRefused, BrokerUnavailable, ConfigurationError, PenstockError
from penstock.registry.queues import key_group, key_type

__all__ = ["final", "lost", "refusal", "speaks_tls", "unanswered"]

_PASSING: Final = frozenset(
    {"MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "BUSY", "READONLY"}
)
"""First words of errors that are about the server's present state, not about our command."""
_CREDENTIALS: Final = frozenset({"NOAUTH", "WRONGPASS"})
_BY_CLASS: Final = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY", NoPermissionError: "NOPERM"}
_IN_SCRIPT: Final = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
_ALERTS: Final = ("CERTIFICATE", "HANDSHAKE_FAILURE", "UNKNOWN_CA", "PROTOCOL_VERSION")
"""Parts of the reasons for which a server ends a handshake, and would end the next one."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
_NO_DATABASE: Final = "DB index is out of range"
_HERE: Final = "the URL of this process (PENSTOCK_REDIS_URL)"


def final(error: BaseException, address: BrokerAddress) -> PenstockError | None:
    """The error for a refusal that no repetition changes; None for a connection that may come back."""
    for cause in _chain(error):
        if isinstance(cause, AuthenticationError):
            return _bad_credentials(str(cause), address)
        if isinstance(cause, NoPermissionError):
            return _not_permitted(cause, address, ())
        if isinstance(cause, ResponseError) and _NO_DATABASE in str(cause):
            return ConfigurationError(
                f"{address}: the server has no database {address.database}. Expected one from 0 to its setting "
                f"`databases` - 1, by default 0 to 15: change {_HERE}, or the server"
            )
        if isinstance(cause, ServerWithoutTls | ssl.SSLError) and (refused := _bad_tls(cause, address)) is not None:
            return refused
        if address.is_tls and isinstance(cause, FileNotFoundError | PermissionError):
            return ConfigurationError(
                f"{address}: a file of certificates in the URL cannot be read ({cause.strerror}). Expected readable "
                "files in ssl_ca_certs, ssl_certfile and ssl_keyfile"
            )
    return None


def refusal(error: ResponseError, address: BrokerAddress, call: Sequence[Any]) -> PenstockError | None:
    """The error for the answer to a call; None for an error of the command itself."""
    word = _first_word(error)
    if word == "OOM":
        return BrokerUnavailable(f"The broker refuses to write: it is out of memory ({address})")
    if word == "NOPERM":
        return _not_permitted(error, address, call)
    if word in _CREDENTIALS:
        return _bad_credentials(str(error), address)
    if word in _PASSING:
        return BrokerUnavailable(f"The broker refuses to work: {word} ({address})")
    if is_foreign(error):
        return _damaged(address, call)
    return final(error, address)


def speaks_tls(address: BrokerAddress) -> BrokerRefused:
    """The error for redis:// to a port with TLS."""
    return BrokerRefused(f"{address}: this port speaks TLS. Expected rediss:// in {_HERE}, or a port without TLS")


def lost(error: BaseException, address: BrokerAddress) -> BrokerUnavailable:
    """The error for a connection that was not made or was lost, where the caller repeats."""
    return BrokerUnavailable(f"The broker does not answer: {_reason(error, address)}")


def unanswered(error: BaseException, address: BrokerAddress, timeout_s: float) -> BrokerUnavailable:
    """The error for a connection that was not made, or was lost and did not come back in time."""
    return BrokerUnavailable(f"The broker did not answer within {timeout_s:g} s: {_reason(error, address)}")


def _bad_credentials(text: str, address: BrokerAddress) -> BrokerRefused:
    if "without any password configured" in text:
        return BrokerRefused(
            f"{address}: the URL has a password, and the server's default user has none. Expected no password in "
            f"{_HERE}, or `requirepass` on the server"
        )
    if "required" in text.lower():
        return BrokerRefused(
            f"{address} asks for a password. Expected user and password in {_HERE}, as in redis://user:password@host"
        )
    return BrokerRefused(
        f"{address} refuses the user or the password. Expected those of the server's users: change {_HERE}, or the "
        "user on the server"
    )


def _bad_tls(cause: BaseException, address: BrokerAddress) -> BrokerRefused | None:
    """None for a connection that ended: TLS calls that an error, too, and a server that restarts does it."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return BrokerRefused(
            f"{address}: the server's certificate is not trusted here ({cause.verify_message.rstrip('.')}). Expected "
            f"its authority in ssl_ca_certs=FILE of {_HERE}, or another certificate on the server"
        )
    reason = getattr(cause, "reason", None) or ""
    if "ALERT" in reason and any(part in reason for part in _ALERTS):
        return BrokerRefused(
            f"{address}: the server ended the TLS handshake ({reason.replace('_', ' ').lower()}). Expected a client "
            f"certificate that it trusts, as ssl_certfile=FILE&ssl_keyfile=FILE in {_HERE}, and a TLS version that "
            "both sides have"
        )
    if isinstance(cause, ServerWithoutTls) or reason in _NO_TLS:
        return BrokerRefused(
            f"{address}: this port does not speak TLS. Expected redis:// in {_HERE}, or a port with TLS on the server"
        )
    return None


def _not_permitted(error: BaseException, address: BrokerAddress, call: Sequence[Any]) -> BrokerRefused:
    """Names the command or the groups of keys: Redis says which of the two is missing, and never which key."""
    text, words = str(error), list(call)
    script = script_of(words)
    if re.search(r"\bkeys?\b", text) and words:
        missing = f"the keys {', '.join(dict.fromkeys(map(key_group, keys_of(words))))}"
    elif script and "executing the script" in text:
        missing = f"the commands {', '.join(commands_of(script))}"
    else:
        named = re.search(r"run the '([a-z|]+)' command", text)
        missing = f"the command {(named[1] if named else str(words[0]) if words else 'of this call').upper()}"
    step = f"`{script}` needs" if script else "expected"
    return BrokerRefused(
        f"The broker refuses to work: NOPERM ({address}). This user lacks a right: {step} {missing}. Change the user's "
        "rules on the server (compose/redis has those of each role), or the user in the URL"
    )


def _damaged(address: BrokerAddress, call: Sequence[Any]) -> BrokerDamaged:
    """A foreign key stays: this user may not quarantine it, or another program writes it all the time."""
    expected = dict.fromkeys(f"{key_group(key)} ({key_type(key)})" for key in keys_of(list(call)))
    which = f"one of {', '.join(expected)}" if expected else "a key of this call"
    return BrokerDamaged(
        f"The broker's data are damaged ({address}): another program has written to a key of Penstock, and the key "
        f"holds another type than expected: {which}. A worker or an operator quarantines it; `penstock doctor` shows it"
    )


def _first_word(error: ResponseError) -> str:
    """The first word of a server's error, such as OOM or READONLY.

    redis-py removes the word from some errors and makes a class of it. Redis 6.2 puts the name and line of the script
    before the error of a command in it.
    """
    for kind, word in _BY_CLASS.items():
        if isinstance(error, kind):
            return word
    if "The user executing the script can't" in str(error):
        return "NOPERM"
    found = _IN_SCRIPT.search(str(error))
    return found[1] if found else str(error).partition(" ")[0]


def _reason(error: BaseException, address: BrokerAddress) -> str:
    for cause in _chain(error):
        if isinstance(cause, socket.gaierror):
            return f"the host name of {address} is not known"
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            return f"nothing listens at {address}"
        if isinstance(cause, InvalidResponse):
            return f"the server at {address} does not speak the Redis protocol"
        if isinstance(cause, TimeoutError | redis.TimeoutError):
            return f"{address} timed out"
    return f"the connection to {address} was lost"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes: redis-py makes its own from those of the system."""
    while error is not None:
        yield error
        error = error.__cause__ or (error.__context__ if _is_of_redis_py(error.__context__) else None)


def _is_of_redis_py(context: BaseException | None) -> bool:
    """Whether redis-py caught it. Otherwise the caller was handling an error of its own when it called us."""
    caught = context.__traceback__ if context is not None else None
    return caught is not None and str(caught.tb_frame.f_globals.get("__name__")).partition(".")[0] == "redis"
