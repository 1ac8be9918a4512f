"""A real S3 server on loopback, and one that fails on purpose."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from relay.journal.objects import S3Objects

BUCKET = "journal-bucket"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL, with BUCKET in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="id",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    try:
        yield url
    finally:
        server.stop()
        assert server._server is not None
        server._server.server_close()


def objects(endpoint: str, prefix: str, bucket: str = BUCKET) -> S3Objects:
    """The store of ours for that server."""
    return S3Objects(
        f"s3://{bucket}/{prefix}",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="id",
        secret_access_key="secret",
    )


@contextmanager
def broken_server(status: int, body: bytes = b"", length: int | None = None) -> Iterator[str]:
    """A server that answers everything with ``status``, and says the body has ``length``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body) if length is None else length))
            self.send_header("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("etag", '"abc"')
            self.send_header("connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
