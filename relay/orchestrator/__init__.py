"""The orchestrator: the relay itself, as an address and a sender.

    control    what agents ask of it, and its answers
    actions    what a command does: channels, dead letters, the journal
    asked      what is asked of it and done beside the loop
    telling    what it says without being asked

Its answers have ids that are derived from what they answer.
"""
