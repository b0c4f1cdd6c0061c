"""What a reader sees: one context made from a run, its tables, figures and sentences, rendered by
templates to dated Markdown. Every sentence is written in this room.
"""
