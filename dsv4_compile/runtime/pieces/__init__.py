"""What runs a piece, as it is, checked or compiled."""
