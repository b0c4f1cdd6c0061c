"""Context, figures, templates, Markdown."""

from harness.report.render import ReportPaths, check_writable, write

__all__ = ["ReportPaths", "check_writable", "write"]
