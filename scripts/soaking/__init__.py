"""Soak test: a relay and its agents under random failures, and a check afterwards."""
