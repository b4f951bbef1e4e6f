"""The records of a graph, what is known of ops, and how graphs and units are made."""
