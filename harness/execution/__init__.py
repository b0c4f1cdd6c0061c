"""Parent side: runner, launcher, watchdog; and the worker entry point."""
