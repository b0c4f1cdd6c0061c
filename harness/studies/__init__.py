"""Studies of the harness itself: how often its own answers are wrong."""
