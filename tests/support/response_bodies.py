"""Bodies and items for the tests of the Responses API."""

from support import servers

LOGPROBS = ["message.output_text.logprobs"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("f", "g")]
CALL = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
ASSISTANT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
}


def body(**fields):
    return {"model": servers.NAME, "input": "the thing", "max_output_tokens": 12, "seed": 5} | fields
