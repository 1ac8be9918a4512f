"""Agents: who is one, how each stands, and what it keeps for its next life.

    roster        who is an agent, as directories tell it
    standing      the rules: active, inactive, terminated, retired
    lives         who is away and who came back, told to the engine
    evidence      when each was last heard, and since when it owes something
    saves         what an agent keeps for its next life, on disk
    continuity    saving and loading it, and the welcome

Statuses, and the evidence that moves them: docs/states.md, "An agent".
"""
