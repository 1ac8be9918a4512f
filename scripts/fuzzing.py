"""Feed arbitrary files to a relay, seed after seed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzzing import Fuzz

STEPS = 50  # a seed; then a home of its own begins


def main() -> int:
    """Run until the time is up; a failure ends the run and names its seed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="duration [60]")
    parser.add_argument("--seed", type=int, help="run one seed once [seeds from the clock]")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + arguments.seconds
    seed = arguments.seed if arguments.seed is not None else int(time.time())
    files = 0
    while True:
        with tempfile.TemporaryDirectory(prefix="agent-relay-fuzz-") as folder:
            fuzz = Fuzz(Path(folder) / "home", seed)
            try:
                for _ in range(STEPS):
                    fuzz.step()
                    files += 8
            except BaseException:
                print(f"failed: scripts/fuzz --seed {seed}", file=sys.stderr)
                raise
            fuzz.box.close()
        seed += 1
        if arguments.seed is not None or time.monotonic() > ends_at:
            print(f"{files} files, OK")
            return 0


if __name__ == "__main__":
    sys.exit(main())
