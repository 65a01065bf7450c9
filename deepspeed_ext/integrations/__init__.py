"""Integrations with other libraries; each module needs the library of the same name."""
