"""What a person or a tool can look at: explain, stage dumps, logs, the command line."""
