"""Child side: accuracy, steady state, timing, memory."""
