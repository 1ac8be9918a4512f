"""The flow: what becomes of a file, from the hint to the archive. ``dispatch`` has it whole.

    watcher, hearing              hear       what was touched, what was read
    waiting, ratelimit            look       whose turn it is, and how fast
    intake, found                 look       which files are complete; they become messages
    door, attachments             look       what is asked of a message before anything is done
    admission                     record and claim: new, known, or refused
    router, decide                decide     who gets it, and the engine's word
    carry, delivery               stage, commit, deliver, note
    finish                        archive
    held, overdue, originals      what is delivered again
    reminders                     answers that are overdue
    loops                         agents that answer each other without end
    lost_time                     deadlines count the time that the relay runs
    work                          the values that go from step to step

States, and what a crash leaves of each: docs/states.md.
"""
