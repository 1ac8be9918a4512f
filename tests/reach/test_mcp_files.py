"""Files through the tools of ``relay mcp``: sent by their paths, shown with names and paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from mcp import Client

from relay.base.text import visible
from tests.procs import relay
from tests.reach.calls import call, deliver, refusal, server_of


async def test_files_are_sent_by_path_and_come_as_paths(served: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("a plan, in 21 bytes..")
    (tmp_path / "spec.bin").write_bytes(b"\0" * 2048)
    paths = [str(tmp_path / "plan.txt"), str(tmp_path / "spec.bin")]
    async with Client(server_of(served).server) as client:
        await call(client, "send", to="alice", body="see files", files=paths)
        words = ("--as", "alice", "bob", "and these")
        files = [word for path in paths for word in ("--attach", path)]
        sent = relay("send", *words, *files, home=served).stdout.strip()
        message, *shown = (await call(client, "inbox", wait_s=100)).rsplit("\n", 2)
        assert message.startswith(f"Message {sent} from alice (message, ")
        assert message.endswith("\n| and these")
        known = [re.fullmatch(r"attachment in (.*) \((.*)\): (.*)", one) for one in shown]
        found = [one.groups() for one in known if one]
        assert [one[1:] for one in found] == [("21 bytes", "plan.txt"), ("2 KiB", "spec.bin")]
        assert Path(found[0][0]).read_text() == "a plan, in 21 bytes.."
    (raw,) = (served / "agents/alice/inbox").glob("*.msg")
    assert "ATTACHMENT-NAMES: plan.txt/spec.bin\n" in raw.read_text()


async def test_what_is_no_file_is_not_sent(served: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("a plan")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1025 << 20)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="embedded null") as embedded:
        os.stat("a\0b")  # in the words of the Python that runs
    said = {
        "nosuch": "cannot be sent: No such file or directory; expected the path of a file",
        "": "cannot be sent: Is a directory; expected the path of a file",
        "a\0b": f"cannot be sent: {embedded.value}; expected the path of a file",
        "large": "is 1025 MiB, at most 1024 (limits.max_attachment_mib): send its path",
    }
    async with Client(server_of(served).server) as client:
        for name, why in said.items():
            files = [f"{tmp_path}/plan.txt", f"{tmp_path}/{name}".rstrip("/")]
            text = await refusal(client, "send", to="bob", body="see", files=files)
            assert text == f"files: {visible(files[1])} {why}"
        files = [f"{tmp_path}/pipe"]
        text = await refusal(client, "send", to="bob", body="see", files=files)
        assert text == f"'{tmp_path}/pipe' is not a regular file"
        assert await call(client, "inbox") == "no messages"


async def test_attachments_of_a_file_that_no_relay_has_checked(bobs_home: Path) -> None:
    names = {"ATTACHMENT": "../../../etc/passwd", "ATTACHMENT-NAMES": "x\u202e"}
    deliver(bobs_home, "y" * 9000, **names)
    async with Client(server_of(bobs_home).server) as client:
        text = await call(client, "inbox")
        assert text.endswith(".msg\nattachment is not there any more: file")
