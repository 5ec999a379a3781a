"""The cache of compiled programs: every command uses it, its folder is bounded, and a damaged one recovers."""

import os
import subprocess
import sys

import pytest

from jspec.cli import app
from jspec.core import program_cache as shared
from support import text_pair

# Runs a command in this process and prints which cache JAX uses.
RUN = """
import sys
from jspec.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    import jax
    config = jax.config
    print("STATUS", end.code or 0)
    print("USES", config.jax_compilation_cache_dir, config.jax_compilation_cache_max_size,
          config.jax_persistent_cache_min_compile_time_secs)
"""
# Arguments that end each command before it compiles much, and the error it prints, if any.
COMMANDS = {
    "generate": (
        ["x", "--target", "TARGET", "--draft", "TARGET", "--max-new-tokens", "1000000"],
        "max_new_tokens=1000000",
    ),
    "batch": (
        ["PROMPTS", "--output", "made", "--target", "TARGET", "--max-new-tokens", "1000"],
        "needs 1 + 1000 tokens",
    ),
    "chat": (["TARGET", "--max-length", "1000000"], "is more than the"),
    "serve": (["TARGET", "--max-length", "1000000", "--port", "0"], "is more than the"),
    "tune": (["TARGET", "TARGET", "--max-new-tokens", "1"], "max_new_tokens"),
    "train": (["TARGET", "--output", "run", "--kind", "none"], "kind"),
    "plan": (["TARGET", "TARGET", "--device", "h100", "--json"], ""),
    "index": (["TEXT", "--output", "made.safetensors", "--tokenizer", "TARGET"], ""),
    "models": ([], ""),
    "convert": (["TARGET", "made"], ""),
}


def test_every_command_is_covered():
    assert {command.callback.__name__ for command in app.app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_uses_the_cache(tmp_path, command):
    arguments, said = COMMANDS[command]
    (tmp_path / "text.txt").write_text("in a thing " * 20)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    places = {"TARGET": str(text_pair.write(tmp_path / "target")), "TEXT": str(tmp_path / "text.txt")}
    places |= {"PROMPTS": str(tmp_path / "prompts.jsonl")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    line = [sys.executable, "-c", RUN, command, *(places.get(argument, argument) for argument in arguments)]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert f"USES {tmp_path / 'cache' / 'jspec' / 'xla'} {4 * 2**30} 0.0" in done.stdout, done.stdout + done.stderr
    assert said in done.stderr and ("STATUS 0" in done.stdout) == (not said), done.stderr


def test_user_chosen_cache_folder_is_unchanged(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
    shared.prepare_environment()
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ and not any(tmp_path.iterdir())


def test_cache_folder_stays_bounded(tmp_path):
    """The least recently used programs are deleted, even if an earlier version or a kill left no times of use."""
    folder = tmp_path / "jspec" / "xla"
    folder.mkdir(parents=True)
    for i in range(10):
        (folder / f"old{i}-cache").write_bytes(b"x" * 10**6)
    code = """
import jspec.core.program_cache as shared
shared.CACHE_BYTES = 3 * 10**6
shared.prepare_environment()
import jax, warnings
warnings.simplefilter("error")
print(jax.jit(lambda x: x + 1)(1))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    programs = list(folder.glob("*-cache"))
    assert any("jit" in program.name for program in programs), programs
    assert sum(program.stat().st_size for program in programs) <= 3 * 10**6
