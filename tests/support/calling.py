"""Functions, a chat template that knows tools, and a constraint, for the tests of function calls."""

import numpy as np

# Names the functions and their parameters, as short as possible, and writes calls as Qwen's template does.
TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}{% for p in (t.function.parameters or {}).properties or {} %} "
    "{{ p }}{% endfor %}){% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
STRICT = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
BY_NAME = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


class Forced:
    """A constraint that allows exactly one output, which ends with EOS."""

    def __init__(self, ids):
        self._ids, self._at = [*ids, 0], 0

    def allowed(self):
        bits = np.zeros(9, np.uint32)
        if self._at < len(self._ids):
            bits[self._ids[self._at] // 32] = 1 << self._ids[self._at] % 32
        return bits

    def consume(self, token):
        is_allowed = self._at < len(self._ids) and token == self._ids[self._at]
        self._at += is_allowed
        return is_allowed

    def rollback(self, count):
        self._at -= count
