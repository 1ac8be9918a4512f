"""Homes as a relay leaves them after months, made in minutes; see ``scripts/make-history``."""
