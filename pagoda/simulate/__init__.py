"""The simulated world: hardware model, clock, timeline."""
