"""The checks that each request passes before a route sees it; for a browser on this machine.

A page of another site, or of another server on this machine, can make the browser send requests
here: none of them gets through, since

- the Host is exactly the address that was printed, port included, also after a name was rebound;
- everything but style, script and icon needs the secret, in the header Authorization. A script
  sends it as Bearer; a browser without one asks for it (Basic), and keeps it for this port alone,
  which no browser does with a cookie;
- what changes something comes from a page of this server (Origin), as a form of limited length.

Answers are stored nowhere, framed nowhere, and load nothing from elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/page.css", "/page.js", "/icon.svg")  # they tell nothing
SIGN_IN = "/signin"  # where a browser without a script is asked for the secret
METHODS = ("GET", "HEAD", "POST")
MOST_TARGET = 8 << 10  # characters of path and query
MOST_FORM = 4 << 20  # bytes: the longest body of a message, each byte as %XX, and a little more
FORM = "application/x-www-form-urlencoded"
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no-referrer a form has no Origin
    "Vary": "Authorization",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class HttpRefusal(NamedTuple):
    """Why a request gets no further."""

    status: HTTPStatus
    text: str


class Door:
    """Lets through what is from the operator's browser; ``refuse`` makes the answer otherwise.

    ``host``: name and port, as the browser must have them. ``scope["relay.refusal"]`` has the
    reason for ``refuse``.
    """

    def __init__(self, app: ASGIApp, refuse: ASGIApp, host: str, secret: str) -> None:
        self._app = app
        self._refuse = refuse
        self._host = host
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, and answer it with the headers of every answer."""
        if scope["type"] != "http":
            raise ValueError(f"expected a request of HTTP, got {scope['type']}")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            scope["relay.refusal"] = refusal
            await self._refuse(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> HttpRefusal | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if headers.getlist("host") != [self._host]:
            return HttpRefusal(HTTPStatus.MISDIRECTED_REQUEST, f"this is http://{self._host}/")
        if method not in METHODS:
            return HttpRefusal(HTTPStatus.METHOD_NOT_ALLOWED, f"expected {', '.join(METHODS)}")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_TARGET:
            text = f"the address is longer than {MOST_TARGET} characters"
            return HttpRefusal(HTTPStatus.REQUEST_URI_TOO_LONG, text)
        if refusal := _of_body(headers, method):
            return refusal
        if method == "POST" and headers.getlist("origin") != [f"http://{self._host}"]:
            return HttpRefusal(HTTPStatus.FORBIDDEN, "only pages of this server change something")
        if method == "POST" and headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return HttpRefusal(HTTPStatus.FORBIDDEN, "only pages of this server change something")
        if path not in OPEN_PATHS and not self._is_operator(headers):
            return HttpRefusal(
                HTTPStatus.UNAUTHORIZED, "the key that `relay web` printed is missing"
            )
        return None

    def _is_operator(self, headers: Headers) -> bool:
        given = headers.getlist("authorization")
        if len(given) != 1:
            return False
        scheme, _, value = given[0].partition(" ")
        if scheme.lower() == "basic":
            try:
                decoded = base64.b64decode(value, validate=True).decode("latin-1")
            except (binascii.Error, ValueError):
                return False
            value = decoded.partition(":")[2]
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(value.encode("latin-1", "replace"), self._secret.encode())


def _of_body(headers: Headers, method: str) -> HttpRefusal | None:
    """A body is a form of a POST, and its length is known."""
    length = headers.get("content-length")
    if method != "POST":
        if length not in (None, "0") or "transfer-encoding" in headers:
            return HttpRefusal(HTTPStatus.BAD_REQUEST, f"{method} has no body")
        return None
    if length is None or not length.isdecimal() or "transfer-encoding" in headers:
        return HttpRefusal(HTTPStatus.LENGTH_REQUIRED, "expected Content-Length")
    if int(length) > MOST_FORM:
        return HttpRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_FORM} bytes")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        return HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"expected {FORM}")
    return None
