"""Scripts for whoever works on Tidings. Nothing here is shipped."""
