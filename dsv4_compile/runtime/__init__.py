"""What runs a plan."""
