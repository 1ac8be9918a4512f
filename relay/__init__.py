"""A local message relay for AI agents: a file dropped is a message accounted for."""

__version__ = "0.1.0"
