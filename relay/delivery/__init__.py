"""Layer 5: one turn of the loop: intake, validate, route, stage, commit, deliver, archive; retries.

States, and what a crash leaves of each: docs/states.md.
"""
