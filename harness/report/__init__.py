"""Context, figures, templates, Markdown."""
