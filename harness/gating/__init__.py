"""The merge gate: a policy, two sides of a change, and a verdict with the reasons for it."""
