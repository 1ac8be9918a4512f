"""Layer 2: the `.acomm` store file: records, sections, locks, checks.

Format: docs/formats/acomm.md.
"""
