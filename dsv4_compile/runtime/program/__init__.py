"""The straight-line program of a captured bucket: how it is built, written, kept and found."""
