#!/bin/sh
# The lead of the demo: waits for word of a worker, gives the builder a command, tells everybody.
# shellcheck source=/dev/null
. "$(relay sh)"
export AGENT_RELAY_NAME=lead

relay_recv -t 20 > hello.msg || exit 1
echo "lead: $(relay_header FROM hello.msg) says: $(relay_body hello.msg)"

command=$(relay_send -k command -t release-42 builder "build the release")
echo "lead: sent the builder command $command"
while relay_recv -t 20 > answer.msg; do
    echo "lead: $(relay_header KIND answer.msg) from $(relay_header FROM answer.msg): $(relay_body answer.msg | tr '\n' ' ')"
    case $(relay_body answer.msg) in completed*) break ;; esac
done

relay_send '*' "release 42 is out" > /dev/null
relay_send nobody "are you there?" 2> refused > /dev/null || echo "lead: $(cat refused)"
