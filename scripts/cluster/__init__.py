"""A Spark cluster on loopback that runs the audits; see ``scripts/cluster-demo``."""
