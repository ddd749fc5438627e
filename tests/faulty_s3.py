"""A proxy in front of an S3 server that fails on request: what a network and a store really do, without patches."""

import contextlib
import http.client
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "500",
    "503",
    "403",
    "400",
    "expired",
    "expired_400",
    "bad_key",
    "cut_before",
    "cut_after",
    "cut_body",
    "short_body",
    "flip",
    "flip_unsaid",
    "hang",
    "slow",
    "ignore_condition",
]
"""What goes wrong, where the name does not say it.

cut_before, cut_after: the connection ends without an answer, before or after the server did its work.
cut_body, short_body: half of the body; then the connection ends, or as if that were all.
flip, flip_unsaid: one bit of the body differs; the checksum of the store tells, or there is none.
hang, slow: an answer that never comes, or comes late.
"""
Rule = Callable[[str, str, str], Fault | None]
"""(method, path with query, authorization header) -> what goes wrong with this request."""

_ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "403": (403, "AccessDenied", "Access Denied"),
    "400": (400, "InvalidRequest", "The request is not valid."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "expired_400": (400, "ExpiredToken", "The provided token has expired."),
    "bad_key": (403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
}


def first_times(number: int, fault: Fault, method: str = "PUT", within: str = "") -> Rule:
    """Fail the first `number` requests of a method ("": any) whose path contains the text."""
    seen: list[str] = []

    def rule(request_method: str, path: str, authorization: str) -> Fault | None:
        if method not in ("", request_method) or within not in path:
            return None
        seen.append(path)
        return fault if len(seen) <= number else None

    return rule


def now_and_then(share: float, faults: Sequence[Fault], seed: int) -> Rule:
    """A rule by which a share of all requests fail, the same ones each time, whichever thread sends them."""
    seen: Counter[str] = Counter()

    def rule(method: str, path: str, authorization: str) -> Fault | None:
        request = f"{method} {re.sub('[0-9a-f]{32}', '', path)}"  # without the test's own prefix
        seen[request] += 1
        rng = random.Random(f"{seed} {seen[request]} {request}")
        return rng.choice(faults) if rng.random() < share else None

    return rule


class FaultyS3:
    """Forwards to `target` and applies `rule`. Use as a context manager; `url` is its endpoint."""

    def __init__(self, target: str) -> None:
        host = urlsplit(target).netloc
        self.rule: Rule = lambda method, path, authorization: None
        self.requests: list[tuple[str, str]] = []
        self.faults: Counter[Fault] = Counter()
        """How often which fault was made."""
        self.hang_s = 3.0
        """A client must give up before."""
        self.latency_s = 5.0
        """Of a slow answer."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts: list[bytes] = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return b"".join(parts)

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, announced: int) -> None:
                """announced: bytes that the header promises."""
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = dict((name.lower(), value) for name, value in headers).get("content-length")
                if self.command != "HEAD" or length is None:
                    length = str(announced)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(ConnectionError):  # the client has given up
                        self.wfile.write(body)

            def _forward(self) -> None:
                proxy.requests.append((self.command, self.path))
                body = self._body()
                fault = proxy.rule(self.command, self.path, self.headers.get("Authorization", ""))
                if fault is not None:
                    proxy.faults[fault] += 1
                if fault in _ERRORS:
                    status, code, message = _ERRORS[fault]
                    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                    self._answer(status, [("Content-Type", "application/xml")], text, len(text))
                    return
                if fault == "cut_before":
                    self.close_connection = True
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
                headers["Content-Length"] = str(len(body))
                if fault == "ignore_condition":
                    headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
                upstream = http.client.HTTPConnection(host)
                upstream.request(self.command, self.path, body, headers)
                response = upstream.getresponse()
                content = response.read()
                upstream.close()
                if fault in ("hang", "slow"):
                    time.sleep(proxy.hang_s if fault == "hang" else proxy.latency_s)
                if fault in ("cut_after", "hang") or (fault == "cut_body" and not content):
                    self.close_connection = True
                    return
                answered, announced = response.getheaders(), len(content)
                if fault in ("cut_body", "short_body", "flip_unsaid"):
                    answered = [(name, value) for name, value in answered if "checksum" not in name.lower()]
                if fault in ("cut_body", "short_body"):
                    content = content[: len(content) // 2]
                    announced = announced if fault == "cut_body" else len(content)
                    self.close_connection = True
                if fault in ("flip", "flip_unsaid"):
                    content = bytes([content[0] ^ 1]) + content[1:] if content else content
                self._answer(response.status, answered, content, announced)

            do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_DELETE = _forward

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultyS3":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
