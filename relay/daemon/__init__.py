"""Layer 6: the process: session, recovery, housekeeping, admin HTTP. The only place that wires."""
