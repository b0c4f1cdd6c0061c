"""The command line: parses options, calls the other packages, prints what they return.

One module a command family. `main` alone ends the process: errors become exit statuses there.
"""
