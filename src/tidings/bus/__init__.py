"""The bus: durable consumer groups over the log."""
