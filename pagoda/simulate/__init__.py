"""The simulated world: a hardware model, a clock, and a timeline."""
