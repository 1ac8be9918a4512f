"""Layer 4: agents: directories, status, saved state, and the processes the relay started for them.

States: docs/states.md, "An agent" and "A process the relay started".
"""
