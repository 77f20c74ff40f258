"""Real processes around the live engine: a lighthouse, and replicas that are started, watched and started again.

    contract     what a replica is told, and what it tells
    address      HOST:PORT, and which address to listen on
    program      the command line of a replica; the folder of a job
    process      one child process: its log, its signals, its death with ours
    lighthouse   torchft's meeting point, as a process of its own
    restart      what to do when a replica ends (pure)
    supervisor   does it
    watch        the loop around it, until the end
    schedule     availability trace -> who starts and who is killed when (pure)
    replay       does that
    account      the records of all replicas -> what was committed once, what was given up, what a change cost
    status       what the lighthouse and the replicas say now
    display      that, for people

None of it imports torch when it is imported: a launcher starts in a moment and stays small beside what it launches.
"""
