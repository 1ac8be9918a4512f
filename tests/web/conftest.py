"""A page over a relay in a box, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from relay.web.app import Web
from tests.box import Box

HOST = "127.0.0.1:8377"
SECRET = "the-secret-of-this-process-0123456789"
ORIGIN = f"http://{HOST}"
MakeClient = Callable[..., TestClient]


@pytest.fixture
def make_client(box: Box) -> Iterator[MakeClient]:
    """Clients of the page of ``box``, with the headers given; others are left out with None."""
    opened: list[TestClient] = []

    def make(**headers: str | None) -> TestClient:
        usual = {"authorization": f"Bearer {SECRET}", "origin": ORIGIN}
        given: dict[str, Any] = usual | {k.replace("_", "-"): v for k, v in headers.items()}
        client = TestClient(
            Web(str(box.root)).app(HOST, SECRET), base_url=ORIGIN, follow_redirects=False
        )
        client.headers.update({name: value for name, value in given.items() if value is not None})
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def client(make_client: MakeClient) -> TestClient:
    """The operator's browser with a script."""
    return make_client()
