"""Train and measure the bundled target/draft pair (development only, not shipped)."""
