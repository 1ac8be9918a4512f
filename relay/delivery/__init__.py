"""One turn of the loop: intake, validate, plan, stage, commit, deliver, archive; retries.

States, and what a crash leaves of each: docs/states.md.
"""
