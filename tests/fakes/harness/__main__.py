"""``python -m tests.fakes.harness claude FOLDER``: see the package's docstring."""

from __future__ import annotations

import json
import sys

from tests.fakes.harness.session import Harness


def main(vendor: str, folder: str) -> None:
    """Do what the person does, and the model."""
    with Harness(vendor, folder) as cli:
        cli.start()
        for step in json.loads(sys.stdin.read()):
            cli.prompt(step["prompt"], *step["steps"])


if __name__ == "__main__":
    main(*sys.argv[1:])
