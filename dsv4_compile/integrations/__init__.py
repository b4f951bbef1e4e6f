"""Bridges to other libraries; each is imported on its own, and only then needs that library."""
