"""Several ranks that train one model: who they are, how they talk, and which part of a unit each of them holds."""
