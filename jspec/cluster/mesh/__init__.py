"""One model over several processes, each with its own devices."""
