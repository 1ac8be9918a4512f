"""Audits: Spark jobs over what a relay has kept, its ledger and its store files.

Nothing here changes a home, and no reader holds the daemon up. Only this package imports
pyspark and pyarrow, which come with the extra ``audit``.
"""

from relay.audit.sources import register

__all__ = ["register"]
