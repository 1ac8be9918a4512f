"""AOF2: the append-only journal, its segments, its manifest, and its tiers."""
