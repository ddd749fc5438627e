"""What a store's failure means: worth another try, a refused create-only write, and what its user should do.

Owns: the reading of errors of local disks, fsspec drivers and S3 clients. Imports none of them.
"""

from __future__ import annotations

import errno
from typing import Any, Final, cast

_EXPIRED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired", "400"}
)
"""Codes for keys that were good. "400" is an answer without a body, to HEAD, which S3 gives for an expired token."""


class CutShort(ConnectionError):
    """Fewer bytes arrived than the object has, and nothing else was wrong."""


def _answer(error: BaseException) -> dict[str, Any]:
    """The answer that became this error, as botocore parsed it; empty if there was none."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return cast("dict[str, Any]", response) if isinstance(response, dict) else {}


def http_status(error: BaseException) -> int | None:
    """Status code of the answer that became this error; None if there was no answer."""
    status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _code(error: BaseException) -> str | None:
    return _answer(error).get("Error", {}).get("Code")


def is_expired(error: BaseException) -> bool:
    """The keys were good and are no longer: whoever gave them renews them, so that it is worth trying again."""
    return _code(error) in _EXPIRED


def is_refused_key(error: BaseException) -> bool:
    """The store refused who asked; a connection that reads the keys anew may be let in."""
    return isinstance(error, PermissionError) or is_expired(error) or http_status(error) == 401


def is_lost_upload(error: BaseException) -> bool:
    """The parts of an upload are gone: they were put together already, and that answer was lost."""
    return _code(error) == "NoSuchUpload"


def is_refused_condition(error: BaseException) -> bool:
    """Create-only was refused. The error differs by server: FileExistsError, or errno 22 that names the condition."""
    if isinstance(error, FileExistsError):
        return True
    return isinstance(error, OSError) and error.errno == errno.EINVAL and "condition" in str(error).lower()


def advice(error: BaseException, url: str) -> str:
    """The likely cause and what to do, for the end of a message about the store at `url`."""
    code = error.errno if isinstance(error, OSError) else None
    if is_expired(error):
        return "the credentials have expired; renew them (AWS_SESSION_TOKEN or the profile), then run again"
    about_keys = any(word in type(error).__name__ for word in ("Credential", "Profile", "Token"))
    if is_refused_key(error) or about_keys:
        if "://" in url:
            return "no permission; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the profile)"
        return "no permission; check the owner and mode of the folder"
    if isinstance(error, FileNotFoundError) and "://" in url:
        bucket = "/".join(url.split("/")[:3])
        return f"bucket {bucket} does not exist or is not visible to these credentials; create it or correct the URL"
    if isinstance(error, FileNotFoundError):
        return "the folder cannot be made there; choose another folder"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full or the quota used up; free space, keep fewer checkpoints, or choose another folder"
    if code == errno.EROFS:
        return "the file system is read-only; choose another folder"
    if isinstance(error, NotADirectoryError):
        return "a file is where a folder must be; move it away or choose another folder"
    if code in (errno.EPERM, errno.ENOTSUP) and "://" not in url:
        return "the file system has no hard links, so a create-only write is impossible; choose another folder"
    if isinstance(error, CutShort):
        return "the connection, or a proxy on the way, cuts what it carries; check the network, then run again"
    if isinstance(error, ValueError):
        return "the driver takes no such value; check AWS_ENDPOINT_URL_S3 (http://HOST:PORT) and the URL"
    if type(error).__module__.startswith(("botocore", "aiohttp")) or isinstance(error, (TimeoutError, ConnectionError)):
        return "the store does not answer; check AWS_ENDPOINT_URL_S3 and the network, then run again"
    return "the store refused or failed; see the cause, then run again"
