#!/bin/sh
# An agent of the scenario that has mkdir, printf and mv alone, and never looks into its inbox.
outbox=$AGENT_RELAY_DIR/agents/filer/outbox
mkdir -p "$outbox/.pending"

drop() { # NAME TEXT
    printf '%s' "$2" > "$outbox/.pending/$1"
    mv "$outbox/.pending/$1" "$outbox/$1"
}

drop "1706123456789012344-f11e0000.msg" 'TO: __orchestrator__
KIND: subscribe

CHANNEL: orders
PATTERN: #'
drop "1706123456789012345-f11e0001.msg" 'TO: Lead

report: 12 files'
drop "1706123456789012346-f11e0002.msg" 'TO: bbo

a recipient that does not exist'
