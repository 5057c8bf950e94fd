"""Who is asking, and what they may do: one policy for all endpoints."""
