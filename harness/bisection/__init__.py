"""Which commit, and which difference of configuration, moved a number."""
