"""Errors name an unreadable file's format and a remedy that works; only damaged files are called damaged."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import convert
from convert import CheckpointError, other_formats, parse_config
from support import gguf_files, quantized_files
from support.checkpoints import make, raw_config, tensors
from support.damage import edit_json


def files(*names, config=True):
    def write(folder):
        folder.mkdir()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")
        if config:
            make(folder / "whole")
            (folder / "config.json").write_bytes((folder / "whole" / "config.json").read_bytes())

    return write


def plain(*names):
    return files(*names, config=False)


HUB = r"download the model's Hugging Face files \(config.json, \*.safetensors\) instead"
FOLDERS = {
    "Meta's download": (
        plain("consolidated.00.pth", "params.json", "tokenizer.model", "checklist.chk"),
        f"holds consolidated.00.pth, the weights in Meta's own layout, which is not read; {HUB}",
    ),
    "Meta's in parts": (plain("consolidated.00.pth", "consolidated.01.pth", "params.json"), "Meta's own layout"),
    "Mistral's download": (
        plain("consolidated.safetensors", "params.json", "tekken.json"),
        f"holds consolidated.safetensors, the weights in Mistral's own layout.* {HUB}",
    ),
    "Mistral's in parts": (
        plain("consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"),
        "Mistral's own layout",
    ),
    "an adapter": (
        plain("adapter_config.json", "adapter_model.safetensors"),
        "holds adapter_model.safetensors, an adapter without the model that it changes; merge them",
    ),
    "an adapter in training": (
        plain("adapter_model.safetensors", "optimizer.pt", "training_args.bin"),
        "an adapter without the model",
    ),
    "an older adapter": (plain("adapter_config.json", "adapter_model.bin"), "holds adapter_model.bin, an adapter"),
    "a GGUF file": (plain("x.gguf"), r"no \*.safetensors file; name the GGUF file itself, as in .*x.gguf"),
    "a GGUF file in parts": (
        plain("x-00001-of-00002.gguf", "x-00002-of-00002.gguf"),
        "llama-gguf-split --merge .*x-00001-of-00002.gguf OUT.gguf` and pass that file",
    ),
    "MLX": (files("weights.npz"), f"holds weights.npz, in the format of MLX or NumPy, which is not read; {HUB}"),
    "Flax": (files("flax_model.msgpack"), "in the format of Flax"),
    "Keras": (files("tf_model.h5"), "in the format of Keras"),
    "ONNX": (files("model.onnx", "model.onnx_data"), "in the format of ONNX"),
    "OpenVINO": (files("openvino_model.bin", "openvino_model.xml"), "in the format of OpenVINO"),
    "distributed": (plain("__0_0.distcp", ".metadata"), "PyTorch distributed checkpoint"),
    "old GPTQ": (
        files("gptq_model-4bit-128g.safetensors", "quantize_config.json"),
        r"weights quantised with GPTQ in .* \(gptq_model-4bit-128g.safetensors\); rename the file to model.safetensors",
    ),
    "old AWQ": (
        files("awq_model_w4_g128.safetensors", "quant_config.json"),
        "quantised with AWQ .* rename the file to model.safetensors, .* quant_method 'awq' and the fields of "
        r"quant_config.json \(w_bit as bits, q_group_size as group_size, zero_point, version\)",
    ),
    "GPTQ as a pickle": (
        files("gptq_model-4bit-128g.bin", "quantize_config.json"),
        r"quantised with GPTQ .*no \*.safetensors file\); choose a checkpoint whose config.json has a quantiz",
    ),
    "pickles": (files("pytorch_model.bin"), r"`AutoModelForCausalLM.from_pretrained\(SRC\).save_pretrained\(DST\)`"),
    "pickles in parts": (files("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), "AutoModelFor"),
    "pickles among other programs'": (
        files("pytorch_model.bin", "flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model.onnx"),
        "AutoModelFor",
    ),
    "pickles beside Meta's": (files("pytorch_model.bin", "consolidated.00.pth"), "AutoModelFor"),
    "the state of a training": (
        plain("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"),
        r"holds no \*.safetensors file; .* download the weights too",
    ),
    "a GGUF file beside parts": (
        plain("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"),
        "name the GGUF file itself, as in .*b.gguf",
    ),
    "pickles without config": (plain("pytorch_model.bin"), "with the program that wrote them"),
    "pickles of another program": (files("lit_model.pth"), "with the program that wrote them"),
    "shards without index": (files("model-00001-of-00001.safetensors"), "download the index that belongs to"),
    "another name": (files("weights.safetensors"), "rename the file to model.safetensors if it holds all"),
    "no weights": (plain("README.md"), "download the weights too; if the repository has none, download a GGUF file"),
    "checkpoints of a training": (
        plain("checkpoint-10/config.json", "checkpoint-20/config.json"),
        "name the folder of one model, such as .*checkpoint-10",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_formats_are_named(tmp_path, name):
    write, message = FOLDERS[name]
    write(tmp_path / "x")
    with pytest.raises(CheckpointError, match=message) as error:
        convert.load(tmp_path / "x")
    assert str(error.value).endswith(".") and "damaged" not in str(error.value)


def test_unsupported_format_is_reported_before_tokenizer(tmp_path, run):
    """The error names the weights' format, because Meta's tokenizer.model cannot be read and users cannot fix that."""
    FOLDERS["Meta's download"][0](tmp_path / "x")
    code, _, error = run("generate", "a", "--target", str(tmp_path / "x"), "--draft", "none")
    assert code == 1 and "the weights in Meta's own layout" in error


def test_metas_subfolder_error_names_parent_folder(tmp_path):
    make(tmp_path / "hf")
    plain("consolidated.00.pth", "params.json")(tmp_path / "hf" / "original")
    with pytest.raises(CheckpointError, match=f"name the folder above, {re.escape(str(tmp_path / 'hf'))}"):
        convert.load(tmp_path / "hf" / "original")


QUANTISED = {
    "bitsandbytes (4 bits)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes (8 bits)": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    "FBGEMM FP8": {"quant_method": "fbgemm_fp8"},
    "HQQ": {"quant_method": "hqq", "quant_config": {}},
    "torchao": {"quant_method": "torchao", "quant_type": {}},
    "MXFP4": {"quant_method": "mxfp4"},
    "Quanto": {"quant_method": "quanto", "weights": "int8"},
    "AQLM": {"quant_method": "aqlm"},
    "EETQ": {"quant_method": "eetq"},
    "ExLlamaV2 (4.65 bits)": {"quant_method": "exl2", "version": "0.2.0", "bits": 4.65},
    "AutoRound (4 bits)": {"quant_method": "auto-round", "bits": 4},
    "NVIDIA ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "BitNet": {"quant_method": "bitnet"},
    "MLX (4 bits)": {"group_size": 64, "bits": 4},
    "something_new": {"quant_method": "something_new"},
    "a method that it does not name ({})": {},
}


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_mlx_is_named_if_it_is_described_twice(mode):
    """mlx-lm writes the same section under two names."""
    section = {"group_size": 64, "bits": 4, "mode": mode}
    with pytest.raises(CheckpointError, match=r"^quantization_config is for weights quantised with MLX \(4 bits\)"):
        parse_config(raw_config(quantization=section, quantization_config=section))
    with pytest.raises(CheckpointError, match="quantization_config and quantization describe quantised weights diff"):
        parse_config(raw_config(quantization=section, quantization_config=section | {"bits": 8}))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantisation_method_is_named(name):
    reason = ", because only that library .*" if "bitsandbytes" in name else ""
    message = f"quantised with {re.escape(name)}, which are not read{reason}; choose the unquantised checkpoint"
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw_config(quantization_config=QUANTISED[name]))


def test_other_quantisation_fields_are_rejected():
    with pytest.raises(CheckpointError, match=r"quantization is for weights quantised with MLX \(4 bits\)"):
        parse_config(raw_config(quantization={"group_size": 64, "bits": 4, "mode": "affine"}))
    with pytest.raises(CheckpointError, match="compression_config: config_groups is None; expected an object"):
        parse_config(raw_config(compression_config={"format": "int-quantized"}))


def test_quantisation_method_is_reported_before_file_names(tmp_path):
    """The error names the method, not the file, because ExLlamaV2 writes output.safetensors, which has no index."""
    folder = make(tmp_path / "x", quantization_config={"quant_method": "exl2", "bits": 4.0})
    (folder / "model.safetensors").rename(folder / "output.safetensors")
    with pytest.raises(CheckpointError, match="quantised with ExLlamaV2"):
        convert.load(folder)


def test_following_advice_on_old_gptq_works(tmp_path):
    kind = quantized_files.KINDS["GPTQ"]
    quantized_files.write(tmp_path / "x", kind)
    expected = convert.load(tmp_path / "x").params
    edit_json("config.json", lambda raw: raw.pop("quantization_config"))(tmp_path / "x")
    (tmp_path / "x" / "quantize_config.json").write_text(json.dumps(kind.section))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "gptq_model-4bit-16g.safetensors")
    with pytest.raises(CheckpointError, match=r"rename the file to model\.safetensors, and add a quantization_config"):
        convert.load(tmp_path / "x")
    (tmp_path / "x" / "gptq_model-4bit-16g.safetensors").rename(tmp_path / "x" / "model.safetensors")
    section = json.loads((tmp_path / "x" / "quantize_config.json").read_text())
    section["quant_method"] = "gptq"
    edit_json("config.json", lambda raw: raw.update(quantization_config=section))(tmp_path / "x")
    for name, array in convert.load(tmp_path / "x").params.items():
        np.testing.assert_array_equal(array, expected[name])


def test_following_advice_on_old_awq_works(tmp_path):
    kind = quantized_files.KINDS["AWQ"]
    quantized_files.write(tmp_path / "x", kind)
    expected = convert.load(tmp_path / "x").params
    edit_json("config.json", lambda raw: raw.pop("quantization_config"))(tmp_path / "x")
    old = {"zero_point": True, "q_group_size": kind.section["group_size"], "w_bit": 4, "version": "GEMM"}
    (tmp_path / "x" / "quant_config.json").write_text(json.dumps(old))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "awq_model_w4_g16.safetensors")
    with pytest.raises(CheckpointError, match="w_bit as bits") as error:
        convert.load(tmp_path / "x")
    (tmp_path / "x" / "awq_model_w4_g16.safetensors").rename(tmp_path / "x" / "model.safetensors")
    names = dict(re.findall(r"(\w+) as (\w+)", str(error.value)))
    section = {"quant_method": "awq"} | {names.get(key, key): value for key, value in old.items()}
    edit_json("config.json", lambda raw: raw.update(quantization_config=section))(tmp_path / "x")
    for name, array in convert.load(tmp_path / "x").params.items():
        np.testing.assert_array_equal(array, expected[name])


def test_following_advice_on_pickles_works(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = make(tmp_path / "x")
    expected = convert.load(folder).params
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="AutoModelForCausalLM"):
        convert.load(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "y")
    for name, array in convert.load(tmp_path / "y").params.items():
        np.testing.assert_array_equal(array, expected[name])


# ---- GGUF


@pytest.mark.parametrize("place", ["x.bin", "blob", "x.safetensors", "X.GGUF"])
def test_gguf_file_is_recognised_by_magic_bytes(tmp_path, place):
    file = gguf_files.model(tmp_path / "x.gguf", num_hidden_layers=1)[0]
    config = convert.read_config(file)
    file.rename(tmp_path / place)
    (tmp_path / "link").symlink_to(place)
    for path in (tmp_path / place, tmp_path / "link"):
        assert convert.resolve(path) == path and convert.load(path).config == config


def test_non_gguf_content_with_gguf_suffix_is_rejected(tmp_path):
    file = tmp_path / "x.gguf"
    save_file({"a": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match="expected a GGUF file, which begins with b'GGUF'") as error:
        convert.load(file)
    assert "damaged" not in str(error.value)


KEYS = {
    "general.new_key": "x",
    "mradermacher.quantized_by": "x",
    "quantize.imatrix.file": "x",
    "qwen2.block_count": 3,
    "llama.attention.layer_norm_epsilon": 1e-5,
    "llama.attention.clamp_kqv": 0.0,
    "llama.attention.sliding_window": 0,
    "llama.expert_count": 0,
    "llama.expert_feed_forward_length": 64,
    "llama.final_logit_softcapping": 0.0,
    "llama.logit_scale": 1.0,
    "llama.pooling_type": 0,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.use_parallel_residual": False,
}
NOTED = (
    "llama.attention.layer_norm_epsilon, llama.expert_feed_forward_length, mradermacher.quantized_by, qwen2.block_count"
)


def test_inert_gguf_keys_are_ignored_and_logged(tmp_path, caplog):
    expected = convert.load(gguf_files.model(tmp_path / "plain.gguf", num_hidden_layers=1)[0])
    file = gguf_files.model(tmp_path / "x.gguf", KEYS, num_hidden_layers=1)[0]
    with caplog.at_level("INFO", "jspec"):
        loaded = convert.load(file)
    assert loaded.config == expected.config
    for name, array in loaded.params.items():
        np.testing.assert_array_equal(array, expected.params[name])
    assert caplog.messages == [f"{file}: ignoring {NOTED}, which do not change what this model computes."]


def test_stored_rope_frequencies_are_ignored(tmp_path):
    raw = gguf_files.RAW | {"num_hidden_layers": 1}
    arrays = gguf_files.tensors(raw, tensors(raw))
    expected = convert.load(gguf_files.write(tmp_path / "plain.gguf", gguf_files.metadata(raw), arrays)).params
    arrays["blk.0.attn_rot_embd"] = np.ones(32, np.float32)
    params = convert.load(gguf_files.write(tmp_path / "x.gguf", gguf_files.metadata(raw), arrays)).params
    for name, array in params.items():
        np.testing.assert_array_equal(array, expected[name])


def test_sliding_window_limits_context_length(tmp_path):
    file = gguf_files.model(tmp_path / "x.gguf", {"llama.attention.sliding_window": 16}, num_hidden_layers=1)[0]
    assert convert.read_config(file).max_position_embeddings == 16


def test_following_advice_on_byte_order_works(tmp_path):
    file = gguf_files.model(tmp_path / "x.gguf", num_hidden_layers=1)[0]
    expected = convert.load(file).params
    program = [str(Path(sys.executable).parent / "gguf-convert-endian"), str(file)]
    subprocess.run([*program, "big"], input=b"YES\n", check=True, capture_output=True)
    with pytest.raises(CheckpointError, match=r"is in big-endian byte order; .* `gguf-convert-endian .* little`"):
        convert.load(file)
    subprocess.run([*program, "little"], input=b"YES\n", check=True, capture_output=True)
    for name, array in convert.load(file).params.items():
        np.testing.assert_array_equal(array, expected[name])


def test_formats_have_distinct_patterns():
    patterns = [pattern for group in other_formats._FORMATS for pattern in group]
    assert len(patterns) == len(set(patterns)) and not set(patterns) & set(other_formats.PICKLES)
