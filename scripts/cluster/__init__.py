"""A real Spark cluster on loopback, and the audits on it; see ``scripts/cluster-demo``."""
