"""Who gets through: every route by every way in which a request is not the operator's."""

from __future__ import annotations

import base64

import pytest
from starlette.testclient import TestClient

from relay.web.actions import ACTIONS
from relay.web.app import json_path
from relay.web.door import HEADERS, MOST_FORM, MOST_TARGET, OPEN_PATHS, SIGN_IN
from relay.web.pages import PAGES
from tests.box import Box
from tests.web.conftest import HOST, ORIGIN, SECRET, MakeClient

ID = "1700000000000000001-00000001"
NAMES = {"/m/{name}": ID, "/t/{name}": "release-42", "/agents/{name}": "bob"}
PATHS = [page.path.replace("{name}", NAMES.get(page.path, "")) for page in PAGES]
FORMS = [path.replace("{name}", ID if path.startswith("/m/") else "bob") for path in ACTIONS]
ROUTES = [*PATHS, *map(json_path, PATHS), *FORMS, "/events", SIGN_IN]
WRONG_HOSTS = [
    "127.0.0.1",  # without the port
    "127.0.0.1:8378",  # of another server
    "localhost:8377",
    "evil.example:8377",  # a name that was bound to 127.0.0.1 again
    "127.0.0.1:8377.evil.example",
    "127.0.0.1:08377",
    "",
]


def basic(secret: str) -> str:
    """The header of a browser without a script."""
    return "Basic " + base64.b64encode(f"me:{secret}".encode()).decode()


WRONG_KEYS = [
    *(None, "", SECRET, "Bearer", "Bearer ", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}"),
    *(f"Basic {SECRET}", "Basic !", basic("wrong"), basic(""), f"Digest {SECRET}"),
]


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_another_host_gets_nothing_of_any_route(make_client: MakeClient, host: str) -> None:
    client = make_client(host=host)
    for route in [*ROUTES, *OPEN_PATHS, "/nothing"]:
        answer = client.get(route)
        assert answer.status_code == 421, route
        assert f"this is http://{HOST}/" in answer.text
        assert client.post(route, data={"a": "b"}).status_code == 421


def test_without_the_key_nothing_is_read(box: Box, make_client: MakeClient) -> None:
    box.send("alice", "TO: bob\nTHREAD: release-42\n\nnobody reads this", f"{ID}.msg")
    for key in WRONG_KEYS:
        client = make_client(authorization=key)
        for route in ROUTES:
            answer = client.get(route)
            assert answer.status_code == 401, (key, route)
            assert "alice" not in answer.text.replace("from:alice", "")
            assert "nobody reads" not in answer.text
            assert answer.headers["www-authenticate"].startswith("Basic") == (route == SIGN_IN)
            assert client.post(route, data={"a": "b"}).status_code == 401


def test_style_script_and_icon_need_no_key(make_client: MakeClient) -> None:
    client = make_client(authorization=None)
    assert [client.get(route).status_code for route in OPEN_PATHS] == [200] * len(OPEN_PATHS)


@pytest.mark.parametrize("key", [f"Bearer {SECRET}", f"bearer {SECRET}", basic(SECRET)])
def test_with_the_key_each_page_is_there(box: Box, make_client: MakeClient, key: str) -> None:
    box.send("alice", "TO: bob\nTHREAD: release-42\n\nhi", f"{ID}.msg")
    client = make_client(authorization=key)
    for path in PATHS:
        assert client.get(path).status_code == 200, path
        assert client.get(json_path(path)).headers["content-type"] == "application/json"
    signed_in = client.get(SIGN_IN)
    assert (signed_in.status_code, signed_in.headers["location"]) == (303, f"{ORIGIN}/")


def test_other_methods_are_refused(client: TestClient) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"):
        for route in PATHS:
            assert client.request(method, route).status_code == 405, (method, route)


def test_what_is_too_long_is_refused(client: TestClient) -> None:
    assert client.get(f"/search?q={'x' * MOST_TARGET}").status_code == 414
    assert client.get(f"/m/{'x' * MOST_TARGET}").status_code == 414
    assert client.post("/search", data={"x": "x" * MOST_FORM}).status_code == 413
    assert client.get("/search?q=" + "x" * 3000).status_code == 200


def test_a_body_is_a_form_whose_length_is_known(client: TestClient) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/search", content=iter([b"a=b"]), headers=form).status_code == 411
    assert client.post("/search", json={"a": "b"}).status_code == 415
    assert client.post("/search", files={"a": b"b"}).status_code == 415
    assert client.post("/search", data={"a": "b"}).status_code == 405  # a page is not posted to
    assert client.request("GET", "/search", content=b"a=b").status_code == 400


@pytest.mark.parametrize(
    "origin", [None, "null", "", "http://evil.example", "http://127.0.0.1:8378", f"https://{HOST}"]
)
def test_a_form_of_another_page_is_refused(make_client: MakeClient, origin: str | None) -> None:
    """Also if the browser adds the key by itself."""
    client = make_client(origin=origin, authorization=basic(SECRET))
    assert client.post("/search", data={"a": "b"}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
def test_a_browser_that_says_where_a_form_is_from_is_believed(
    make_client: MakeClient, site: str
) -> None:
    client = make_client(sec_fetch_site=site)
    assert client.post("/search", data={"a": "b"}).status_code == 403


@pytest.mark.parametrize("key", [None, f"Bearer {SECRET}"])
def test_each_answer_has_the_headers(make_client: MakeClient, key: str | None) -> None:
    client = make_client(authorization=key)
    for route in (*PATHS, *OPEN_PATHS, "/nothing", SIGN_IN):
        answer = client.get(route)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, route
        assert "set-cookie" not in answer.headers, route
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy, route


def test_what_is_not_a_request_of_http_is_refused(client: TestClient) -> None:
    with pytest.raises(ValueError, match="websocket"):
        with client.websocket_connect("/events"):
            raise AssertionError("it was accepted")
