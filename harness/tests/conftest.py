"""What all tests of the harness start from."""

import os

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)  # set by readline, which pytest imports: a pipe has no width
