"""`kvscope top`: the live view of a fleet, over the daemon's HTTP API or a stored window of the past."""
