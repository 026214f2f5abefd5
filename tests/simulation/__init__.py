"""The whole system in one thread, under a seeded scheduler: real drains, real job builders, the broker in memory.

    plan.py          seed -> what is published, and which faults strike when
    packages.py      the models, without files
    virtual_time.py  the clock, the queue of what happens next, the trace; time passes nowhere else
    broker.py        an end of the broker whose calls may fail, be late, be answered twice or not at all
    worker.py        a real Drain, its three kinds of threads stepped in turn; crashes, freezes, drains
    parts.py         parts of the drain that check what they do, or let virtual time pass
    client.py        a producer: the real JobBuilder, ReplyRouter and JobState, with a client's retries
    operators.py     an operator who repairs the model that crashed, and puts dead letters back
    checker.py       what was promised, checked when a schedule is over; simulate(seed) -> Outcome
    mutants.py       brokers and drains that break one promise each, to test the checker; every_mutant.py lists all

`python -m tests.simulation --seeds 5000` runs schedules; `--from SEED --seeds 1 --trace` shows one.
"""
