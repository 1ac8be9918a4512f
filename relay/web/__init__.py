"""The page: the relay of one home in a browser, for its operator.

door.py      what every request passes before a route sees it: host, secret, limits, headers
app.py       the routes: each page, the same as JSON, and what is done from it
pages.py     the facts of each page, from relay.views
health.py    whether all is well now, and the last audit
render.py    facts as HTML and JSON; all of it is text
actions.py   what the operator does: files in the operator's outbox
stream.py    tells an open page that something happened
templates/   one file a page; static/ has the style and the only script

Reads ledger, store and files; the relay does not know that it runs. Needs the extra ``web``.
"""
