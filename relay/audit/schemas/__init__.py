"""Columns beside those of a lake, which are in lake_columns.py.

formats.py   the formats `acomm`, `aof2`, `relay_ledger`, and any columns as Spark has them
results.py   findings, counts and the tables of the jobs
"""
