"""The message engine: channels, messages, topics, and the `.acomm` store file."""
