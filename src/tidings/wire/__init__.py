"""Frames and codes of every protocol, for both ends; what an endpoint sees of a connection."""
