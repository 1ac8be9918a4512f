"""Agents: directories, status, and the processes started by the relay.

States: docs/states.md, "An agent" and "A process the relay started".
"""
