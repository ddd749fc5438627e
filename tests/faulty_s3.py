"""A proxy in front of an S3 server that fails on request: what a network and a store really do, without patches."""

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["500", "503", "403", "expired", "cut_before", "cut_after", "ignore_condition"]
Rule = Callable[[str, str, str], Fault | None]
"""(method, path with query, authorization header) -> what goes wrong with this request."""

_ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "403": (403, "AccessDenied", "Access Denied"),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
}


class FaultyS3:
    """Forwards to `target` and applies `rule`. Use as a context manager; `url` is its endpoint."""

    def __init__(self, target: str) -> None:
        host = urlsplit(target).netloc
        self.rule: Rule = lambda method, path, authorization: None
        self.requests: list[tuple[str, str]] = []
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

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = dict((name.lower(), value) for name, value in headers).get("content-length")
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _forward(self) -> None:
                proxy.requests.append((self.command, self.path))
                body = self._body()
                fault = proxy.rule(self.command, self.path, self.headers.get("Authorization", ""))
                if fault in _ERRORS:
                    status, code, message = _ERRORS[fault]
                    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
                    self._answer(status, [("Content-Type", "application/xml")], text.encode())
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
                if fault == "cut_after":
                    self.close_connection = True
                    return
                self._answer(response.status, response.getheaders(), content)

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
