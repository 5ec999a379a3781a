"""An OpenAI-compatible server on `jspec.engine.Engine`; needs ``pip install 'jspec[serve]'``."""
