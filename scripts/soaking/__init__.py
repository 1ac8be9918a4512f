"""The soak: a relay and its agents under random harm, and what must be so afterwards."""
