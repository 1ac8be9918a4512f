"""Layer 1: small values, disk access and the `.msg` format. Imports nothing else of the relay."""
