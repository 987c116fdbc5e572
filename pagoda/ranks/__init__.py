"""What ranks do together: collectives and their order, gathering, reducing, pipelines, expert parallelism."""
