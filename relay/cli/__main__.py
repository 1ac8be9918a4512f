"""``python -m relay.cli``."""

from relay.cli import main

if __name__ == "__main__":
    main()
