"""The scheduler: makes all decisions while a step runs, as one deterministic state machine.

It receives events (the methods of `Scheduler`) and issues operations (`Operation`). It uses no tensors, threads,
streams or clocks. So a real run, a simulation and a randomized test can all drive it, and the same events always give
the same operations.

A step, as the scheduler sees it:

    access(unit) ... release(unit)       forward and backward use units; compute waits until `ready`
    gradient(unit)                       autograd has made a gradient
    end_step()                           `step()`: queues the updates
    ended(operation), failed(operation)  lanes (the executor's queues) report, at any time

The scheduler has seven parts, each in a file that states its invariants. Each knows only parts above it:

    order.py        when each unit is used next, by the trace of earlier steps and by routers of experts
    gradients.py    where gradients wait for their update: OFFLOAD, SPILL, RELOAD
    versions.py     which versions of its states each unit has, where they are, and who may still read them: ADOPT, FREE
    leases.py       which weights compute can read: FETCH, EVICT, OUTDATE
    checkpoints.py  which states a checkpoint reads next: SAVE
    updates.py      which update runs next, and which version it makes: ASK, REQUEST, UPDATE,
                    CONFIRM, SHARE, READ_AHEAD
    staleness.py    which steps see asynchronous updates

`records.py` has what the parts know of each lease, gradient, update and unit. `scheduler.py` connects the parts. It
passes each event to the parts that it concerns, in a fixed order. Then it lets each part start what can start now
("pump"). State changes only in events. Only the executor knows whether a tensor still refers to a lease, so a question
(EVICT, OUTDATE, ASK) asks it.

Two further state machines are no parts of the scheduler. `stream.py` orders the blocks of the UPDATEs that the
scheduler issues. `activations.py` decides when offloaded activations leave and come back.

These rules hold for any order of events. `tests/worlds` tests them:

- a frame has one owner, and weights in use are not evicted;
- an access reads exactly the version of the weights that the algorithm requires;
- each gradient is applied once, or dropped with its step;
- a version that something may still read is never changed, and versions, leases and buffers fit their pages;
- if compute waits, an operation is under way; otherwise only dropped references or an error can end the wait;
- ranks that run the same program issue the same fetches, however fast their lanes are.
"""
