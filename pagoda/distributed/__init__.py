"""Several ranks that train one model: the processes, how they communicate, and which part of a unit each of them
holds."""
