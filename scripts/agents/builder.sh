#!/bin/sh
# The builder of the demo: takes a command, says that it works on it, says that it is done.
# shellcheck source=/dev/null
. "$(relay sh)"
export AGENT_RELAY_NAME=builder

while relay_recv -t 20 > task.msg; do
    case $(relay_header KIND task.msg) in
    command)
        echo "builder: got: $(relay_body task.msg)"
        relay_ack task.msg in_progress > /dev/null
        relay_ack task.msg completed "847 tests passed" > /dev/null
        ;;
    *)
        echo "builder: $(relay_header FROM task.msg) says to all: $(relay_body task.msg)"
        exit 0
        ;;
    esac
done
