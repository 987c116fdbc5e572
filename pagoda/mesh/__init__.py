"""Who the ranks are: processes, their grid, and which rank has which part of a unit."""
