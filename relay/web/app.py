"""The routes: each page as HTML and as JSON, what is done from it, and the stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.base.errors import (
    InvalidName,
    InvalidQuery,
    MessageError,
    NotFound,
    Refused,
    RelayError,
    Timeout,
)
from relay.base.home import LEDGER, Home, lock_holder
from relay.ledger.check import naming_bad_rows
from relay.web import render, stream
from relay.web.actions import ACTIONS, Action
from relay.web.door import SIGN_IN, Door, HttpRefusal
from relay.web.pages import PAGES, Asked, Page, attached_file, page_facts

JSON = ".json"
MOST_SAID = 64
MOST_FIELDS = 10  # of a form
_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (InvalidQuery, HTTPStatus.BAD_REQUEST),
    (InvalidName, HTTPStatus.BAD_REQUEST),
    (MessageError, HTTPStatus.BAD_REQUEST),
    (Refused, HTTPStatus.CONFLICT),
    (Timeout, HTTPStatus.GATEWAY_TIMEOUT),
)


class Web:
    """The routes of one home."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.is_over = False  # streams end
        self._said: dict[str, str] = {}  # token -> what became of an action, for the next page
        self._templates = render.environment(root)

    def app(self, host: str, secret: str) -> ASGIApp:
        """The application behind its door: ``host`` is the address of the browser, with port."""
        routes = [Route(path, self._static) for path in render.STATIC]
        # The whole address: a browser takes name and key from one that it was opened with.
        signed_in = RedirectResponse(f"http://{host}/", HTTPStatus.SEE_OTHER)
        routes.append(Route(SIGN_IN, lambda _: signed_in))
        for page in PAGES:
            routes.append(Route(json_path(page.path), self._endpoint(page, is_json=True)))
            routes.append(Route(page.path, self._endpoint(page, is_json=False)))
        for path, do in ACTIONS.items():
            routes.append(Route(path, self._action(do), methods=["POST"]))
        routes.append(Route("/m/{name}/attached/{number:int}", self._attached))
        routes.append(Route("/events", self._events))
        handlers = {HTTPException: self._http_error, RelayError: self._error, OSError: self._error}
        app = Starlette(routes=routes, exception_handlers=handlers)
        return Door(app, self._refuse, host, secret)

    # -- pages ---------------------------------------------------------------------------------

    def _endpoint(self, page: Page, *, is_json: bool) -> Any:
        def answer(request: Request) -> Response:
            with Home(self.root) as home:
                position = stream.position(home)  # before the facts: none is missed
                name = request.path_params.get("name", "")
                with naming_bad_rows(home.path(LEDGER)):
                    facts = page_facts(page, Asked(home, name, request.query_params))
                if is_json:
                    return Response(render.as_json(facts), media_type="application/json")
                said = self._said.get(request.query_params.get("said", ""))
                is_running = lock_holder(home) is not None
                facts |= {"position": position, "is_running": is_running, "said": said}
            return self._page(page.template, facts)

        return answer

    def _action(self, do: Action) -> Any:
        async def answer(request: Request) -> Response:
            text = (await request.body()).decode("utf-8", "replace")
            if text.count("&") >= MOST_FIELDS:
                raise HTTPException(HTTPStatus.BAD_REQUEST)
            form = dict(parse_qsl(text, keep_blank_values=True))
            return await run_in_threadpool(act, request.path_params.get("name", ""), form)

        def act(name: str, form: dict[str, str]) -> Response:
            with Home(self.root) as home:
                done = do(home, name, form)
            address = done.address
            if done.said:
                token = secrets.token_urlsafe(8)
                self._said[token] = done.said
                while len(self._said) > MOST_SAID:
                    self._said.pop(next(iter(self._said)))
                address += f"?said={token}"
            return RedirectResponse(address, HTTPStatus.SEE_OTHER)

        return answer

    def _page(
        self, template: str, facts: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        usual = {"root": self.root, "now_ns": time.time_ns(), "position": "", "q": "", "said": ""}
        text = self._templates.get_template(f"{template}.html.j2").render(
            {**usual, "is_running": None, "section": template, **facts}
        )
        return Response(text.encode("utf-8", "replace"), status, media_type="text/html")

    def _static(self, request: Request) -> Response:
        content, kind = render.static(request.url.path)
        return Response(content, media_type=kind)

    def _attached(self, request: Request) -> Response:
        """A file sent with a message: to be saved, whatever it is, and shown nowhere."""
        with Home(self.root) as home:
            file = attached_file(home, **request.path_params)
        name = quote(file.name, safe="")
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "Content-Length": str(file.n_bytes),
        }
        kind = "application/octet-stream"
        return StreamingResponse(file.pieces, headers=headers, media_type=kind)

    async def _events(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id", "")
        return StreamingResponse(stream.events(self, seen), media_type="text/event-stream")

    # -- errors --------------------------------------------------------------------------------

    async def _error(self, request: Request, exc: Exception) -> Response:
        found = (status for kind, status in _STATUS if isinstance(exc, kind))
        status = next(found, HTTPStatus.SERVICE_UNAVAILABLE)
        if isinstance(exc, OSError):
            where = f"{exc.filename}: " if exc.filename else ""
            return self._refused(request.scope, status, f"{where}{exc.strerror or exc}")
        return self._refused(request.scope, status, str(exc), getattr(exc, "hint", ""))

    async def _http_error(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        status = HTTPStatus(exc.status_code)
        what = "there is no such page" if status is HTTPStatus.NOT_FOUND else status.phrase
        return self._refused(request.scope, status, what, headers=exc.headers)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what the door does not let through."""
        refusal: HttpRefusal = scope["relay.refusal"]
        is_unknown = refusal.status is HTTPStatus.UNAUTHORIZED
        if not is_unknown or scope["path"].endswith(JSON) or scope["method"] == "POST":
            response = self._plain(scope, refusal.status, refusal.text)
        else:
            response = self._page("key", {"sign_in": SIGN_IN}, refusal.status)
        if is_unknown:
            asks = scope["path"] == SIGN_IN  # a browser opens a dialog for it, and nowhere else
            kind = 'Basic realm="relay web", charset="UTF-8"' if asks else "Bearer"
            response.headers["WWW-Authenticate"] = kind
        await response(scope, receive, send)

    def _refused(
        self,
        scope: Scope,
        status: HTTPStatus,
        text: str,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        if scope["path"].endswith(JSON):
            return self._plain(scope, status, text, hint)
        query = Request(scope).query_params.get("q", "")
        facts = {"text": text, "hint": hint, "status": status, "q": query}
        response = self._page("error", facts, status)
        response.headers.update(headers or {})
        return response

    def _plain(self, scope: Scope, status: HTTPStatus, text: str, hint: str = "") -> Response:
        if scope["path"].endswith(JSON):
            facts = {"error": text} | ({"hint": hint} if hint else {})
            return Response(json.dumps(facts) + "\n", status, media_type="application/json")
        return Response(text + "\n", status, media_type="text/plain")


def json_path(path: str) -> str:
    """Where the JSON of a page is."""
    return f"{path}{JSON}" if path != "/" else f"/index{JSON}"
