"""The scheduler: everything that is decided while a step runs, as one deterministic state machine.

It is told what happens (events, the methods of `Scheduler`) and says what is to be done (`Operation`s). It knows no
tensor, thread, stream or clock. So a real run, a simulation and a random world in a test can all drive it, and the same
events always give the same operations.

A step, as the scheduler sees it:

    access(unit) ... release(unit)       forward and backward use units; compute waits until `ready`
    gradient(unit)                       autograd has made a gradient
    end_step()                           `step()`: which updates to make of the gradients
    ended(operation), failed(operation)  lanes (the executor's queues) report, at any time

Seven parts share the work, each in a file that states its invariants. They are made in this order, and each knows only
those before it:

    order.py        when each unit is used next, by the trace of earlier steps, and by routers of experts
    gradients.py    where gradients wait for their update: OFFLOAD, SPILL, RELOAD
    versions.py     which version of its weights each unit has, and which one compute needs
    leases.py       which weights are in reach of compute: FETCH, RECLAIM
    checkpoints.py  which states a checkpoint reads next, and which old ones are kept for it: SAVE
    turns.py        after which steps asynchronous updates come, and which steps see them: PUBLISH
    updates.py      which update runs next, and which version that makes: UPDATE, UNDO, SHARE, READ_AHEAD

`scheduler.py` joins them: it passes each event to the parts that it concerns, in a fixed order, and then lets each
start what can start now ("pump"). State changes in events alone. What only the executor can know, whether a tensor
still refers to a lease, is an operation (RECLAIM) with an answer.

What always holds, whatever the order of events; `tests/schedule/worlds.py` tries it in random worlds:

- a frame has one owner, and what compute uses is not evicted;
- an access reads exactly the version of the weights that the algorithm says;
- each gradient is applied once, or dropped with its step;
- what is kept for a checkpoint fits the reserve, leases and buffers fit their frames;
- if compute waits, some operation is under way, or only references that are let go, or an error, can end the wait;
- ranks whose programs are alike fetch alike, however fast their lanes are.
"""
