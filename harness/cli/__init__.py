"""The command line. In comes what a user types; out go tables and an exit status. One module a
command family parses options, calls the other rooms and prints what they return; `main` alone ends
the process and turns errors into exit statuses.
"""
