"""One model across several processes, each with its own devices."""
