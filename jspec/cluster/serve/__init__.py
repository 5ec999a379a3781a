"""Replicas of an engine behind one server, with Ray Serve."""
