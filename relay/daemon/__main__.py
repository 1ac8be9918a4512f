"""``python -m relay.daemon``."""

import sys

from relay.daemon.process import main

sys.exit(main())
