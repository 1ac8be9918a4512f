"""Layer 4: the search index: every message's text, trigram by trigram, in ``search.db``.

It is derived from the store and its journal, beside the relay: removing it loses nothing.
"""
