"""The command line: texts, data, files and exit codes."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
import yaml
from typer.testing import CliRunner

from hyperpar_core import Overrides, ShardingPlan, build_plan, cli
from hyperpar_core.cli import app
from hyperpar_core.testing import tiny_config, tiny_model
from hyperpar_core.testing.models import meta_model, model_from

DONE, DIFFERENT, USAGE, REFUSED = 0, 1, 2, 3


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    tiny_config("llama").save_pretrained(folder)
    return folder


def test_plan_explains_a_config_for_the_degrees_given(config):
    for spec in (config, config / "config.json"):
        result = run("plan", spec, "--tp", 2, "--dp", 2)
        assert result.exit_code == DONE, result.output
        assert result.output.startswith("llama ") and "dp 2 x tp 2   sequence parallel" in result.output
    assert "sequence parallel" not in run("plan", config, "--tp", 2, "--no-sp").output
    assert "vocab_parallel_cross_entropy" in run("plan", config, "--tp", 2, "--loss-parallel").output


def test_plan_takes_a_family_at_its_default_size_and_a_function(tmp_path, monkeypatch):
    assert run("plan", "llama", "--tp", 8).output.startswith("llama 6.")
    (tmp_path / "cli_models.py").write_text(
        "from hyperpar_core.testing import tiny_config\nfrom transformers import AutoModelForCausalLM\n"
        "def make():\n    return AutoModelForCausalLM.from_config(tiny_config('llama'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("plan", "cli_models:make", "--tp", 2).output.startswith("llama ")
    assert {p.device.type for p in meta_model("cli_models:make").parameters()} == {"meta"}


def test_world_fills_dp(config):
    assert "dp 4 x tp 2" in run("plan", config, "--tp", 2, "--world", 8).output
    for wrong in (("--tp", 2, "--world", 7), ("--tp", 2, "--dp", 2, "--world", 8)):
        result = run("plan", config, *wrong)
        assert result.exit_code == USAGE and "--world" in result.output


def test_plan_says_what_a_rank_holds_for_the_tokens_given(config):
    few, many = (run("plan", config, "--tp", 2, "--seq", seq, "--batch", 2).output for seq in (64, 128))
    assert "memory per rank: " in few and "with checkpointed layers" in few and "a step of 128 tokens" in few
    assert few != many and "a step of 256 tokens" in many


def test_html_is_written_beside_what_is_printed(config, tmp_path):
    result = run("plan", config, "--tp", 2, "--html", tmp_path / "plan.html")
    assert result.exit_code == DONE and f"wrote {tmp_path / 'plan.html'}" in " ".join(result.output.split("\n"))
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_what_if_ranks_the_products_of_a_world_and_refuses_what_it_would_ignore(config):
    result = run("plan", config, "--world", 8, "--what-if", "--seq", 64)
    assert result.exit_code == DONE and result.output.startswith("llama on 8 ranks: ") and "refused" in result.output
    data = json.loads(run("plan", config, "--world", 8, "--what-if", "--json").output)
    assert data["world"] == 8 and data["choices"] and data["refused"]
    for extra in (("--tp", 2), ("--check",), ("--html", "x.html"), ("--dp", 2)):
        assert run("plan", config, "--world", 8, "--what-if", *extra).exit_code == USAGE
    assert run("plan", config, "--what-if").exit_code == USAGE
    assert run("plan", config, "--memory", 80).exit_code == USAGE


@pytest.mark.parametrize("width", [60, 80, 140])
def test_on_a_terminal_tables_fit_its_width(config, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    for options in (("--tp", 2, "--dp", 2), ("--world", 8, "--what-if")):
        output = run("plan", config, *options).output
        assert "\x1b[" in output
        plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
        assert max(map(len, plain.splitlines())) <= width and "llama" in plain


def test_json_is_the_plan_and_diff_reads_it(config, tmp_path):
    for name, options in (("a", ()), ("b", ("--no-sp",))):
        result = run("plan", config, "--tp", 2, "--json", *options)
        (tmp_path / f"{name}.json").write_text(result.output)
    expected = build_plan(meta_model(str(config)), {"tp": 2})
    assert ShardingPlan.from_yaml(tmp_path / "a.json") == expected
    expected.to_yaml(tmp_path / "a.yaml")
    assert (run("diff", tmp_path / "a.json", tmp_path / "a.yaml").output, DONE) == ("equal\n", DONE)
    result = run("diff", tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == DIFFERENT and "sequence_parallel: true -> false" in result.output
    assert run("diff", tmp_path / "a.json", tmp_path / "c.json").exit_code == USAGE
    (tmp_path / "bad.yaml").write_text("version: 2")
    assert run("diff", tmp_path / "a.json", tmp_path / "bad.yaml").exit_code == REFUSED


def test_check_proves_the_plan_over_fake_ranks_and_says_what_is_wrong(config, tmp_path):
    result = run("plan", config, "--tp", 2, "--world", 8, "--check")
    assert result.exit_code == DONE
    assert "check: every placement is as declared, forward and backward, on 8 fake ranks" in result.output
    file = tmp_path / "overrides.yaml"
    entry = {"match": "model.layers.1.mlp", "in_grad": {"x": {"tp": "replicate"}}}
    file.write_text(yaml.safe_dump({"version": 1, "plan_overrides": [entry]}))
    result = run("plan", config, "--tp", 2, "--overrides", file, "--check")
    assert result.exit_code == DIFFERENT and "check: model.layers.1.mlp: " in result.output


def test_overrides_are_read_and_a_bad_file_is_refused(config, tmp_path):
    file = tmp_path / "overrides.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "plan_overrides": [{"match": "*.mlp", "lowerer": "default"}]}))
    assert "lowerer default" in run("plan", config, "--tp", 2, "--overrides", file).output
    file.write_text("version: 1\nplan_overrides: [{match: '*.mpl'}]")
    result = run("plan", config, "--tp", 2, "--overrides", file)
    assert (
        result.exit_code == REFUSED
        and result.output == "OverrideError: override '*.mpl': matches no module. Nearest: *.mlp.\n"
    )
    assert run("plan", config, "--overrides", tmp_path / "none.yaml").exit_code == USAGE


def test_what_a_family_suggests_is_written_to_a_new_file(config, tmp_path):
    file = tmp_path / "suggested.yaml"
    result = run("plan", config, "--cp", 2, "--write-overrides", file)
    written = Overrides.from_yaml(file)
    assert [e.when for e in written.entries] == [("cp",)] and written.entries[0].inner_wrapper
    assert result.exit_code in (DONE, REFUSED)  # whether the suggested wrapper is installed
    assert run("plan", config, "--cp", 2, "--write-overrides", file).exit_code == USAGE
    nothing = run("plan", config, "--tp", 2, "--write-overrides", tmp_path / "x.yaml")
    assert (
        nothing.exit_code == USAGE and "nothing is suggested" in nothing.output and not (tmp_path / "x.yaml").exists()
    )


def test_a_refusal_is_its_text_and_exit_code_3(config):
    result = run("plan", config, "--tp", 3)
    assert result.exit_code == REFUSED and result.output.startswith("Refused: model.layers.0.self_attn")
    assert "can't be split over tp=3" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",), ("plan", "no_such_family"), ("plan", "no_such_module:f"), ("plan", "llama", "--tp", "0"),
        ("plan", "llama", "--pp", "2"), ("plan", "llama", "--tp", "two"), ("verify", "llama", "--dtype", "float16"),
        ("diff", "a"), ("nothing",), ("plan", "./no/such/folder"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == USAGE


def test_a_broken_config_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = run("plan", tmp_path)
    assert result.exit_code == USAGE and "not a config" in result.output and len(result.output) < 500


def test_plugins_and_env_print_text_and_data():
    assert "hyperpar-core" in run("plugins").output and "torch" in run("env").output
    assert {one["name"] for one in json.loads(run("plugins", "--json").output)} >= {"core"}
    assert json.loads(run("env", "--json").output)["libraries"]["torch"]


def test_verify_is_0_where_equal_1_where_not_and_3_where_refused(tmp_path):
    file = tmp_path / "wrong.yaml"
    wrong = {"match": "model.layers.1.mlp", "in_grad": {"x": {"tp": "replicate"}}}
    file.write_text(yaml.safe_dump({"version": 1, "plan_overrides": [wrong]}))
    equal = run("verify", "llama", "--tp", 2, "--json")
    assert equal.exit_code == DONE and json.loads(equal.output)
    different = run("verify", "llama", "--tp", 2, "--no-sp", "--overrides", file)
    assert different.exit_code == DIFFERENT and "model.layers.1.mlp" in different.output
    assert run("verify", "llama", "--cp", 2).exit_code == REFUSED
    assert run("verify", "llama", "--cp", 2, "--suggested").exit_code == DONE


def test_without_the_extras_the_command_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(cli.__file__)
    assert caught.value.code == USAGE
    assert capsys.readouterr().err == "hyperpar's command line needs its extras: pip install 'hyperpar-core[cli]'\n"


def test_the_tiny_and_the_whole_model_of_a_family_are_two_things():
    assert sum(p.numel() for p in meta_model("llama").parameters()) > 1000 * sum(
        p.numel() for p in tiny_model("llama").parameters()
    )


def test_a_folder_wins_over_the_family_of_its_name(tmp_path, monkeypatch):
    tiny_config("llama", num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    for make in (meta_model, model_from):
        assert make("llama").config.num_hidden_layers == 1
