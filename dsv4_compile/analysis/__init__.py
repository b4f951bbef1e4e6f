"""Questions that passes ask of a graph."""
