"""How the bundled target/draft pair is made and measured (development only, not shipped)."""
