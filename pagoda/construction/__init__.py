"""Construction of a wrapped model: parameters are built one at a time, straight into their homes in the plan."""
