#!/bin/sh
# relay.sh: talk through a relay from a shell. POSIX sh and coreutils, nothing else.
#
#   export AGENT_RELAY_NAME=builder             who you are; the home is the one of `relay where`
#   . relay.sh                                  or run it: relay.sh send bob "hello"
#
#   relay_send [OPTIONS] TO [BODY|-]            send; prints the message id
#   relay_reply ID|FILE TEXT|-                  answer the sender of a message, in its thread
#   relay_recv [-t SECONDS]                     take the first by priority, then age; print it
#   relay_ack  ID|FILE [received|in_progress|completed] [TEXT]
#   relay_nack ID|FILE ERROR                    answer a command or query
#   relay_attachment REF|FILE                   print an attachment, of a message in FILE
#   relay_header NAME [FILE]                    one header of a message on stdin or in FILE
#   relay_body [FILE]                           its body
#
#   OPTIONS  -k KIND -t THREAD -r RE -p PRIORITY -T TOPIC, any number of -H 'NAME: value', -a FILE
#            -w none|taken|delivered|read|done|answer[=TIME]: as `relay send --wait`, which it needs
#   BODY     one argument, or - for standard input, byte for byte
#
# The shell that sources this is registered in meta.json with its first call, so that its end can be
# seen (`relay agents`); one that runs a single command (sh -c) is not, nor is relay.sh when run.
# A message is written to outbox/.pending, synced, and renamed into the outbox: after the rename
# it is sent. Taking one renames it into inbox/.read: that is the evidence of reading.
# Sending waits up to two seconds for the relay, unless RELAY_NO_WAIT is set. Exit status: 0 done,
# 1 could not be done (recv: nothing came), 2 wrong use, 4 not so far in time (-w), 5 sent (the id
# is printed), but no relay has taken it yet; or no home, 6 refused. Each says why in one line on
# stderr. The functions are subshells: no variable, option or trap of yours changes.
#
# shellcheck disable=SC2015,SC2030,SC2031,SC3013,SC3067  # … or misuse, which ends; so do variables

# Aliases such as mv='mv -iv' are not meant for these functions; at the end they count again.
_relay_aliases=''
# shellcheck disable=SC3010,SC3044,SC3062
case ${ZSH_VERSION:+zsh}${BASH_VERSION:+bash} in
zsh) ! [[ -o aliases ]] || { unsetopt aliases && _relay_aliases='setopt aliases'; } ;;
bash) ! shopt -q expand_aliases || { shopt -u expand_aliases && _relay_aliases='shopt -s expand_aliases'; } ;;
esac

relay_send() (
    _relay_begin
    header='' kind=message names='' wait=''
    usage="usage: relay_send [-k kind] [-t thread] [-r re] [-p priority] [-T topic] [-H 'NAME: value'] [-a file] [-w word] TO [BODY|-]"
    case ${1-} in -h | --help) _relay_misuse "$usage" ;; esac
    OPTIND=1
    while getopts :k:t:r:p:T:H:a:w: option; do
        case $option in
        k) _relay_add KIND "$OPTARG" && _relay_check k "$OPTARG" && kind=$OPTARG ;;
        t) _relay_add THREAD "$OPTARG" && _relay_check t "$OPTARG" ;;
        r) _relay_add RE "$OPTARG" && _relay_check_id "$OPTARG" ;;
        p) _relay_add PRIORITY "$OPTARG" && _relay_check p "$OPTARG" ;;
        T) _relay_add TOPIC "$OPTARG" && _relay_check T "$OPTARG" ;;
        H) _relay_add_line "$OPTARG" ;;
        a) _relay_attach "$OPTARG" ;;
        w) _relay_check w "${OPTARG%%=*}" && wait=$OPTARG ;;
        :) _relay_misuse "-$OPTARG needs a value" ;;
        *) _relay_misuse "there is no option -$OPTARG; $usage" ;;
        esac
    done
    shift $((OPTIND - 1))
    [ $# -eq 1 ] || [ $# -eq 2 ] || _relay_misuse "$usage"
    case $names in *[!/]*) _relay_add ATTACHMENT-NAMES "${names#/}" ;; esac
    _relay_check to "$1" && to=$1
    header="TO: $to$newline$header"
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
    _relay_await && case $wait in '' | none) ;; *) relay --home "$home" wait "$id" "$wait" ;; esac
)

relay_recv() (
    _relay_begin takes
    case $#:${1-} in
    0:) seconds=0 ;;
    2:-t) seconds=$2 ;;
    1:-t?*) seconds=${1#-t} ;;
    *) _relay_misuse "usage: relay_recv [-t SECONDS]" ;;
    esac
    case $seconds in '' | 0?* | *[!0-9]*) _relay_misuse "-t $seconds is not a whole number of seconds" ;; esac
    looks=$((seconds * 10))
    mkdir -p -- "$inbox/.read" || exit 1
    while :; do
        for file in $(_relay_order) "$inbox"/*.msg; do # all, for what has no header or valid name
            _relay_take "$inbox/${file##*/}" && exit
        done
        [ "$looks" -gt 0 ] || exit 1
        looks=$((looks - 1))
        _relay_pause 0.1
    done
)

relay_reply() (
    _relay_begin
    [ $# -eq 2 ] || _relay_misuse "usage: relay_reply ID|FILE TEXT|-"
    file=$1
    case $1 in
    */* | *.msg) ;;
    *) for file in "$inbox/.read/$1.msg" "$inbox/$1.msg"; do [ ! -f "$file" ] || break; done ;;
    esac
    _relay_find_original "$file"
    kind=message thread=$(relay_header THREAD "$file")
    [ "$(relay_header KIND "$file")" != query ] || kind=response
    relay_send -k "$kind" -r "$re" ${thread:+-t "$thread"} -- "$to" "$2"
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

relay_attachment() (
    _relay_begin
    [ $# -eq 1 ] || _relay_misuse "usage: relay_attachment REF|FILE"
    case $1 in
    sha256:*) ref=$1 ;;
    *) _relay_check_file "$1" && ref=$(relay_header ATTACHMENT "$1") ||
        _relay_fail "$1 has no attachment" ;;
    esac
    case $ref in *"$newline"*) _relay_misuse "$1 has several attachments, name one: $ref" ;; esac
    stored=$(_relay_stored "${ref#sha256:}")
    [ -f "$stored" ] || _relay_fail "there is no attachment $ref"
    sum=$(sha256sum <"$stored")
    [ "sha256:${sum%% *}" = "$ref" ] || _relay_fail "$stored is damaged"
    cat -- "$stored"
)

relay_header() (
    _relay_settle
    case ${1-} in '' | *[!A-Za-z0-9_-]*) _relay_misuse "usage: relay_header NAME [FILE]" ;; esac
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
    # What is in $(…) is parsed when it runs.
    # shellcheck disable=SC3044
    case ${ZSH_VERSION:+zsh}${BASH_VERSION:+bash} in
    zsh) emulate sh && unsetopt aliases ;;
    bash) shopt -u expand_aliases failglob nocaseglob nocasematch ;;
    esac
    set +e +f +u +x +C # the caller's habits are not these functions'
    unset -f cd chpwd 2>/dev/null # they may print
    # shellcheck disable=SC2034
    chpwd_functions='' # of zsh
    export LC_ALL=C    # bytes, and names in byte order
    newline='
'
    IFS=" $(printf '\t')$newline"
    return_key=$(printf '\r')
    end=' END'
    per_line=10000
    umask 077
    # Where standard input is closed, bash gives its number to a pipe, and od reads what od wrote.
    { true 3<&0; } 2>/dev/null || exec </dev/null
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
    operator*[!_-]*) ;; # another name that begins so
    operator*) [ "$name" = operator ] || _relay_misuse "AGENT_RELAY_NAME $name is reserved" ;;
    esac
    _relay_home "${1-}"
    outbox=$home/agents/$name/outbox inbox=$home/agents/$name/inbox
    _relay_register 2>/dev/null || : # evidence for people: nothing depends on it
}

# Sets home, by the rules of relay/base/discovery.py. To take messages ($1) it must be certain:
# where the variable and the search mean different homes, messages may wait in either.
_relay_home() {
    home=${AGENT_RELAY_DIR-} found='' is_safe=''
    [ -n "$home" ] && { [ -z "$1" ] || [ -n "${AGENT_RELAY_SPAWN-}" ]; } || _relay_search
    case $home:$found:$is_safe in
    :?*:) _relay_fail "$found is a link, another user's, or not of mode 700: set AGENT_RELAY_DIR" ;;
    ?*:?*:1) [ ! -e "$home/config.json" ] || [ "$home" -ef "$found" ] || _relay_fail \
        "AGENT_RELAY_DIR is $home, but there is $found: unset it, or work elsewhere" 5 ;;
    esac
    home=${home:-${found:-${HOME:+$HOME/.agent-relay}}}
    case $home in
    '') _relay_fail "HOME is not set: set it, or AGENT_RELAY_DIR" 5 ;;
    [!/]*) home=$PWD/$home ;;
    esac
    # What another user writes is refused by the relay, and what one takes may be unreadable.
    [ ! -e "$home" ] || [ -O "$home" ] || _relay_fail "$home belongs to another user: be that user"
    [ -z "${AGENT_RELAY_DIR-}" ] || { [ -e "$home/config.json" ] && [ -d "$home/agents" ]; } ||
        _relay_fail "$home is not a relay home: config.json or agents/ is missing; run \`relay --home $home init\`, or set AGENT_RELAY_DIR to another" 5
}

_relay_search() { # sets found, and is_safe
    CDPATH='' main='' from=$(pwd -P)
    limit=$(cd -P -- "${HOME:-/}" 2>/dev/null && pwd -P)
    top=${from%/}
    while [ "${top:-/}" != "$limit" ]; do
        found=$top/.agent-relay
        if [ -e "$found/config.json" ] || { [ -d "$found" ] && [ ! -x "$found" ]; }; then
            case $(ls -ldn -- "$found") in d???------*) [ ! -O "$found" ] || is_safe=1 ;; esac
            [ "$(stat -Lc%d -- "$from" "${top:-/}" 2>/dev/null | sort -u | wc -l)" -lt 2 ] && return
        fi
        found=''
        [ -n "$main" ] || ! main=$(_relay_main_tree) || { from=$main top=$main && continue; }
        [ -n "$top" ] && top=${top%/*} || return 0
    done
}

_relay_main_tree() { # of the linked work tree of git at top
    [ -f "$top/.git" ] && IFS=' ' read -r word folder <"$top/.git" && [ "$word" = gitdir: ] &&
        cd -P -- "$top" && cd -P -- "$folder" && IFS= read -r folder <commondir &&
        cd -P -- "$folder" && [ "${PWD##*/}" = .git ] && cd .. && pwd -P
} 2>/dev/null

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
    [ ! -e "$meta" ] || known=$(tr '\n' ' ' <"$meta")
    case $known in *"\"pid\": $$, \"pid_start_ticks\": $ticks, "*) return 0 ;; esac
    _relay_is_one_command && return 0
    known=$(printf '%s\n' "$known" | _relay_unregistered)
    case $known in
    '{'*[\{\[]*) return 0 ;;
    '{'*'}') known=${known%\}} ;;
    *) return 0 ;;
    esac
    for key in pid pid_start_ticks pid_namespace started_at unregisters; do
        case $known in *"\"$key\""*) return 0 ;; esac
    done
    [ "$known" = '{' ] || known="$known, "
    namespace=$(readlink "/proc/$$/ns/pid" 2>/dev/null) namespace=${namespace#*\[}
    case ${namespace%\]} in '' | *[!0-9]*) namespace=0] ;; esac
    id=$(_relay_new_id)
    temp=$outbox/.pending/meta.json.$id.tmp # left there by a kill it is removed like any orphan
    {
        printf '%s"pid": %s, "pid_start_ticks": %s, ' "$known" "$$" "$ticks"
        printf '"pid_namespace": %s, "started_at": %s, ' "${namespace%\]}" "${id%%-*}"
        printf '"unregisters": false}\n'
    } >"$temp" && mv -f -- "$temp" "$meta"
}

_relay_unregistered() { # stdin: a line of JSON; without these keys, and without space around it
    token='[[:space:]]*:[[:space:]]*[0-9a-z-][0-9a-zE+.-]*[[:space:]]*'
    script='s/^[[:space:]]*//; s/[[:space:]]*$//; s/^{[[:space:]]*/{/; s/[[:space:]]*}$/}/'
    for key in pid pid_start_ticks pid_namespace started_at unregisters; do
        script="$script; s/\\([{,]\\)[[:space:]]*\"$key\"$token,[[:space:]]*/\\1/"
        script="$script; s/,[[:space:]]*\"$key\"$token}\$/}/; s/^{\"$key\"$token}\$/{}/"
    done
    sed "$script"
}

_relay_is_one_command() { # sh -c: who calls it has a new shell for each command, and lives on
    case $- in *c*) return 0 ;; esac # its options: the words up to the first without - or +
    tr '\0' '\n' <"/proc/$$/cmdline" | sed '1{/busybox$/N;d;}; /^[-+]/!q' | grep -q '^-[^-]*c'
}

_relay_misuse() { _relay_fail "$*" 2; }

_relay_fail() { # TEXT [STATUS]
    printf 'relay: %s\n' "$1" >&2
    exit "${2-1}"
}

_relay_check_file() { # FILE, where one is given: a pipeline tells of its last command alone
    [ $# -eq 0 ] || [ "$1" = - ] && return
    [ -r "$1" ] && [ ! -d "$1" ] || _relay_fail "$1 is not a readable file"
}

_relay_check() { # OPTION VALUE
    case $1:$2 in
    k:message | k:command | k:query | k:response | k:ack | k:nack | k:error | k:status | k:join) ;;
    k:notification | k:spawn | k:release | k:continuity | k:leave | k:subscribe | k:unsubscribe) ;;
    k:*) _relay_misuse "-k $2 is not a kind of message" ;;
    t: | t:*[!A-Za-z0-9._:-]*) _relay_misuse "-t takes letters, digits and . _ : - only" ;;
    T: | T:*[!A-Za-z0-9._*#-]*) _relay_misuse "-T takes a topic like build.front.ok" ;;
    w:none | p:[0-4]) ;;
    p:*) _relay_misuse "-p takes 0 (critical) to 4 (background)" ;;
    w:taken | w:delivered | w:read | w:done | w:answer)
        command -v relay >/dev/null || _relay_misuse "-w $2 needs the command relay on the path" ;;
    w:*) _relay_misuse "-w takes none, taken, delivered, read, done or answer, or one with =10s" ;;
    to:'*' | to:__orchestrator__ | to:'#'?*) ;;
    to: | to:[!a-zA-Z]* | to:*[!a-zA-Z0-9_-]*)
        _relay_misuse "TO is a name, *, #channel, Lead or __orchestrator__" ;;
    esac
}

_relay_check_id() {
    case ${1%%-*} in '' | *[!0-9]*) _relay_misuse "$1 is neither a message id nor a file" ;; esac
    case ${1#*-} in "$1" | *[!0-9a-f]*) _relay_misuse "$1 is neither a message id nor a file" ;; esac
}

_relay_check_body() { # $1: the kind, $2: how many arguments were given
    case $body in
    *"$end") body=${body%"$end"} ;;
    *) _relay_misuse "the body could not be read to its end" ;;
    esac
    [ -z "$body" ] || return 0
    case $1 in message | command | query | response | error | notification) ;; *) return 0 ;; esac
    [ "$2" -eq 2 ] || _relay_misuse "BODY is missing: one argument, or - for standard input"
    _relay_misuse "the body is empty"
}

_relay_add() {
    case $2 in
    *"$newline"* | *"$return_key"*) _relay_misuse "the value of $1 has a line break in it" ;;
    esac
    case $1$newline$header in
    "ATTACHMENT$newline"*) names=$names/${3-} ;; # of the file, if it has one
    *"$newline$1: "*) _relay_misuse "$1 is given twice" ;;
    esac
    header=$header$1:\ $2$newline
}

_relay_add_line() {
    case $1 in [a-zA-Z]*:*) ;; *) _relay_misuse "-H takes 'NAME: value'" ;; esac
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
    case $now in *[!0-9]*) now='' ;; esac # no %N here
    [ ${#now} -ge 19 ] || now=$(date +%s)000000000
    printf '%s-%s' "$now" "$(od -An -v -N8 -tx1 /dev/urandom | tr -d ' \n')"
}

_relay_place() {
    id=$(_relay_new_id)
    temp=$outbox/.pending/$id.msg
    trap 'rm -f -- "$temp"' EXIT
    trap 'exit 129' HUP; trap 'exit 130' INT; trap 'exit 143' TERM
    _relay_retry _relay_try
    _relay_sync "$outbox" || printf 'relay: %s is sent, but not synced\n' "$id" >&2
    [ -f "$home/config.json" ] ||
        printf 'relay: no relay has used %s yet; the message waits there\n' "$home" >&2
    printf '%s\n' "$id" 2>/dev/null || _relay_fail "stdout cannot be written; sent as $id"
}

# FUNCTION, which writes $temp, again while the disk is full. A command that was stopped and went on
# has in zsh's $(...) the status of the stop: its output tells what it did.
_relay_retry() {
    for pause in 0.1 0.2 0.4 0.8 1.6 3.2 6.4 12.8 4.5 end; do # 30 s in all
        error=$("$1" 2>&1 && printf '\ndone')
        case $error in *"${newline}done") return 0 ;; esac
        rm -f -- "$temp"
        case $error in
        *'No space left'* | *'uota exceeded'*) ;;
        *) break ;;
        esac
        [ "$pause" != 0.1 ] || printf 'relay: disk full, trying for 30 s\n' >&2
        [ "$pause" = end ] || _relay_pause "$pause"
    done
    _relay_fail "not sent: $(printf %s "${error:-the write failed}" | tr '\n' ' ')"
}

# The relay writes its pid into .lock, and empties it when it stops; a killed one does not, so the
# wait decides. Its nack is there before the message leaves the outbox; it stays in the inbox if
# only some of several recipients did not get the message.
_relay_await() {
    [ "$wait" != none ] && [ -z "${RELAY_NO_WAIT-}" ] || return 0
    waits="the message waits in the outbox"
    [ -s "$home/.lock" ] || _relay_fail "no relay is running for $home: $waits" 5
    for pause in 0.005 0.01 0.02 0.04 0.08 0.16 0.32 0.64 0.725 end; do # 2 s in all
        [ -f "$outbox/$id.msg" ] || break
        [ "$pause" != end ] || _relay_fail "the relay has not taken it over within 2 s: $waits" 5
        _relay_pause "$pause"
    done
    find "$inbox/." ! -name . -prune -type f -name '*.msg' -exec grep -alsx "RE: $id" {} + |
        while IFS= read -r file; do
            text=$(relay_body "$file" | tr '\n' ' ')
            case $(relay_header KIND "$file")-$(relay_header FROM "$file")-$to-$text in
            nack-__orchestrator__-[*#]*' did not get '*) ;;
            nack-__orchestrator__-*) _relay_take "$file" >/dev/null && _relay_fail "${text% }" 6 ;;
            esac
        done
    [ $? -ne 6 ] || return 6
    for file in "$home"/archive/*/"$name/rejected/$id.msg"; do
        [ ! -f "$file" ] || _relay_fail "refused; another process of $name took the reason" 6
    done
}

_relay_attach() { # FILE: into the store of attachments, and a header for it
    [ -f "$1" ] || _relay_misuse "-a $1 is not a regular file"
    source=$1 size=$(wc -c <"$1")
    [ -n "$size" ] || exit 1
    sum=$(_relay_source | sha256sum)
    stored=$(_relay_stored "${sum%% *}")
    temp=${stored%/*}/.$(_relay_new_id).tmp # not $$: of two at once in this shell, too
    trap 'rm -f -- "$temp"' EXIT
    _relay_retry _relay_store
    _relay_add ATTACHMENT "sha256:${sum%% *}" "$(printf %s "${1##*/}" | tr '[:cntrl:]' _)"
}

_relay_source() { head -c "$((size))" <"$source"; } # of one that grows, what was there at first

_relay_stored() { printf '%s/attachments/%.2s/%s' "$home" "$1" "$1"; }

_relay_store() { # what is there already is touched, so that it is not removed as unused
    if [ "$({ sha256sum <"$stored"; } 2>/dev/null)" = "$sum" ]; then
        touch -- "$stored"
    else
        mkdir -p -- "${stored%/*}" && _relay_source | _relay_write "$temp" &&
            _relay_sync "$temp" && _relay_check_copy && mv -f -- "$temp" "$stored"
    fi && _relay_sync "${stored%/*}"
}

_relay_check_copy() {
    [ "$(sha256sum <"$temp")" = "$sum" ] && return
    printf '%s changed while it was being attached\n' "$source" >&2
    return 1
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

_relay_write() { cat >"$1"; }
_relay_sync() { sync "$1"; }
_relay_pause() { sleep "$1" 2>/dev/null || sleep 1; } # no fractions here

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
    error=$(mv -f -- "$1" "$inbox/.read/" 2>&1 && printf '\ndone') # see _relay_retry
    case $error in
    *"${newline}done")
        cat -- "$inbox/.read/${1##*/}" 2>/dev/null && return
        error="could not print $inbox/.read/${1##*/}" ;;
    *) [ -e "$1" ] || return 1 ;;
    esac
    _relay_fail "$error"
}

_relay_find_original() { # sets re and to; the relay routes answers by RE, so an id is enough
    case $1 in
    */* | *.msg)
        [ -f "$1" ] || _relay_misuse "there is no file $1"
        re=$(relay_header ID "$1") || _relay_misuse "$1 has no ID: it was not delivered by a relay"
        to=$(relay_header FROM "$1") || to=__orchestrator__
        ;;
    *) _relay_check_id "$1" && re=$1 to=__orchestrator__ ;;
    esac
}

if [ "${ZSH_VERSION-}${0##*/}" = relay.sh ]; then # run, not sourced
    case ${1-} in
    send | recv | reply | ack | nack | attachment | header | body) _relay_command=relay_$1 ;;
    *) _relay_misuse "usage: relay.sh send|recv|reply|ack|nack|attachment|header|body ..." ;;
    esac
    shift
    "$_relay_command" "$@"
    exit
fi
eval "$_relay_aliases"
unset _relay_aliases
