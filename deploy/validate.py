"""Validate the manifests of this folder against the schemas of KubeRay and LeaderWorkerSet: validate.py CRD.yaml...

The files with the schemas are in the repositories of both projects:
ray-operator/config/crd/bases/ray.io_rayservices.yaml and
config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def schemas(files: list[str]) -> dict[tuple[str, str], Any]:
    """Return the schema of each kind, by apiVersion and kind."""
    found = {}
    for file in files:
        for definition in yaml.safe_load_all(Path(file).read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[key] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema: Any) -> Any:
    """Return `schema` without unknown fields, which Kubernetes would drop. Integers may be written as strings."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: strict(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        changed.pop("anyOf", None)
        changed["type"] = ["integer", "string"]
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps_unknown:
        changed["additionalProperties"] = False
    return changed


def main(files: list[str]) -> None:
    """Validate every manifest of a kind that the files define, and print its name."""
    known, count = schemas(files), 0
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for manifest in yaml.safe_load_all(file.read_text()):
            key = manifest["apiVersion"], manifest["kind"]
            if key in known:
                body = {name: value for name, value in manifest.items() if name != "metadata"}
                jsonschema.validate(body, known[key])
                print(f"{file.name}: {key[1]} is valid")
                count += 1
    if not count:
        sys.exit("Nothing was validated; pass the files that define RayService and LeaderWorkerSet.")


if __name__ == "__main__":
    main(sys.argv[1:])
