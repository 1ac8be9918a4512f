"""The pipeline: from a file in an outbox to its copies in inboxes and the original in the archive.

Its steps: docs/architecture.md. States, and what a crash leaves of each: docs/states.md.
"""
