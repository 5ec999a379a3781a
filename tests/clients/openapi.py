"""Print an OpenAPI document, made from the server's request bodies, from which Schemathesis generates cases."""

import json
import sys
from typing import Any

from pydantic.json_schema import JsonSchemaMode, models_json_schema

from jspec.serve.chat_schemas import ChatBody
from jspec.serve.schemas import CompletionBody

ROUTES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string", "minLength": 1}, "type": {"type": "string"}},
        }
    },
}


def document(model: str) -> dict:
    """Return the document of a server for this model; cases name the model, or they would all return 404."""
    models: list[tuple[type[Any], JsonSchemaMode]] = [(body, "validation") for body in ROUTES.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    found = schemas["$defs"]
    for body in ROUTES.values():
        found[body.__name__]["properties"]["model"] = {"type": "string", "enum": [model]}
    answers = {
        "200": {
            "description": "Answered.",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/event-stream": {"schema": {"type": "object"}},
            },
        },
        "4XX": {"description": "Refused.", "content": {"application/json": {"schema": ERROR}}},
    }
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
                },
                "responses": answers,
            }
        }
        for path, body in ROUTES.items()
    }
    info = {"title": "jspec", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": found}}


if __name__ == "__main__":
    json.dump(document(sys.argv[1]), sys.stdout)
