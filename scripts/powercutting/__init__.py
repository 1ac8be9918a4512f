"""Power cuts: a relay at work on a real file system, whose disk loses power."""
