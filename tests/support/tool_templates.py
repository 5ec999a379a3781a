"""Short chat templates in the notations of well-known models, for the tests of tool calls."""

_ROLES = "{{ raise_exception('unknown role') if m.role not in ('user', 'assistant', 'system') }}"

# Qwen 2.5 and 3: tools in the system message, calls and results in elements.
HERMES = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}"""

# Hermes 2 Pro: arguments come first, and results need the function's name.
HERMES_2 = """{%- if tools %}{{- 'system: ' + (tools | tojson) }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls is defined %}
{%- for call in m.tool_calls %}{{- '\\n<tool_call>\\n{"arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "name": "' + call.function.name + '"}\\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if m.name is not defined %}{{- raise_exception('results need names') }}{%- endif %}
{{- '\\n<tool_response>\\n{"name": "' + m.name + '", "content": ' + (m.content | tojson) + '}\\n</tool_response>' }}
{%- else %}{{- m.role + ': ' + m.content }}{%- endif %}
{%- endfor %}"""

# Llama 3.1: tools in the first user message, one call in a message.
LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only one call at once') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", ' }}
{{- '"parameters": ' }}{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools is not none %}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}"""

_MISTRAL = """{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools is not none and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}CALLS
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids need nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}
{%- endfor %}"""

# Mistral 7B v0.3 and later: an array of calls with ids of nine characters, and no system messages.
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids need nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}""",
)
NEMO = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")

# Mistral Small 3.2 and later.
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    """{%- for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}""",
)

# Qwen3-Coder: XML within the same elements as the Hermes format.
XML = """{%- for tool in tools or [] %}{{- '<function>' + (tool | tojson) + '</function>' }}{%- endfor %}
{%- for m in messages %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}
{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"""

# Templates that ignore tools.
PLAIN = "{% for m in messages %}" + _ROLES + "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
NO_SYSTEM = PLAIN.replace(", 'system')", ",)").replace("('user', 'assistant',)", "('user', 'assistant')")
SILENT_ABOUT_SYSTEM = PLAIN.replace("[{{", "{% if m.role != 'system' %}[{{").replace("\n{% end", "\n{% endif %}{% end")
