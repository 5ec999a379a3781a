"""An engine's output by script: a server then answers with a given text, whatever the model would write."""

import threading
import time

from jspec.engine.scheduler import ActiveRequest


def script(monkeypatch, running, text, end="eos", size=1, error_code=None):
    """Let the server answer every request with `text`, `size` tokens at a time, until `monkeypatch` is undone.

    The prompts are replaced, because a description of functions is longer than the tiny model's texts. `end` is the
    engine's finish reason: "eos", "length", "cancelled" or "error".
    """
    ids = running.tokenizer(text, add_special_tokens=False)["input_ids"] + ([0] if end == "eos" else [])
    assert running.tokenizer.decode(ids, skip_special_tokens=True) == text

    def write(active):
        for i in range(0, len(ids), size):
            active.result.tokens += ids[i : i + size]
            active.listen(active.result)
            time.sleep(0.001)  # so that a stream sends the tokens one by one
        active.result.error, active.result.error_code = ("It failed." if end == "error" else None), error_code
        active.result.finish_reason = end
        active.listen(active.result)

    def submit(request, listen):
        active = ActiveRequest(request, None, listen)
        threading.Thread(target=write, args=(active,)).start()
        return active

    monkeypatch.setattr("jspec.serve.parse_request.chat_prompt", lambda *_: [1, 2, 3])
    monkeypatch.setattr(running.engine, "submit", submit)
    monkeypatch.setattr(running.engine, "cancel", lambda active: None)
