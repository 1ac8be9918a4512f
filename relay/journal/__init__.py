"""Layer 2: AOF2, the append-only journal: segments, manifest, tiers.

Format: docs/formats/aof2.md.
"""
