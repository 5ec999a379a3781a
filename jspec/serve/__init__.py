"""An OpenAI-compatible server on `jspec.engine.Engine`; needs the extra ``serve``."""
