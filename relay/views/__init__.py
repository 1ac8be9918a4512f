"""Facts for people: what the commands print and the page shows, read from ledger, store and files.

Nothing here prints or changes anything. Times are Unix nanoseconds, unless a row is for JSON.
"""
