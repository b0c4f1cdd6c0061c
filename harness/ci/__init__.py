"""What a CI system shows of a gate: pure functions from a GateVerdict to text.

    junit        JUnit XML, as Jenkins' schema (junit-10.xsd) has it
    page         the verdict as Markdown of limited size: GitHub's step summary, a comment
    annotations  GitHub's ::error, ::warning and ::notice

Names, reasons and details in a verdict may come from a stranger's change: each renderer writes
them as text, which can neither end a table, a command or an element, nor mention anybody. A run
without a gate is shown as a verdict too, which says that it is one, see `runs`.
"""
