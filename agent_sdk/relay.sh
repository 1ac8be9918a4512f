#!/bin/sh
# relay.sh: talk through a relay from a shell. POSIX sh and coreutils, nothing else.
#
#   export AGENT_RELAY_NAME=builder             who you are; AGENT_RELAY_DIR: ~/.agent-relay
#   . relay.sh                                  or run it: relay.sh send bob "hello"
#
#   relay_send [OPTIONS] TO [BODY|-]            send; prints the message id
#   relay_recv [-t SECONDS]                     take the first by priority, then age; print it
#   relay_ack  ID|FILE [received|in_progress|completed] [TEXT]
#   relay_nack ID|FILE ERROR                    answer a command or query
#   relay_header NAME [FILE]                    one header of a message on stdin or in FILE
#   relay_body [FILE]                           its body
#
#   OPTIONS  -k KIND  -t THREAD  -r RE  -p PRIORITY  -T TOPIC  -H 'NAME: value' (any number)
#   BODY     one argument, or - for standard input, byte for byte
#
# The shell that sources this is registered in meta.json with its first call, so that its end can be
# seen (`relay agents`); one that runs a single command (sh -c) is not, nor is relay.sh when run.
# A message is written to outbox/.pending, synced, and renamed into the outbox: after the rename
# it is sent. Taking one renames it into inbox/.read: that is the evidence of reading.
# Exit status: 0 done, 1 could not be done (recv: nothing came), 2 wrong use. Each says why in
# one line on stderr. The functions are subshells: no variable, option or trap of yours changes.
# Source: relay-file-system.txt, section 3 and appendix A.
#
# shellcheck disable=SC2015,SC2030,SC2031  # … or misuse, which ends; variables end with them, too

relay_send() (
    _relay_begin
    header='' kind=message
    OPTIND=1
    while getopts :k:t:r:p:T:H: option; do
        case $option in
        k) _relay_add KIND "$OPTARG" && _relay_check_kind "$OPTARG" && kind=$OPTARG ;;
        t) _relay_add THREAD "$OPTARG" && _relay_check_thread "$OPTARG" ;;
        r) _relay_add RE "$OPTARG" && _relay_check_id "$OPTARG" ;;
        p) _relay_add PRIORITY "$OPTARG" && _relay_check_priority "$OPTARG" ;;
        T) _relay_add TOPIC "$OPTARG" && _relay_check_topic "$OPTARG" ;;
        H) _relay_add_line "$OPTARG" ;;
        :) _relay_misuse "-$OPTARG needs a value" ;;
        *) _relay_misuse "there is no option -$OPTARG" ;;
        esac
    done
    shift $((OPTIND - 1))
    [ $# -eq 1 ] || [ $# -eq 2 ] || _relay_misuse \
        "usage: relay_send [-k kind] [-t thread] [-r re] [-p priority] [-T topic] [-H 'NAME: value'] TO [BODY|-]"
    _relay_check_address "$1"
    header="TO: $1$newline$header"
    case ${2-} in
    -) body=$(_relay_escape) ;;
    *) body=$(printf %s "${2-}" | _relay_escape) ;;
    esac
    _relay_check_body "$kind" "$#"
    if command -v sha256sum >/dev/null 2>&1; then
        sum=$(_relay_unescape | sha256sum)
        _relay_add CHECKSUM "sha256:${sum%% *}"
    fi
    _relay_place
)

relay_recv() (
    _relay_begin
    seconds=0
    OPTIND=1
    while getopts :t: option; do
        case $option in
        t) seconds=$OPTARG ;;
        *) _relay_misuse "usage: relay_recv [-t SECONDS]" ;;
        esac
    done
    [ $# -lt "$OPTIND" ] || _relay_misuse "usage: relay_recv [-t SECONDS]"
    case $seconds in
    0) ;;
    '' | 0* | *[!0-9]*) _relay_misuse "-t $seconds is not a whole number of seconds" ;;
    esac
    looks=$((seconds * 10))
    mkdir -p -- "$inbox/.read" || exit 1
    while :; do
        for file in $(_relay_order); do
            _relay_take "$inbox/$file" && exit
        done
        for file in "$inbox"/*.msg; do # what has no header, or a name of its own
            _relay_take "$file" && exit
        done
        [ "$looks" -gt 0 ] || exit 1
        looks=$((looks - 1))
        _relay_pause 0.1
    done
)

relay_ack() (
    _relay_begin
    [ $# -ge 1 ] && [ $# -le 3 ] || _relay_misuse \
        "usage: relay_ack ID|FILE [received|in_progress|completed] [TEXT]"
    case ${2:-received} in
    received | in_progress | completed) ;;
    *) _relay_misuse "$2 is not one of received, in_progress, completed" ;;
    esac
    _relay_find_original "$1"
    relay_send -k ack -r "$re" -- "$to" "${2:-received}${3:+$newline$3}"
)

relay_nack() (
    _relay_begin
    [ $# -eq 2 ] && [ -n "$2" ] || _relay_misuse "usage: relay_nack ID|FILE ERROR"
    [ "$2" != - ] || _relay_misuse "say what the error is"
    _relay_find_original "$1"
    relay_send -k nack -r "$re" -- "$to" "$2"
)

relay_header() (
    _relay_settle
    case ${1-} in
    '' | *[!A-Za-z0-9_-]*) _relay_misuse "usage: relay_header NAME [FILE]" ;;
    esac
    name=$(printf %s "$1" | tr '[:lower:]' '[:upper:]')
    shift
    _relay_check_file "$@"
    # To the end of the input, and not only of the header: who writes it must not get SIGPIPE.
    value=$(cat -- "$@" | sed -n "1,/^\$/s/^$name: //p")
    [ -n "$value" ] && printf '%s\n' "$value"
)

relay_body() (
    _relay_settle
    _relay_check_file "$@"
    cat -- "$@" | sed '1,/^$/d'
)

# -- what the functions above are made of; they run in their subshells ------------------------

_relay_settle() {
    [ -z "${ZSH_VERSION-}" ] || emulate sh
    set +e +f +u +x +C # the caller's habits are not these functions'
    LC_ALL=C           # bytes, and names in byte order
    export LC_ALL
    newline='
'
    IFS=" $(printf '\t')$newline"
    return_key=$(printf '\r')
    end=' END'
    per_line=10000
    umask 077
}

_relay_begin() {
    _relay_settle
    name=${AGENT_RELAY_NAME-}
    case $name in
    '') _relay_misuse "AGENT_RELAY_NAME is not set: export the name of this agent" ;;
    [!a-zA-Z]* | *[!a-zA-Z0-9_-]*)
        _relay_misuse "AGENT_RELAY_NAME $name: letters, digits, _ and -, a letter first" ;;
    esac
    [ ${#name} -le 63 ] || _relay_misuse "AGENT_RELAY_NAME has ${#name} characters, at most 63"
    case $(printf %s "$name" | tr '[:upper:]' '[:lower:]') in
    system | root | admin | dm | all) _relay_misuse "AGENT_RELAY_NAME $name is reserved" ;;
    esac
    home=${AGENT_RELAY_DIR:-${HOME-}/.agent-relay}
    case $home in
    /*) ;;
    *) home=$PWD/$home ;;
    esac
    outbox=$home/agents/$name/outbox
    inbox=$home/agents/$name/inbox
    _relay_register 2>/dev/null || : # evidence for people: nothing depends on it
}

# Write this shell ($$, in its subshells too) and when it started into meta.json, like
# agent_sdk/presence.py; what else is there stays. A shell cannot take itself out when it ends:
# "unregisters": false says so, and its end bounces no mail. What is not flat JSON is left alone.
_relay_register() {
    [ -z "${_relay_command-}" ] && [ -d "$home/agents/$name" ] || return 0
    meta=$home/agents/$name/meta.json
    [ ! -h "$meta" ] || return 0
    ticks=null # field 22 of /proc/PID/stat; the name in brackets may hold anything
    if IFS= read -r line <"/proc/$$/stat"; then
        # shellcheck disable=SC2086 # in words
        set -- ${line##*) }
        ticks=${20-null}
    fi
    known='{}'
    if [ -e "$meta" ]; then
        known=''
        while IFS= read -r line || [ -n "$line" ]; do known="$known$line "; done <"$meta"
    fi
    case $known in
    *"\"pid\": $$, \"pid_start_ticks\": $ticks, "*) return 0 ;;
    esac
    _relay_is_one_command && return 0
    known=$(printf '%s\n' "$known" | _relay_unregistered)
    case $known in
    '{'*[\{\[]*) return 0 ;;
    '{'*'}') known=${known%\}} ;;
    *) return 0 ;;
    esac
    for key in pid pid_start_ticks started_at unregisters; do
        case $known in
        *"\"$key\""*) return 0 ;;
        esac
    done
    [ "$known" = '{' ] || known="$known, "
    temp=$outbox/.pending/meta.json.$$.tmp # left there by a kill it is removed like any orphan
    id=$(_relay_new_id)
    printf '%s"pid": %s, "pid_start_ticks": %s, "started_at": %s, "unregisters": false}\n' \
        "$known" "$$" "$ticks" "${id%%-*}" >"$temp" && mv -f -- "$temp" "$meta"
}

_relay_unregistered() { # stdin: a line of JSON; without the four keys, and without space around it
    token='[[:space:]]*:[[:space:]]*[0-9a-z-][0-9a-zE+.-]*[[:space:]]*'
    script='s/^[[:space:]]*//; s/[[:space:]]*$//; s/^{[[:space:]]*/{/; s/[[:space:]]*}$/}/'
    for key in pid pid_start_ticks started_at unregisters; do
        script="$script; s/\\([{,]\\)[[:space:]]*\"$key\"$token,[[:space:]]*/\\1/"
        script="$script; s/,[[:space:]]*\"$key\"$token}\$/}/; s/^{\"$key\"$token}\$/{}/"
    done
    sed "$script"
}

_relay_is_one_command() { # sh -c: who calls it has a new shell for each command, and lives on
    case $- in
    *c*) return 0 ;;
    esac
    [ -r "/proc/$$/cmdline" ] || return 1
    tr '\0' '\n' <"/proc/$$/cmdline" | (
        IFS= read -r word
        [ "${word##*/}" != busybox ] || IFS= read -r word
        while IFS= read -r word; do
            case $word in
            --*) ;;
            -*c*) exit 0 ;;
            [-+]*) ;;
            *) exit 1 ;;
            esac
        done
        exit 1
    )
}

_relay_misuse() {
    printf 'relay: %s\n' "$1" >&2
    exit 2
}

_relay_check_file() { # FILE, where one is given: a pipeline tells of its last command alone
    [ $# -eq 0 ] || [ "$1" = - ] && return
    [ -r "$1" ] && [ ! -d "$1" ] && return
    printf 'relay: %s is no file that can be read\n' "$1" >&2
    exit 1
}

_relay_check_kind() {
    case $1 in
    message | command | query | response | ack | nack | error | status | notification) ;;
    spawn | release | continuity | join | leave | subscribe | unsubscribe) ;;
    *) _relay_misuse "-k $1 is no kind of message" ;;
    esac
}

_relay_check_thread() {
    case $1 in
    '' | *[!A-Za-z0-9._:-]*) _relay_misuse "-t takes letters, digits and . _ : - only" ;;
    esac
}

_relay_check_topic() {
    case $1 in
    '' | *[!A-Za-z0-9._*#-]*) _relay_misuse "-T takes a topic like build.front.ok" ;;
    esac
}

_relay_check_id() {
    case ${1%%-*} in
    '' | *[!0-9]*) _relay_misuse "$1 is neither a message id nor a file" ;;
    esac
    case ${1#*-} in
    "$1" | *[!0-9a-f]*) _relay_misuse "$1 is neither a message id nor a file" ;;
    esac
}

_relay_check_priority() {
    case $1 in
    [0-4]) ;;
    *) _relay_misuse "-p takes 0 (critical) to 4 (background)" ;;
    esac
}

_relay_check_address() {
    case $1 in
    '*' | __orchestrator__) ;;
    '#'?*) ;;
    '' | [!a-zA-Z]* | *[!a-zA-Z0-9_-]*)
        _relay_misuse "TO is a name, *, #channel, Lead or __orchestrator__" ;;
    esac
}

_relay_check_body() { # $1: the kind, $2: how many arguments were given
    case $body in
    *"$end") body=${body%"$end"} ;;
    *) _relay_misuse "the body could not be read to its end" ;;
    esac
    [ -z "$body" ] || return 0
    case $1 in
    ack | nack | status | spawn | release | continuity) return ;;
    join | leave | subscribe | unsubscribe) return ;;
    esac
    [ "$2" -eq 2 ] || _relay_misuse "BODY is missing: one argument, or - for standard input"
    _relay_misuse "the body is empty"
}

_relay_add() {
    case $2 in
    *"$newline"* | *"$return_key"*) _relay_misuse "the value of $1 has a line break in it" ;;
    esac
    case $1$newline$header in
    ATTACHMENT*) ;;
    *"$newline$1: "*) _relay_misuse "$1 is given twice" ;;
    esac
    header=$header$1:\ $2$newline
}

_relay_add_line() {
    case $1 in
    [a-zA-Z]*:*) ;;
    *) _relay_misuse "-H takes 'NAME: value'" ;;
    esac
    field=$(printf %s "${1%%:*}" | tr '[:lower:]' '[:upper:]')
    case $field in
    *[!A-Z0-9_-]*) _relay_misuse "-H takes 'NAME: value'" ;;
    TO | CHECKSUM) _relay_misuse "$field is not for -H" ;;
    KIND) _relay_misuse "use -k for KIND" ;;
    FROM | ID | SENT | ATTEMPT | CHANNEL) _relay_misuse "only the relay writes $field" ;;
    esac
    value=${1#*:}
    _relay_add "$field" "${value# }"
}

# A variable holds no NUL byte, so a body is kept as \0ooo escapes: it has to be written again
# when the disk was full. In lines, because some shells take long over one long line; with an
# end, because a pipeline that broke in the middle must not pass for a short body.
_relay_escape() {
    { od -An -v -to1 && printf '%s\n' "$end"; } |
        sed 's/ *\([0-7]\{3\}\) */\\0\1/g' | tr -d '\n' | fold -w "$per_line"
}

_relay_unescape() {
    printf '%s\n' "$body" | while IFS= read -r line; do printf %b "$line"; done
}

_relay_new_id() {
    now=$(date +%s%N 2>/dev/null)
    case $now in
    *[!0-9]*) now='' ;; # no %N here
    esac
    [ ${#now} -ge 19 ] || now=$(date +%s)000000000
    printf '%s-%s' "$now" "$(od -An -v -N8 -tx1 /dev/urandom | tr -d ' \n')"
}

_relay_place() {
    id=$(_relay_new_id)
    temp=$outbox/.pending/$id.msg
    trap 'rm -f -- "$temp"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    for pause in 0.1 0.2 0.4 0.8 1.6 3.2 6.4 12.8 4.5 end; do # 30 s in all
        if error=$(_relay_try 2>&1); then
            _relay_sync "$outbox" || printf 'relay: %s is sent, but not synced\n' "$id" >&2
            [ -f "$home/config.json" ] ||
                printf 'relay: no relay has used %s yet; the message waits there\n' "$home" >&2
            printf '%s\n' "$id"
            exit 0
        fi
        rm -f -- "$temp"
        case $error in
        *'No space left'* | *'uota exceeded'*) ;;
        *) break ;;
        esac
        [ "$pause" = end ] || _relay_pause "$pause"
    done
    printf 'relay: not sent: %s\n' "$(printf %s "${error:-the write failed}" | tr '\n' ' ')" >&2
    exit 1
}

_relay_try() {
    mkdir -p -- "$outbox/.pending" &&
        mkdir -p -- "$inbox" &&
        { printf '%s\n' "$header" && _relay_unescape; } | _relay_write "$temp" &&
        _relay_check_size &&
        _relay_sync "$temp" &&
        mv -f -- "$temp" "$outbox/$id.msg"
}

_relay_check_size() { # a pipeline fails with its last command alone; a byte is 5 characters
    escapes=$((${#body} - ${#body} / (per_line + 1)))
    size=$(($(printf '%s\n' "$header" | wc -c) + escapes / 5))
    [ "$(wc -c <"$temp")" -eq "$size" ] && return
    printf 'the message could not be written whole\n' >&2
    return 1
}

_relay_write() {
    cat >"$1"
}

_relay_sync() {
    sync "$1"
}

_relay_pause() {
    sleep "$1" 2>/dev/null || sleep 1 # no fractions here
}

# Names by priority, then age; nothing where the order is that of the names, as of one or none.
# grep prints of each file its PRIORITY, or the blank line behind the header where there is none.
_relay_order() {
    set -- "$inbox"/*.msg
    [ $# -gt 1 ] || return 0
    find "$inbox/." ! -name . -prune -type f -name '*.msg' -exec \
        grep -asHm1 -e '^PRIORITY: [0-4]$' -e '^$' {} + 2>/dev/null |
        sed -n 's|.*/\([0-9]*-[0-9a-f]*\.msg\):PRIORITY: \([0-4]\)$|\2 \1|p
            s|.*/\([0-9]*-[0-9a-f]*\.msg\):$|2 \1|p' |
        sort | sed 's/^..//'
}

_relay_take() { # prints the message; fails when there is none, or another process was faster
    [ -f "$1" ] && [ ! -h "$1" ] || return 1
    if error=$(mv -f -- "$1" "$inbox/.read/" 2>&1); then
        cat -- "$inbox/.read/${1##*/}"
    elif [ -e "$1" ]; then
        printf 'relay: %s\n' "$error" >&2
        exit 1
    else
        return 1
    fi
}

_relay_find_original() { # sets re and to; the relay routes answers by RE, so an id is enough
    case $1 in
    */* | *.msg)
        [ -f "$1" ] || _relay_misuse "there is no file $1"
        re=$(relay_header ID "$1") || _relay_misuse "$1 has no ID: it is no delivered message"
        to=$(relay_header FROM "$1") || to=__orchestrator__
        ;;
    *)
        _relay_check_id "$1"
        re=$1 to=__orchestrator__
        ;;
    esac
}

case ${ZSH_VERSION-}${0##*/} in
relay.sh) # run, not sourced
    case ${1-} in
    send | recv | ack | nack | header | body)
        _relay_command=relay_$1
        shift
        "$_relay_command" "$@"
        exit
        ;;
    *) _relay_misuse "usage: relay.sh send|recv|ack|nack|header|body ..." ;;
    esac
    ;;
esac
