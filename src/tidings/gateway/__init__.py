"""The gateway: authorised realtime delivery of what was committed, and of what the node itself has to tell."""
