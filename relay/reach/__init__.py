"""Reaching agents in their own sessions: hooks of agent CLIs, evidence, the bell, MCP.

These modules run inside hooks, for each tool call of an agent: they import little, and never
raise into an agent's session.
"""
