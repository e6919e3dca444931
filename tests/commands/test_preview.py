"""`frozen-opt preview` says what freeze_parameters does, and survives whatever it is pointed at."""

import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import frozen_opt
from frozen_opt.cli import main
from frozen_opt.commands.bad_input import BadInput
from frozen_opt.commands.models import open_model
from frozen_opt.commands.optimizer_state import Unmeasurable, state_bytes
from frozen_opt.commands.safetensors_header import MAX_JSON, read_header, read_index
from frozen_opt.commands.yaml_input import check_size
from tests.models import train, transformer
from tests.versions import needs_muon

DATA = Path(__file__).parents[1] / "data"
GATES = "*.mlp.gate.weight"


def header_of(tensors: Mapping[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(*shape: int, start: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [*shape], "data_offsets": [start, start + 4 * torch.Size(shape).numel()]}


def previewed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()  # what the test itself has brought about, saving a model, say
    code = main(["preview", "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


# What it lists is what would be frozen

CONFIGS: list[tuple[str, int, dict[str, int], list[list[str]]]] = [
    ("qwen3-30b-a3b", 30_532_122_624, {}, [[GATES], ["*.experts.*", "!*.layers.0.*"], ["lm_head.weight"]]),
    ("llama-3-8b", 8_030_261_248, {}, [["model.embed_tokens.weight", "*norm*"], ["*.layers.1.*"]]),
    (
        "deepseek-v3",
        671_026_404_352,
        {"num_hidden_layers": 5, "n_routed_experts": 16},
        [[GATES], ["*.shared_experts.*"]],
    ),
    ("gpt2", 124_439_808, {}, [["lm_head.weight"], ["transformer.h.*.ln_?.*", "!*.bias"]]),
]


@pytest.mark.parametrize(("name", "elements", "small", "lists"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_a_real_config_previews_what_freezing_the_built_model_freezes(
    name: str,
    elements: int,
    small: dict[str, int],
    lists: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, complete = open_model(str(DATA / f"{name}.json"), trust_remote_code=False)
    assert complete
    assert sum(parameter.numel() for parameter in model.parameters()) == elements
    assert all(parameter.is_meta for parameter in model.parameters())

    values = json.loads((DATA / f"{name}.json").read_text()) | small
    tiny = {"hidden_size": 32, "n_embd": 24, "vocab_size": 32, "moe_intermediate_size": 4, "kv_lora_rank": 4}
    narrow = {key: size for key, size in tiny.items() if key in values}
    (tmp_path / "config.json").write_text(json.dumps(values | narrow))
    settings = {key: value for key, value in values.items() if key not in ("auto_map", "architectures")}
    settings.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**settings | narrow)
    for patterns in lists:
        built = getattr(transformers, values["architectures"][0])(config)
        report = frozen_opt.freeze_parameters(built, patterns, role="policy")
        seen = previewed(capsys, tmp_path, *patterns)["policy"]
        assert seen["names"] == [*report.names]
        assert seen["matches"] == report.matches
        assert (seen["parameter_count"], seen["element_count"]) == (
            report.parameter_count,
            report.element_count,
        )


@pytest.mark.parametrize(("shards", "given"), [(1, "model.safetensors"), (4, "index"), (4, "folder")])
def test_headers_preview_what_freezing_the_saved_model_freezes(
    shards: int, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=12, vocab_size=64, num_attention_heads=2
    )
    model = transformers.Qwen3ForCausalLM(config)
    transformers.utils.logging.disable_progress_bar()
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size * 2 // shards)
    (tmp_path / "config.json").unlink()
    path = {"index": tmp_path / "model.safetensors.index.json", "folder": tmp_path}.get(
        given, tmp_path / given
    )
    for patterns in (["*.layers.*", "!*norm*"], ["model.embed_tokens.weight", "*.mlp.?p_proj.weight"]):
        built = transformers.Qwen3ForCausalLM(config)
        report = frozen_opt.freeze_parameters(built, patterns, role="policy")
        seen = previewed(capsys, path, *patterns)["policy"]
        assert sorted(seen["names"]) == sorted(report.names)
        layers = [int(name.split(".")[2]) for name in seen["names"] if ".layers." in name]
        assert layers == sorted(layers)  # and not 0, 1, 10, 11, 2 as in the file
        assert (seen["matches"], seen["element_count"]) == (report.matches, report.element_count)
        optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(built))
        for parameter in built.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        assert seen["optimizer_state_bytes"]["with_freezing"] == held_bytes(optimizer)


def test_an_index_without_its_shards_knows_names_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {f"layers.{i}.gate.weight": f"model-{i}.safetensors" for i in range(11)}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "model-3.safetensors").write_bytes(header_of({"layers.3.gate.weight": tensor(2, 3)}))
    seen = previewed(capsys, path, "layers.?.*")["policy"]
    assert seen["names"] == [f"layers.{i}.gate.weight" for i in range(10)]
    assert (seen["element_count"], seen["optimizer_state_bytes"]) == (None, None)
    assert main(["preview", str(path), "layers.?.*"]) == 0
    out = capsys.readouterr().out
    assert "10 of 11 (90.91%) parameters" in out
    assert "shards are missing" in out
    assert "elements" not in out


# What it shows

FACTORY = "tests.commands.test_preview:small"


def small() -> nn.Module:
    return transformer(layers=2, tied=True)


def chatty() -> nn.Module:
    print("building")
    return small()


RUN = """
frozen: ["*.mlp.gate.weight", "head.weight"]
trainer:
  epochs: 3
  policy:
    freeze_parameters: ${frozen}
    optimizer_config: {optimizer: SGD, lr: 1e-4, optimizer_kwargs: {momentum: 0.9}}
  critic:
    optimizer_config: {}
"""


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "--factory", FACTORY, GATES, "head.weight"]) == 0
    assert capsys.readouterr().out == (
        "policy\n"
        "  matches  pattern\n"
        "        2  *.mlp.gate.weight\n"
        "        1  head.weight\n"
        "  frozen   3 of 11 (27.27%) parameters\n"
        "           120 of 520 (23.08%) elements\n"
        "           embedding.weight\n"
        "           layers.{0..1}.mlp.gate.weight\n"
        "           embedding.weight = head.weight\n"
        "  state    of AdamW: 3.2 KiB in place of 4.1 KiB, 972 B saved\n"
    )


def test_what_a_factory_prints_stays_out_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "--json", "--factory", "tests.commands.test_preview:chatty", GATES]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["policy"]["parameter_count"] == 2
    assert err == "building\n"


def test_a_config_gives_every_role_its_patterns_and_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    seen = previewed(capsys, "--factory", FACTORY, "--config", path)
    assert {role: each["parameter_count"] for role, each in seen.items()} == {"policy": 3, "critic": 0}
    assert seen["policy"]["optimizer"] == "SGD"
    assert seen["policy"]["optimizer_state_bytes"] == {
        "without_freezing": 4 * 520,
        "with_freezing": 4 * (520 - 120),
    }
    assert seen["critic"]["optimizer_state_bytes"]["with_freezing"] == 8 * 520 + 4 * 11
    alone = previewed(
        capsys, "--factory", FACTORY, "--config", path, "--role", "policy", "--optimizer", "Lamb"
    )
    assert [*alone] == ["policy"]
    assert alone["policy"]["optimizer"] == "Lamb"


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (["--dtype", "bfloat16"], 2 * 2),
        (["--dtype", "bfloat16", "--master-weights"], 3 * 4),
        (["--dtype", "float32", "--master-weights"], 2 * 4),
    ],
)
def test_the_dtype_policy_counts(options: list[str], size: int, capsys: pytest.CaptureFixture[str]) -> None:
    seen = previewed(capsys, "--factory", FACTORY, *options, GATES)["policy"]["optimizer_state_bytes"]
    assert seen == {
        "without_freezing": size * 520 + 4 * 11,
        "with_freezing": size * (520 - 32) + 4 * 9,
    }


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--expect", "2"], 0),
        (["--expect", "3"], 1),
        (["--fail-under", "2"], 0),
        (["--fail-under", "3"], 1),
        (["--fail-under", "1", "--expect", "0"], 1),
    ],
)
def test_expectations(options: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "--factory", FACTORY, *options, GATES]) == code
    out, err = capsys.readouterr()
    assert "layers.{0..1}.mlp.gate.weight" in out
    assert err.count("\n") == code
    assert ("2 parameters would be frozen" in err) == bool(code)


# What optimizers keep


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {}),
        ("Adagrad", {}),
        ("Adafactor", {}),  # reads values: measured on small tensors
        ("Lamb", {}),
        ("NovoGrad", {}),
    ],
)
def test_measured_state_is_what_a_real_step_keeps(optimizer: str, kwargs: dict[str, Any]) -> None:
    from frozen_opt.optimizers_by_name import optimizer_class

    model = transformer(width=6)
    model.scale = nn.Parameter(torch.zeros(3, 4, 5))
    real = optimizer_class(optimizer)(model.parameters(), lr=1e-3, **kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    real.step()
    sizes = state_bytes(model, optimizer, kwargs, torch.float32)
    assert sum(size for _, size in sizes) == held_bytes(real)


@needs_muon
def test_the_hybrid_muon_is_measured_as_it_is_built() -> None:
    from frozen_opt.optimizers_by_name import build_optimizer

    model = transformer()
    optimizer = build_optimizer(model, {"optimizer_config": {"optimizer": "Muon", "lr": 0.01}})
    train(model, optimizer, steps=1)
    assert sum(size for _, size in state_bytes(model, "Muon", {}, torch.float32)) == held_bytes(optimizer)


def test_state_that_is_not_linear_in_the_sides_is_not_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                assert parameter.sum().item() == 0  # which fake tensors can't tell
                self.state[parameter]["square"] = torch.zeros(len(parameter), len(parameter))

    monkeypatch.setattr(torch.optim, "Reading", Reading, raising=False)
    with pytest.raises(Unmeasurable, match="does not grow with the sides"):
        state_bytes(transformer(), "Reading", {}, torch.float32)


def test_an_optimizer_that_can_not_be_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "--factory", FACTORY, "--optimizer", "LBFGS", GATES]) == 0
    assert "state    of LBFGS unknown: it takes no step here: " in capsys.readouterr().out


# Bad input

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)
)

FILES: list[tuple[str, bytes, str]] = [
    ("truncated.safetensors", header_of({"a": tensor(2)})[:20], "truncated"),
    ("empty.safetensors", b"", "no header"),
    ("short.safetensors", b"\x01\x00", "no header"),
    ("beyond.safetensors", struct.pack("<Q", 1 << 40) + b"{}", "1,099,511,627,776 bytes, and 2 are there"),
    ("pickle.safetensors", pickle.dumps({"a": [1, 2, 3]}), "a pickle, which is never opened"),
    ("list.safetensors", struct.pack("<Q", 2) + b"[]", "no object"),
    ("text.safetensors", struct.pack("<Q", 5) + b'{"a":', "no valid JSON"),
    ("latin.safetensors", struct.pack("<Q", 4) + b'{"\xe9"', "no valid JSON"),
    ("twice.safetensors", struct.pack("<Q", 15) + b'{"a":1,"a":1}  ', "stands there twice"),
    ("deep.safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000, "nested too deeply"),
    ("digits.safetensors", struct.pack("<Q", 9_000) + b'{"a":' + b"9" * 8_994 + b"}", "no valid JSON"),
    ("entry.safetensors", header_of({"a": 1}), "'a' needs dtype, shape, data_offsets"),
    ("negative.safetensors", header_of({"a": tensor(1) | {"shape": [-1]}}), "impossible"),
    ("bool.safetensors", header_of({"a": tensor(1) | {"shape": [True]}}), "impossible"),
    ("size.safetensors", header_of({"a": tensor(2) | {"shape": [1 << 62, 1 << 62]}}), "does not fit"),
    ("dims.safetensors", header_of({"a": tensor(1) | {"shape": [1] * 65}}), "impossible"),
    ("order.safetensors", header_of({"a": tensor(0) | {"data_offsets": [8, 0]}}), "does not fit"),
    (
        "huge.safetensors",
        header_of({"a": {"dtype": "?", "shape": [1 << 62] * 2, "data_offsets": [0, 0]}}),
        "shape",
    ),
    (
        "backwards.safetensors",
        header_of({"a": {"dtype": "?", "shape": [], "data_offsets": [8, 0]}}),
        "does not fit",
    ),
    ("dots.safetensors", header_of({"a..b": tensor(1)}), "no parameter's name"),
    ("nested.safetensors", header_of({"a." * 300 + "b": tensor(1)}), "no parameter's name"),
    ("config.json", b'{"model_type": "\x1b[31mred"}', "no valid JSON"),
    ("config.json", b'{"model_type": "\\u001b[31mred\\nblue"}', r"\x1b[31mred"),
    ("config.json", b'{"model_type": "gpt2", "n_layer": 1000000000}', "n_layer = 1000000000"),
    ("config.json", b'{"model_type": "gpt2", "n_embd": "wide"}', "no model can be built"),
    ("config.json", b"[" * 200_000, "nested too deeply"),
    ("index.json", b'{"weight_map": {}}', "no weight_map"),
    ("index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "is no file name"),
    ("index.json", b'{"weight_map": {"a": ["b"]}}', "is no file name"),
    ("index.json", b'{"weight_map": {"a": "index.json"}}', "truncated, or no safetensors file"),
    ("model.bin", b"PK\x03\x04" + b"\x00" * 100, "no safetensors file"),
]


@pytest.mark.parametrize(
    ("name", "content", "text"), FILES, ids=lambda value: value if type(value) is str else ""
)
def test_a_bad_file_gets_one_clear_line(
    name: str, content: bytes, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["preview", str(path), "*"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("frozen-opt: ")
    assert text in err
    assert err.count("\n") == 1
    assert err[:-1].isprintable()


def test_an_index_that_its_shards_deny_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "s", "b": "s"}}')
    (tmp_path / "s").write_bytes(header_of({"a": tensor(1)}))
    assert main(["preview", str(tmp_path), "*"]) == 2
    assert "puts 'b' into 's', whose header lacks it" in capfd.readouterr().err


def test_a_claim_of_a_gigabyte_is_not_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:  # a sparse one
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)
    assert main(["preview", str(path), "*"]) == 2
    assert "claims a header of 1,073,741,824 bytes; more than" in capfd.readouterr().err
    for name in ("config.json", "run.yaml"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MAX_JSON + 1)
    assert main(["preview", str(tmp_path), "*"]) == 2
    assert "larger than" in capfd.readouterr().err
    assert main(["preview", "--factory", FACTORY, "--config", str(tmp_path / "run.yaml")]) == 2
    assert "too large for a config" in capfd.readouterr().err


OPTIONS: list[tuple[list[str], str]] = [
    ([], "no MODEL"),
    (["gone.json", "*"], "gone.json does not exist. Nothing is downloaded"),
    (["Qwen/Qwen3-30B-A3B", "*"], "does not exist. Nothing is downloaded"),
    (["/dev/zero", "*"], "/dev/zero is no file"),
    ([".", "*"], "has neither config.json nor"),
    ([str(DATA / "gpt2.json")], "no patterns: name some"),
    ([str(DATA / "gpt2.json"), "*", "--dtype", "int3"], "--dtype is 'int3'"),
    (["--factory", FACTORY, "*.mlp.gates.weight"], "closest names: layers.0.mlp.gate.weight"),
    (["--factory", FACTORY, "*"], "nothing is left to train"),
    (["--factory", FACTORY, "!*"], "starts with the carve-out"),
    (["--factory", FACTORY, GATES, "--optimizer", "Adam\x1b[31mW"], "must be the name of a class"),
    (["--factory", "tests.commands.test_preview", GATES], "must be module:function"),
    (["--factory", "tests.commands.test_preview:gone", GATES], "AttributeError"),
    (["--factory", "tests.gone:gone", GATES], "No module named 'tests.gone'"),
    (["--factory", "tests.commands.test_preview:GATES.upper", GATES], "failed"),
    (["--factory", "builtins:list", GATES], "returned a list, not a torch.nn.Module"),
    (["--factory", FACTORY, "--config", "gone.yaml"], "gone.yaml does not exist"),
    (["--factory", FACTORY, GATES, "--config", "gone.yaml"], "not from both"),
    (["--factory", FACTORY, "--no-such-option"], "such option"),
    (["--factory", FACTORY, "--expect", "many", GATES], "Invalid value for '--expect'"),
]


@pytest.mark.parametrize(
    ("arguments", "text"), OPTIONS, ids=lambda value: value if type(value) is str else ""
)
def test_bad_options_get_clear_lines(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preview", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") <= 3
    assert all(map(str.isprintable, err.splitlines()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "is no config: it is too large"),
        ("a: &a [*a]", "is no config"),
        ("[" * 5000, "is no config"),
        ("a: [", "is no config"),
        ("just words", "no role with freeze_parameters"),
        ("!!python/object/apply:os.system ['touch ran']", "is no config"),
        ("trainer: {policy: {freeze_parameters: '*.mlp.gate.weight'}}", "must be a list of patterns"),
        ("trainer: {policy: {freeze_parameters: '${gone}'}}", "is no config"),
        ("trainer: {epochs: 3}", "no role with freeze_parameters"),
    ],
    ids=lambda _: "",
)
def test_a_bad_config_gets_one_clear_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert main(["preview", str(DATA / "gpt2.json"), "--config", "run.yaml"]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not Path("ran").exists()


QUOTE = 'Quote each pattern, as in ["*.mlp.gate.weight", "!lm_head.*"]'


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("freeze_parameters: [*.mlp.gate.weight]", "line 3, column 25: without quotes * begins an alias"),
        ('freeze_parameters: ["*", !lm_head.weight]', "line 3, column 30: without quotes ! begins a tag"),
        ("freeze_parameters: [[01].weight]", "line 3, column 25: without quotes [ begins a list"),
        ("freeze_parameters: [layers.[01].weight]", "line 3, column 32: without quotes [ begins a list"),
        ("freeze_parameters: [layers.{0..3}.w]", "line 3, column 32: without quotes { begins a mapping"),
        ("freeze_parameters:\n      - !lm_head.*", "line 4, column 9: without quotes ! begins a tag"),
        ("freeze_parameters:\n      - *", "line 4, column 9: without quotes * begins an alias"),
        ("freeze_parameters:\n      - *foo", "line 4, column 9: without quotes * begins an alias"),
        ("freeze_parameters:\n      - {q,k}_proj", "line 4, column 9: without quotes { begins a mapping"),
        ("freeze_parameters:\n      - '*' # [*\n      - [01].w", "line 5, column 9: without quotes ["),
    ],
)
def test_case_39_an_unquoted_pattern_is_placed_and_remedied(
    line: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer:\n  policy:\n    {line}\n")
    assert main(["preview", str(DATA / "gpt2.json"), "--config", str(path)]) == 2
    err = capfd.readouterr().err
    assert place in err
    assert QUOTE in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3, column 2: did not find expected ',' or ']'"),
        ('a: ["*.w]\n', "line 2, column 1: found unexpected end of stream"),
        ("b: &b 1\na: 1\nc: *b\na: 2\n", "line 4, column 1: found duplicate key a"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
    ],
)
def test_case_39_other_yaml_errors_are_placed(
    text: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["preview", str(DATA / "gpt2.json"), "--config", str(path)]) == 2
    err = capfd.readouterr().err
    assert place.partition(": ")[0] in err
    assert "Quote each" not in err
    assert err.count("\n") == 1


def test_case_39_numbers_are_those_of_omegaconf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    path = tmp_path / "run.yaml"
    seen = {}
    for eps in ("1e-8", "1.0e-8"):
        options = f"{{optimizer: AdamW, optimizer_kwargs: {{eps: {eps}, amsgrad: yes, betas: [0.9, 99e-2]}}}}"
        path.write_text(f"policy: {{freeze_parameters: ['*.norm.*'], optimizer_config: {options}}}")
        assert OmegaConf.load(path).policy.optimizer_config.optimizer_kwargs.eps == 1e-8
        seen[eps] = previewed(capsys, "--factory", FACTORY, "--config", path)["policy"]
    assert seen["1e-8"] == seen["1.0e-8"]
    assert seen["1e-8"]["optimizer_state_bytes"]["without_freezing"] == 12 * 520 + 4 * 11


def test_case_39_a_duplicate_key_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy:\n  freeze_parameters: ['*.norm.*']\n  freeze_parameters: ['head.*']\n")
    assert main(["preview", "--factory", FACTORY, "--config", str(path)]) == 2
    assert "line 3, column 3: found duplicate key freeze_parameters" in capfd.readouterr().err


def test_case_39_an_architecture_that_transformers_lacks_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((DATA / "gpt2.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values | {"architectures": ["GPT2ForRewards", "torch"]}))
    assert main(["preview", str(tmp_path), "lm_head.weight", "--expect", "1"]) == 2
    err = capfd.readouterr().err
    assert "lacks; tried: transformers.GPT2ForRewards, transformers.torch. Give the model by --factory" in err
    assert err.count("\n") == 1
    auto = {"AutoConfig": "c.C", "AutoModel": "m.GPT2ForRewards"}
    config.write_text(json.dumps(values | {"architectures": ["GPT2ForRewards"], "auto_map": auto}))
    assert main(["preview", str(tmp_path), "lm_head.weight"]) == 2
    assert "(its own code is run only with --trust-remote-code)" in capfd.readouterr().err


def test_case_39_an_empty_shard_name_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in ("", "..", ".", "a/b", "x" * 300, "\0"):
        index.write_text(json.dumps({"weight_map": {"a.weight": name, "b.weight": "x.safetensors"}}))
        code = main(["preview", str(tmp_path), "a.*", "--expect", "1"])
        err = capfd.readouterr().err
        assert (code, err) == (0, "") or (code == 2 and "puts 'a.weight' into" in err)
        assert code == (2 if name in ("", "..", ".", "a/b") else 0)  # a file that can't be there is missing


def test_case_39_a_pattern_for_a_buffer_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", str(DATA / "deepseek-v3.json"), "*.e_score_correction_bias"]) == 2
    err = capfd.readouterr().err
    assert "it matches model.layers.3.mlp.gate.e_score_correction_bias" in err
    assert "a buffer, and buffers are never frozen" in err


def test_a_model_of_too_many_modules_is_not_built(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("frozen_opt.commands.models._MAX_MODULES", 100)
    assert main(["preview", str(DATA / "gpt2.json"), "*.bias"]) == 2
    assert "a model of more than 100 modules" in capfd.readouterr().err
    monkeypatch.undo()
    assert main(["preview", str(DATA / "gpt2.json"), "*.bias"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "too large"),
        ("[" * 60 + "]" * 60, "too large"),
        ("".join(f"a{i}: &a{i} [{f'*a{i - 1}' if i else 1}]\n" for i in range(60)), "too large"),
        ("a: '" + "${b}" * 3000 + "'", "too large"),
        ("a: &a [*a]", "refers to itself"),
    ],
    ids=lambda _: "",
)
def test_yaml_is_measured_before_any_of_it_is_made(text: str, says: str) -> None:
    # OmegaConf has limits of its own only from 2.4 on.
    with pytest.raises(ValueError, match=says):
        check_size(text)


def test_what_is_doubtful_about_a_pattern_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = previewed(capsys, "--factory", FACTORY, "layers.[^1].*")["policy"]["warnings"]
    assert [text for text in warnings if "write 'layers.[!1].*'" in text] == warnings != []
    assert main(["preview", "--factory", FACTORY, "layers.[^1].*"]) == 0
    assert f"\n  warning  {warnings[0]}\n" in capsys.readouterr().out


def test_names_can_not_reach_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "layers.0.\x1b]0;owned\x07\n\u202e.weight"
    path = tmp_path / "evil.safetensors"
    path.write_bytes(header_of({evil: tensor(2), "rest": tensor(2)}))
    assert main(["preview", str(path), "layers.*"]) == 0
    assert main(["preview", str(path), "lay\x1b[31mers.*gone"]) == 2
    assert main(["preview", "--json", str(path), "layers.*"]) == 0
    out, err = capfd.readouterr()
    assert all(map(str.isprintable, [*out.splitlines(), *err.splitlines()]))
    assert r"layers.0.\x1b]0;owned\x07\n\u202e.weight" in out
    assert r"layers.0.\x1b]0;owned\x07\n\u202e.weight" in err
    assert json.loads(out[out.index("{\n") :])["policy"]["names"] == [evil]


def test_names_can_not_reach_the_terminal_from_the_log_or_an_error(logs: list[Any]) -> None:
    model = nn.Module()
    model.register_parameter("evil\x1b[31m\n", nn.Parameter(torch.zeros(1)))
    model.register_parameter("rest", nn.Parameter(torch.zeros(1)))
    frozen_opt.freeze_parameters(model, ["evil*"], role="policy")
    assert r"evil\x1b[31m\n" in logs[-1]["message"]
    with pytest.raises(frozen_opt.UnmatchedPatternError, match=r"closest names: evil\\x1b\[31m\\n"):
        frozen_opt.plan_freezing(model, ["evi"], role="policy")


def test_code_that_comes_with_a_model_runs_only_when_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "cache")])
    folder = tmp_path / "own_model"
    folder.mkdir()
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own_model", "auto_map": auto}))
    (folder / "own.py").write_text(
        f"""
import pathlib, torch
from transformers import PretrainedConfig, PreTrainedModel
pathlib.Path({str(tmp_path / "ran")!r}).touch()
class OwnConfig(PretrainedConfig):
    model_type = "own_model"
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.gate, self.rest = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.post_init()
"""
    )
    assert main(["preview", str(folder), "gate.*"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "only with --trust-remote-code" in err
    assert not (tmp_path / "ran").exists()
    assert main(["preview", str(folder), "--trust-remote-code", "gate.*"]) == 0
    assert (tmp_path / "ran").exists()


# The header reader


@given(content=st.binary(max_size=200), length=st.none() | st.integers(0, 250))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(content: bytes, length: int | None, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content if length is None else struct.pack("<Q", length) + content)
    for read in (read_header, read_index):
        shapes, error = tried(read, path)
        assert error is None or error.isprintable()
        check_shapes(shapes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "BOOL", "F4", "new"]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(-1, 99), st.integers(-1, 99)) | JSON,
    }
)
TENSOR = st.lists(st.integers(0, 5), max_size=3).map(lambda shape: tensor(*shape))


@given(
    header=st.dictionaries(st.text(max_size=8), TENSOR | ENTRY | JSON, max_size=4), padding=st.integers(0, 9)
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused(header: dict[str, Any], padding: int, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.safetensors"
    text = json.dumps(header).encode("utf-8", "surrogatepass") + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    shapes, error = tried(read_header, path)
    check_shapes(shapes)
    if error is None:
        assert {*shapes} == {*header} - {"__metadata__"}
    else:
        assert error.isprintable()
        assert not all(map(is_valid, header.values()))


def tried(read: Callable[[Path], Any], path: Path) -> tuple[Mapping[str, Any], str | None]:
    try:
        return read(path), None
    except BadInput as error:
        return {}, str(error)


def is_valid(entry: Any) -> bool:
    """Whether this is a tensor as `tensor` makes them."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    sides = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape)
    return sides and entry == tensor(*shape)


def check_shapes(shapes: Mapping[str, Any]) -> None:
    for shape in shapes.values():
        assert shape is None or all(type(side) is int and side >= 0 for side in shape)


def test_the_reader_agrees_with_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "all.safetensors"
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]
    save_file(
        {f"{kind}.é\n": torch.zeros(3, i, dtype=kind) for i, kind in enumerate(kinds)},
        path,
        metadata={"a": "b"},
    )
    with safe_open(path, "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert read_header(path) == theirs


def test_a_zip_of_tensors_is_not_opened(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", pickle.dumps([1]))
    assert main(["preview", str(path), "*"]) == 2
    assert "a zip file, which is never opened here" in capfd.readouterr().err
