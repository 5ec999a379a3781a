"""Training and measurement of the bundled target/draft pair (development only, not shipped)."""
