"""The example that `make demo` runs: it proves its own claim, and says in one line what is wrong with its arguments."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hf_models import random_hf_model, tiny_hf_config
from repository import EXAMPLES
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

SAME = "the same tokens as transformers' own generate"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("serve_checkpoint")


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.exhaustive
def test_every_configuration_serves_what_transformers_generates(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--tokens", "3", "--layers", "3"]) == 0
    printed = printed_lines(capsys)
    assert printed[-2] == f"eager, mrv1 wide, mrv1 minimal, mrv2 narrow: {SAME} (5 requests)"
    assert printed[-1] == f"mrv2 narrow fp8: {SAME} with caches rounded to fp8_ds_mla and fp8 (5 requests)"
    assert any(line.startswith("                              'Hi' -> ") for line in printed)
    assert "    split op: dsv4::forward_mqa x3, dsv4::sparse_indexer x1" in printed
    rows = {line[:16].strip(): line[16:].split() for line in printed[-8:-3]}
    assert rows["eager"][2:] == ["-", "all", "-", "-"]
    # layers SWA, C4A, C128A: wide 2 + 7 + 3 eager ops, minimal 2 + 5 + 3, narrow 1 + 2 + 1
    compiled = ("mrv1 wide", "mrv1 minimal", "mrv2 narrow", "mrv2 narrow fp8")
    assert [rows[name][5] for name in compiled] == ["12", "10", "4", "4"]
    for name in compiled:
        assert rows[name][2] == rows[name][4]  # "n of n": every step was a replay
        assert int(rows[name][7]) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mrv1 wide", "mrv1 minimal", "mrv2 narrow"])
def test_with_drafts_a_configuration_serves_the_same_in_fewer_steps(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    runner, region = name.split()
    arguments = ["--tokens", "12", "--layers", "3", "--mtp", "2", "--runner", runner, "--region", region]
    assert demo.main(arguments) == 0
    printed = printed_lines(capsys)
    assert printed[-1] == f"eager, {name}: {SAME} (5 requests)"
    (drafts,) = [line for line in printed if " drafts accepted (" in line]
    accepted, drafted, first, second, steps, without, saved = map(int, re.findall(r" \(?(\d+)", drafts))
    assert 0 < accepted == first + second < drafted
    assert 0 < saved == without - steps
    row = printed[printed.index(drafts) - 2].split()
    assert row[:2] == [runner, region]
    assert row[4] == row[6]  # "n of n": every call was a replay
    assert (tmp_path / "dsv4_compile" / "small-3-layers-mtp").is_dir()


def test_a_checkpoint_without_an_mtp_block_gets_one_line(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo.small_checkpoint(1)
    capsys.readouterr()  # making it shows bars
    check_error(demo, capsys, ["--model", str(folder), "--mtp", "1"], f"{folder}: {folder}: the checkpoint has no MTP")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], [("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow")]),
        (["--runner", "mrv1"], [("mrv1", "wide"), ("mrv1", "minimal")]),
        (["--region", "narrow"], [("mrv2", "narrow")]),
        (["--runner", "mrv2", "--region", "wide"], [("mrv2", "wide")]),
    ],
)
def test_options_choose_configurations(demo: ModuleType, arguments: list[str], names: list[tuple[str, str]]) -> None:
    options = demo.parse_options(arguments)
    assert demo.chosen(options.runner, options.region) == names


@pytest.mark.exhaustive
@pytest.mark.parametrize("formats", [("fp8_ds_mla", "mxfp4"), ("bf16", "auto")], ids="+".join)
def test_every_configuration_serves_packed_caches(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], formats: tuple[str, str]
) -> None:
    arguments = ["--tokens", "3", "--layers", "3", "--kv-cache-dtype", formats[0], "--index-cache-dtype", formats[1]]
    assert demo.main(arguments) == 0
    names = "eager, mrv1 wide, mrv1 minimal, mrv2 narrow"
    assert printed_lines(capsys)[-1] == f"{names}: {SAME} with caches rounded to {' and '.join(formats)} (5 requests)"


@pytest.mark.exhaustive
def test_a_checkpoint_of_another_shape(demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tiny_hf_config(
        (128, 4, 4),
        vocab_size=300,
        num_attention_heads=6,
        o_groups=3,
        index_n_heads=8,
        index_topk=4,
        sliding_window=16,
        hc_sinkhorn_iters=2,
    )
    random_hf_model(config).save_pretrained(tmp_path / "other")
    arguments = ["--model", str(tmp_path / "other"), "--tokens", "4", "--region", "minimal", "--prompt", "x" * 150]
    assert demo.main([*arguments, "--prompt", "short"]) == 0
    printed = printed_lines(capsys)
    assert printed[-1] == f"eager, mrv1 minimal: {SAME} (2 requests)"
    assert "    split op: dsv4::forward_mqa x3, dsv4::sparse_indexer x2" in printed


def test_the_checkpoint_is_made_once(demo: ModuleType, tmp_path: Path) -> None:
    folder = demo.small_checkpoint(2)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo.small_checkpoint(2) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "dsv4_compile").iterdir()] == ["small-2-layers"]


def test_a_cache_that_cannot_be_made_gets_one_line(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"{__file__}/cache")
    check_error(
        demo, capsys, [], f"small checkpoint: cannot make {__file__}/cache/dsv4_compile: ", "XDG_CACHE_HOME names"
    )


@pytest.mark.exhaustive
def test_a_difference_is_an_exit_code(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.reference
    monkeypatch.setattr(
        demo, "reference", lambda model, prompt, tokens: [-1] if len(prompt) == 2 else right(model, prompt, tokens)
    )
    assert demo.main(["--tokens", "1", "--layers", "1", "--region", "narrow", "--dtype", "bfloat16"]) == 1
    printed = printed_lines(capsys)
    assert printed.pop().endswith("--dtype float32 tells this from a fault")
    assert [line.partition(":")[0] for line in printed if "DIFFER" in line] == ["eager", "mrv2 narrow"]
    assert "mrv2 narrow: tokens DIFFER from transformers' own generate in" in printed[-1]


def test_a_checkpoint_with_a_tokenizer_is_served_with_it(demo: ModuleType, tmp_path: Path) -> None:
    serving = importlib.import_module("_serving")
    words = Tokenizer(WordLevel({"[UNK]": 0, "keys": 1, "and": 2, "values": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    folder = tmp_path / "with-tokenizer"
    shutil.copytree(demo.small_checkpoint(1), folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    tokenizer = serving.load_tokenizer(folder)
    assert tokenizer.encode("values and keys") == [3, 2, 1]
    assert tokenizer.decode([1, 2]) == "keys and"


def test_bytes_are_shown_as_text_where_they_can_be() -> None:
    serving = importlib.import_module("_serving")
    tokenizer = serving.ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([97, 10, 300]) == "a<10><300>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: '0' is not an integer of at least 1"),
        (["--layers", "many"], "argument --layers: 'many' is not an integer of at least 1"),
        (["--mtp", "3"], "argument --mtp: invalid choice: 3"),
        (["--runner", "mrv3"], "argument --runner: invalid choice: 'mrv3'"),
        (["--region", "small"], "argument --region: invalid choice: 'small'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--kv-cache-dtype", "fp8"], "argument --kv-cache-dtype: invalid choice: 'fp8'"),
        (["--index-cache-dtype", "fp4"], "argument --index-cache-dtype: invalid choice: 'fp4'"),
        (["--device", "tpu"], 'argument --device: \'tpu\' is not "cpu", "cuda" or "cuda:1"'),
        (["--device", "cuda:99"], "argument --device: 'cuda:99': torch sees"),
        (["--model", ".", "--layers", "2"], "--layers is for the small random checkpoint"),
        (["--speed", "3"], "unrecognized arguments: --speed 3"),
        (["--model", "no-such-folder"], "no-such-folder: no checkpoint folder at no-such-folder"),
        (
            ["--layers", "1", "--tokens", "4000"],
            "small checkpoint: a prompt of 300 tokens and 4000 new ones do not",
        ),
        (["--layers", "1", "--prompt", "long" * 1100], "small checkpoint: a prompt of 4400 tokens and 16 new ones"),
        (["--layers", "1", "--prompt", ""], "small checkpoint: request 0: the prompt is empty"),
    ],
)
def test_a_wrong_argument_gets_one_line(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    check_error(demo, capsys, arguments, message)


def test_a_region_that_is_wrong_for_the_runner_gets_one_line(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--layers", "1", "--tokens", "1", "--runner", "mrv1", "--region", "narrow"]
    check_error(demo, capsys, arguments, "small checkpoint: ", "dsv4::qnorm_rope_kv_insert")


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "sink" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


SPOILED = {
    "a weight is missing": (drop_a_weight, "lacks 1 weights, for example model.layers.0.self_attn.sinks"),
    "weights of another width": (
        lambda folder: change_config(folder, hidden_size=128),
        "weights have other sizes than config.json says, for example lm_head.weight [256, 64] and not [256, 128]",
    ),
    "weights for more tokens": (lambda folder: change_config(folder, vocab_size=100), "weights have other sizes than"),
    "a number that is a text": (
        lambda folder: change_config(folder, num_hidden_layers="a"),
        "num_hidden_layers is 'a'; it must be an integer above 0",
    ),
    "a number that only transformers reads": (
        lambda folder: change_config(folder, n_routed_experts="a"),
        "n_routed_experts",
    ),
    "layers that are not listed": (lambda folder: change_config(folder, num_hidden_layers=2), "entries for 2 layers"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": 3}'),
        "its tokenizer cannot be loaded: ",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "damaged or incomplete"),
    "config is no dict": (lambda folder: (folder / "config.json").write_text("[]"), "holds []; it must be a dict"),
    "another architecture": (lambda folder: change_config(folder, model_type="llama"), "only 'deepseek_v4' is served"),
    "corrupt weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"),
        "damaged or incomplete",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_checkpoint_gets_one_line(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    spoil, message = SPOILED[fault]
    folder = tmp_path / "spoiled"
    shutil.copytree(demo.small_checkpoint(1), folder)
    spoil(folder)
    capsys.readouterr()  # transformers' bars of the saving above
    check_error(demo, capsys, ["--model", str(folder)], f"{folder}: ", message)


def test_a_damaged_small_checkpoint_says_what_to_remove(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo.small_checkpoint(1)
    (folder / "model.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    check_error(demo, capsys, ["--layers", "1"], "small checkpoint: ", f"remove {folder}, it is made anew")


def check_error(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], start: str, inside: str = ""
) -> None:
    try:
        code = demo.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "TORCHDYNAMO_VERBOSE" not in lines[0]
    assert lines[0].startswith(f"error: {start}")
    assert inside in lines[0]


def test_a_library_that_a_checkpoint_needs_gets_one_line(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for fp8 weights, which transformers dequantises with a library of its own choice."""

    def run(options: object) -> int:
        raise ImportError("Loading an FP8 quantized model requires accelerate (`pip install accelerate`)")

    monkeypatch.setattr(demo, "run", run)
    assert demo.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Loading an FP8 quantized model requires accelerate (`pip install accelerate`)")


@pytest.mark.exhaustive
def test_two_processes_serve_what_one_does(tmp_path: Path) -> None:
    """As `torchrun` starts them, over gloo, with drafts; the exit code says that all tokens are equal."""
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "serve_checkpoint.py"), "--device", "cpu", "--tokens", "5", "--layers", "2"]
    command += ["--region", "narrow", "--mtp", "2", "--prompt", "Hi", "--prompt", "The earth is round."]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.splitlines()
    assert printed[-1] == f"eager, mrv2 narrow: {SAME} (2 requests)"
    assert " drafts accepted (" in printed[-3]
    assert "torch.float32, cpu, 2 processes" in done.stdout
    assert "a collective runs on the host here: _c10d_functional::all_reduce x3" in done.stdout
