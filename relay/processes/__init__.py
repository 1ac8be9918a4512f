"""Processes that the relay starts for agents: asked for, started, looked after, ended.

    requests           what a spawn or a release asks for, or why not
    rules              which state a process is in, and what follows its end
    table              the ledger's rows of processes and intents
    runfiles           what one is started with, and who holds its name
    rotation           its output, kept short
    starting, child    one process: to start it or to find it; as it is kept in memory
    looks              what those that run use, owe and wrote
    supervisor         all of it, a step at a time
    spawner, pids      the system's part: starting, finding and ending

Why so: docs/decisions/0010-processes.md.
"""
