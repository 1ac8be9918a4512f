"""``python -m tests.fakes.harness claude FOLDER``: see the package's docstring."""

from __future__ import annotations

import json
import sys
import time

from tests.fakes.harness.session import Harness


def main(vendor: str, folder: str) -> None:
    """Do what the person does, and the model."""
    with Harness(vendor, folder) as cli:
        cli.start()
        for step in json.loads(sys.stdin.read()):
            if "prompt" in step:
                cli.prompt(step["prompt"], *step.get("steps", ()))
            else:
                time.sleep(step["idle"])


if __name__ == "__main__":
    main(*sys.argv[1:])
