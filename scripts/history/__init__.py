"""Homes as after months of operation, generated in minutes; see ``scripts/make-history``."""
