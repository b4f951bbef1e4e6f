"""One file a section; each has a `run` that is given a `Bench`."""
