"""Layer 3: the message engine: channels, messages, topics, deliveries and acks.

``Engine`` is the store of a relay; ``relay.commstore`` has the same as a library.

Errors: ``relay.base.errors``.
"""
