#!/usr/bin/env bash
# The worker of the scenario: answers queries, handles commands, and crashes in the middle of one.
# shellcheck source=/dev/null
. "$(relay sh)"

relay_send -k subscribe __orchestrator__ 'CHANNEL: build
PATTERN: build.#' > /dev/null

while relay_recv -t 20 > task.msg; do
    body=$(relay_body task.msg)
    case $(relay_header KIND task.msg):$body in
    query:*)
        relay_reply task.msg main
        ;;
    command:deploy*)
        relay_ack task.msg in_progress
        relay_ack task.msg completed "deployed, health check passed"
        ;;
    command:delete*) relay_nack task.msg "no such branch" ;;
    command:*)
        relay_ack task.msg in_progress
        kill -9 $$ # in the middle of its work
        ;;
    esac > /dev/null
done
