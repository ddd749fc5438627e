"""What a store's failure means: worth another try, a refused create-only write, and what its user should do.

Owns: the reading of errors of local disks, fsspec drivers and S3 clients. Imports none of them.
"""

from __future__ import annotations

import errno


def http_status(error: BaseException) -> int | None:
    """Status code of the answer that became this error; None if there was no answer."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return status if isinstance(status, int) else None


def is_refused_condition(error: BaseException) -> bool:
    """Create-only was refused. The error differs by server: FileExistsError, or errno 22 that names the condition."""
    if isinstance(error, FileExistsError):
        return True
    return isinstance(error, OSError) and error.errno == errno.EINVAL and "condition" in str(error).lower()


def advice(error: BaseException, url: str) -> str:
    """The likely cause and what to do, for the end of a message about the store at `url`."""
    code = error.errno if isinstance(error, OSError) else None
    about_keys = any(word in type(error).__name__ for word in ("Credential", "Profile", "Token"))
    if isinstance(error, PermissionError) or about_keys:
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
    if isinstance(error, ValueError):
        return "the driver takes no such value; check AWS_ENDPOINT_URL_S3 (http://HOST:PORT) and the URL"
    if type(error).__module__.startswith(("botocore", "aiohttp")) or isinstance(error, (TimeoutError, ConnectionError)):
        return "the store does not answer; check AWS_ENDPOINT_URL_S3 and the network, then run again"
    return "the store refused or failed; see the cause, then run again"
