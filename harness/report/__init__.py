"""What a reader sees. In come runs, verdicts and the results of gates and bisections; out go dated
Markdown pages with figures, and the sentences that the command line and CI print. Numbers are
computed elsewhere; here they get their words, tables and templates.
"""
