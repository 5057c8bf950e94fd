"""What is done later: appointments by time, watches by condition, and the actions that both of them set off."""
