"""What records and replays pieces: two engines with one contract."""
