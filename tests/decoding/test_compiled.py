"""Reading compiled programs: a handwritten HLO text with known counts, and the shipped program on CPU."""

import dataclasses

import jax
import pytest

import jspec
from bench import abstract, compiled, devices, graphs
from bench.hlo import Module
from bench.traffic import flops, traffic
from conftest import TOY

TEXT = """HloModule jit_f, entry_computation_layout={(bf16[8,4]{1,0})->bf16[8,4]{1,0}}

%fused (p0: bf16[8,4], p1: bf16[1,4], p2: s32[]) -> bf16[8,4] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = bf16[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%sliced (q0: bf16[8,4], q1: s32[]) -> f32[1,4] {
  %q0 = bf16[8,4]{1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %nought = s32[] constant(0)
  %row = bf16[1,4]{1,0} dynamic-slice(%q0, %q1, %nought), dynamic_slice_sizes={1,4}
  ROOT %wide = f32[1,4]{1,0} convert(%row)
}

%steps (arg: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %arg = (s32[], bf16[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %rows = bf16[8,4]{1,0} get-tuple-element(%arg), index=1
  %copied = bf16[8,4]{1,0} copy(%rows), metadata={op_name="jit(decode_program)/while/body/draft/while/body/copy"}
  ROOT %out = (s32[], bf16[8,4]{1,0}) tuple(%i, %copied)
}

%fewer (arg.1: (s32[], bf16[8,4])) -> pred[] {
  %arg.1 = (s32[], bf16[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

%round (arg.2: (s32[], bf16[8,4], bf16[4,16])) -> (s32[], bf16[8,4], bf16[4,16]) {
  %arg.2 = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%arg.2), index=0
  %cache = bf16[8,4]{1,0} get-tuple-element(%arg.2), index=1
  %weight = bf16[4,16]{1,0} get-tuple-element(%arg.2), index=2
  %pair = (s32[], bf16[8,4]{1,0}) tuple(%at, %cache)
  %drafting = (s32[], bf16[8,4]{1,0}) while(%pair), condition=%fewer, body=%steps, metadata={op_name="jit(decode_program)/while/body/draft/while"}
  %drafted = bf16[8,4]{1,0} get-tuple-element(%drafting), index=1
  %one = f32[1,4]{1,0} fusion(%drafted, %at), kind=kLoop, calls=%sliced, metadata={op_name="jit(decode_program)/while/body/verify/convert"}
  %small = bf16[1,4]{1,0} convert(%one)
  %product = f32[1,16]{1,0} dot(%small, %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(decode_program)/while/body/verify/dot"}
  %kept = bf16[8,4]{1,0} fusion(%drafted, %small, %at), kind=kLoop, calls=%fused, metadata={op_name="jit(decode_program)/while/body/commit/put"}
  ROOT %next = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%at, %kept, %weight)
}

%unfinished (arg.3: (s32[], bf16[8,4], bf16[4,16])) -> pred[] {
  %arg.3 = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  ROOT %done = pred[] custom-call(%arg.3), custom_call_target="done"
}

ENTRY %main (x: bf16[8,4], w: bf16[4,16]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,16]{1,0} parameter(1)
  %start = s32[] constant(0)
  %read = bf16[8,4]{1,0} transpose(%x), dimensions={0,1}, metadata={op_name="jit(decode_program)/prefill/transpose"}
  %all = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%start, %read, %w)
  %rounds = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) while(%all), condition=%unfinished, body=%round, metadata={op_name="jit(decode_program)/while"}
  ROOT %result = bf16[8,4]{1,0} get-tuple-element(%rounds), index=1
}
"""  # noqa: E501


class Compiled:
    """A stand-in for `jax.stages.Compiled`."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text

    def memory_analysis(self):
        return jax.stages.Compiled  # these tests ignore its fields


@pytest.mark.parametrize(
    ("start", "read", "written"),
    [
        ("copy-start = (bf16[2,4]{1,0:S(1)}, bf16[2,4]{1,0}, u32[]{:S(2)}) copy-start(%w)", 16, 0),
        ("copy-start = (bf16[2,4]{1,0}, bf16[2,4]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%w)", 0, 16),
        ("slice-start = (bf16[8,4]{1,0}, bf16[2,4]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%w)", 16, 0),
    ],
)
def test_async_copies_count_bytes_read_and_written(start, read, written):
    """A copy lists its destination first; other operations list their source first."""
    here = Module(f"ENTRY main {{\n  %w = bf16[8,4]{{1,0}} parameter(0)\n  ROOT %{start}\n}}\n").computations["main"]
    assert traffic(here[start.split(" ")[0]], here, {"main": here}) == (read, written)


@pytest.fixture
def program(monkeypatch):
    for name in ("argument_size_in_bytes", "temp_size_in_bytes"):
        monkeypatch.setattr(jax.stages.Compiled, name, 7, raising=False)
    return compiled.read(Compiled(TEXT))


def test_kernels_are_assigned_to_parts(program):
    found = [(kernel.name, kernel.part, kernel.times) for kernel in program.kernels]
    assert found == [
        ("done", "draft", 1),
        ("less", "draft step", 4),
        ("copied", "draft step", 3),
        ("one", "verify", 1),
        ("small", "verify", 1),
        ("product", "verify", 1),
        ("kept", "commit", 1),
    ]
    assert [kernel.name for kernel in program.prefill] == ["read"]
    assert program.count() == 12 and program.count("verify") == 3
    assert (program.loops, program.waits, program.conditionals, program.host) == ([], 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "read", "written", "products"),
    [("one", 8 + 4, 16, 0), ("kept", 8 + 4, 8, 0), ("small", 16, 8, 0), ("product", 8 + 128, 64, 2 * 4 * 16)],
)
def test_traffic_and_flops_match_hand_counts(name, read, written, products):
    """Only the cache row that is read and the one that is written count as traffic."""
    module = Module(TEXT)
    here = module.computations["round"]
    assert traffic(here[name], here, module.computations) == (read, written)
    assert flops(here[name], here, module.computations) == products


def test_on_chip_buffers_are_not_counted_as_reads():
    text = TEXT.replace("%small = bf16[1,4]{1,0} convert(%one)", "%small = bf16[1,4]{1,0:T(8,128)S(1)} convert(%one)")
    module = Module(text)
    here = module.computations["round"]
    assert traffic(here["small"], here, module.computations) == (16, 0)
    assert traffic(here["product"], here, module.computations) == (128, 64)


LAUNCHES = """\
000: kCommandBuffer [source | next=003 (1)]
    001: kKernel [source | sink] kernel=read
002: kWhile [prev=000 (1) | sink]
condition:
    003: kCustomKernel [source | sink] unfinished
  body:
    000: kCommandBuffer [source | next=006 (1)]
        004: kKernel [source | sink] kernel=first
        005: kCopy [source | sink] MemcpyDeviceToDeviceCmd
    006: kWhile [prev=000 (1) | next=000 (1)]
condition:
        007: kCustomKernel [source | sink] less
      body:
        000: kCommandBuffer [source | next=009 (1)]
            008: kKernel [source | sink] kernel=step
        009: kGemm [source | sink] product
    010: kKernel [prev=006 (1) | sink] kernel=last
"""


def test_graph_launches_per_round_are_counted():
    """The inner loop runs three times and evaluates its condition four times."""
    assert graphs.of_round(LAUNCHES, [3]) == graphs.Graphs(launched=1 + 3, captured=2 + 3, outside=1 + 4 + 3 + 1)
    assert graphs.of_round("", []) is None


def test_serial_loop_over_rows_is_detected(program):
    serial = TEXT.replace("body/draft/while", "body/verify/scatter").replace("direction=LT", "direction=GT")
    found = compiled.read(Compiled(serial))
    assert found.loops == ["jit(decode_program)/while/body/verify/scatter"] and found.waits == 1
    assert found.count() < program.count()  # its number of iterations is unknown


def test_host_callback_is_detected(program):
    called = 'custom-call(%one), custom_call_target="xla_ffi_python_gpu_callback"'
    found = compiled.read(Compiled(TEXT.replace("convert(%one)", called)))
    assert (program.host, found.host) == (0, 1)


def test_predictions_sum_over_kernels(program):
    device = dataclasses.replace(devices.DEVICES["h100"], bandwidth=1e9, flops=1e9, launch=1e-3)
    rows = {row["part"]: row for row in compiled.table(program, device)}
    assert rows["a round"]["kernels"] == 12 and rows["draft step"]["copies"] == 3
    assert rows["verify"]["ms predicted"] == pytest.approx(3 + 1e3 * (28 + 24 + 200) / 1e9)
    total = sum(row["ms predicted"] for part, row in rows.items() if part not in ("a round", "prefill"))
    assert rows["a round"]["ms predicted"] == pytest.approx(total)


@pytest.mark.parametrize("draft_length", [0, 3])
def test_shipped_program_is_parsed(quick_compile, draft_length):
    """The program is lowered from shapes alone, for the platform that JAX runs on."""
    model = abstract.model(TOY, "float32")
    setting = abstract.Setting(batch=2, width=5, new_tokens=9, draft_length=draft_length)
    program = compiled.read(abstract.trace(model, model, setting).lower().compile())
    drafts = [kernel for kernel in program.kernels if kernel.part == compiled.DRAFT_STEP]
    assert program.count("verify") > 10 and program.waits == 0
    assert {2} <= {kernel.times for kernel in drafts} if draft_length else not drafts  # K - 1 times


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: devices.prepare("h1000"), "no device 'h1000'.*h200, h100, a100, l4, t4, v5e, v6e"),
        (lambda: abstract.configs("llama-3.2-3b"), "no pair 'llama-3.2-3b' of shapes.*109m"),
        (
            lambda: compiled.check_fits(
                devices.DEVICES["t4"], abstract.pair("llama-3.1-8b/llama-3.2-1b", "float16"), abstract.Setting(), 1
            ),
            r"18\.\d GB of weights and 0\.1 GB of caches do not fit",
        ),
        (lambda: devices.topology(devices.DEVICES["v5e"], 3), "no topology of 3 TPUs.*1, 4, 8, 16"),
    ],
)
def test_mistakes_are_rejected(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("version", "words"), [(None, "cuda12-plugin is not installed"), ("0.0.1", "is 0.0.1 and")])
def test_missing_or_outdated_cuda_plugin_is_rejected(monkeypatch, version, words):
    ours = devices.metadata.version

    def found(package):
        if not package.startswith("jax-cuda"):
            return ours(package)
        if version is None or package == "jax-cuda13-plugin":
            raise devices.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(devices.metadata, "version", found)
    with pytest.raises(ValueError, match=f"{words}.*bash bench/environments.sh cuda DIR"):
        devices.prepare("h100")


def test_either_cuda_plugin_suffices(monkeypatch):
    ours = devices.metadata.version

    def found(package):
        if package == "jax-cuda12-plugin":
            raise devices.metadata.PackageNotFoundError
        return ours("jax" if package == "jax-cuda13-plugin" else package)

    monkeypatch.setattr(devices.metadata, "version", found)
    devices._check_plugin("cuda")


def test_pair_name_selects_quantised_models():
    for name, kinds in (("109m:int8", (None, "int8")), ("llama-3.2-3b:int4/llama-3.2-1b", ("int4", None))):
        for model, kind in zip(abstract.pair(name, "bfloat16", num_hidden_layers=1), kinds, strict=True):
            dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(model)}
            assert isinstance(model, jspec.Llama)
            assert (model.quantized, dtypes) == (kind, {"bfloat16"} | ({kind, "float32"} if kind else set()))
    with pytest.raises(ValueError, match="'109m:int3' has an unknown kind of quantisation"):
        abstract.pair("109m:int3", "bfloat16")
