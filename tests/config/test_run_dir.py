"""What a run's directory holds, hides and records."""

import json
from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.config.command_line import compose_config, hydra_entry, key_help, to_yaml
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.keys import schema_keys
from dhp.config.run_dir import (
    check_run_dir,
    compose_recorded,
    make_run_dir,
    replaces_checkpoints,
    require_named_addresses,
    run_directory,
)
from dhp.config.schema import Config
from dhp.config.yaml_files import ConfigSource
from dhp.core.errors import ConfigError


def leave_run(run_dir: Path, status: str = "completed", metrics: str = '{"step": 1}\n') -> Path:
    """What a run leaves as its record."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(Config(run_dir=str(run_dir))))
    (run_dir / "metrics.jsonl").write_text(metrics)
    (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    return run_dir


@pytest.mark.parametrize("mark", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path, mark):
    (tmp_path / mark).write_text("")
    with pytest.raises(ConfigError) as caught:
        check_run_dir(Config(run_dir=str(tmp_path)))
    for told in (f"run_dir={tmp_path} already holds a run ({mark})", "overwrite=false", "or overwrite=true"):
        assert told in str(caught.value)


def test_new_and_otherwise_used_directories_pass(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    check_run_dir(Config(run_dir=str(tmp_path)))
    assert make_run_dir(Config(run_dir=str(tmp_path / "a" / "b"))).is_dir()


def test_overwriting_removes_what_a_run_left_and_nothing_else(tmp_path):
    leave_run(tmp_path)
    for name in ("trace.json", "notes.txt"):
        (tmp_path / name).write_text("")
    for name in (
        "tb",
        "logs",
        "mine",
        *(f"checkpoints/{name}" for name in ("step_2", "step_4.partial", "step_1.removed", "pretrained")),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    ranks = (
        "vision-0.log",
        "text-12.log",
        "text.1-0.log",
        "data.log",
        "data-1.log",
        "text-0.stacks",
        "text.1-0.heartbeat",
    )
    for name in (*ranks, "slurm-1.log"):
        (tmp_path / "logs" / name).write_text("")
    for name in ("loggers", "wandb", "swanlog"):
        (tmp_path / name).mkdir()
    for name in ("swanlab.log", "swanlab.id", "notes"):  # wandb's folder was not this run's
        (tmp_path / "loggers" / name).write_text("")
    (tmp_path / "checkpoints" / "best").symlink_to("step_2")
    (tmp_path / "checkpoints" / "best.json").write_text("{}")
    config = Config(run_dir=str(tmp_path), overwrite=True)
    config.training.checkpoint_dir = str(tmp_path / "checkpoints")
    assert replaces_checkpoints(config)
    make_run_dir(config)
    left = ["checkpoints", "loggers", "logs", "mine", "notes.txt", "wandb"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert [path.name for path in (tmp_path / "loggers").iterdir()] == ["notes"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["file", "slurm-1.log"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["pretrained"]


def test_a_linked_directory_is_unlinked_not_emptied(tmp_path):
    kept = tmp_path / "kept"
    (kept / "step_2").mkdir(parents=True)
    run_dir = leave_run(tmp_path / "run")
    (run_dir / "checkpoints").symlink_to(kept)
    make_run_dir(Config(run_dir=str(run_dir), overwrite=True))
    assert (kept / "step_2").exists() and not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(("folder", "file"), [("logs", "vision.0.log"), ("loggers", "wandb.id")])
def test_logs_that_are_a_link_are_unlinked_not_emptied(tmp_path, folder, file):
    other = tmp_path / "other"
    other.mkdir()
    (other / file).write_text("of another run")
    run_dir = leave_run(tmp_path / "run")
    (run_dir / folder).symlink_to(other)
    make_run_dir(Config(run_dir=str(run_dir), overwrite=True))
    assert (other / file).read_text() == "of another run" and not (run_dir / folder).exists()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_logs_are_not_written_into_what_a_link_leads_to(tmp_path, resume):
    other = tmp_path / "other"
    other.mkdir()
    run_dir = leave_run(tmp_path / "run") if resume == "auto" else tmp_path / "new"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "logs").symlink_to(other)
    config = Config(run_dir=str(run_dir))
    config.training.resume = resume
    with pytest.raises(ConfigError, match=f"{run_dir}/logs is a link.*into what it leads to \\({other}\\)"):
        check_run_dir(config)
    assert (run_dir / "logs").is_symlink() and list(other.iterdir()) == []
    (run_dir / "logs").unlink()
    (run_dir / "logs").mkdir()
    check_run_dir(config)


def test_what_no_run_left_is_not_removed(tmp_path):
    for name in ("checkpoints/pretrained", "checkpoints/step_2", "logs", "tb"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    config = Config(run_dir=str(tmp_path), overwrite=True)
    config.training.checkpoint_dir = str(tmp_path / "checkpoints")
    assert not replaces_checkpoints(config)
    make_run_dir(config)
    assert len(list(tmp_path.rglob("file"))) == 4


@pytest.mark.parametrize("text", ["learning_rate: 0.1", "- a list", "{", ""])
def test_a_configuration_that_no_run_wrote_is_no_mark(tmp_path, text):
    leave_run(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config.yaml, metrics.jsonl, summary.json but no run's record"):
        make_run_dir(Config(run_dir=str(tmp_path), overwrite=True))
    assert (tmp_path / "config.yaml").read_text() == text


def test_a_copied_configuration_alone_is_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(Config(run_dir="elsewhere")))
    with pytest.raises(ConfigError, match="overwrite=true replaces runs only"):
        make_run_dir(Config(run_dir=str(tmp_path), overwrite=True))


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_empty_run_dir_is_refused(overwrite):
    with pytest.raises(ConfigError, match="run_dir is empty.*shell variable"):
        check_run_dir(Config(run_dir="", overwrite=overwrite))


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("vision.model_name", "checkpoints/step_2/model"),
        ("text.model_name", "checkpoints/step_2.partial"),
        ("training.checkpoint_dir", "tb/deep"),
        ("tiny_assets", "tb/assets"),
        ("data.cache_dir", "tb/lengths"),
        ("data.cache_features", "tb/features"),
        ("memory.cache_dir", "tb/costs"),
        ("data.data_registry.mine.annotation_path", "checkpoints/step_4/set.json"),
        ("data.data_registry.mine.data_path", "checkpoints/step_2"),
    ],
)
def test_what_the_run_reads_is_not_removed(tmp_path, key, where):
    run_dir = leave_run(tmp_path / "run")
    (run_dir / where).mkdir(parents=True)
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.data.datasets, config.data.data_registry = ["mine%50"], {"mine": DatasetEntry()}
    holder = config
    *sections, name = key.split(".")
    for section in sections:
        holder = holder[section] if isinstance(holder, dict) else getattr(holder, section)
    setattr(holder, name, str(run_dir / where))
    with pytest.raises(ConfigError, match=f"^{key}=.*{where} lies in {run_dir}.* is removed"):
        make_run_dir(config)
    assert (run_dir / where).is_dir() and (run_dir / "summary.json").is_file()


def test_what_is_read_through_a_link_that_is_removed_is_refused_too(tmp_path):
    (tmp_path / "kept" / "step_2").mkdir(parents=True)
    run_dir = leave_run(tmp_path / "run")
    (run_dir / "checkpoints").symlink_to(tmp_path / "kept")
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.training.resume = str(run_dir / "checkpoints" / "step_2")
    with pytest.raises(ConfigError, match="training.resume=.* lies in "):
        make_run_dir(config)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_ended_before_its_first_step_blocks_nothing(tmp_path, status):
    leave_run(tmp_path, status, metrics="")
    (tmp_path / "logs").mkdir()
    for name in ("vision-0.log", "data.log", "slurm-1.log"):
        (tmp_path / "logs" / name).write_text("")
    make_run_dir(Config(run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["slurm-1.log"]


def test_a_run_that_is_not_known_to_have_ended_is_kept(tmp_path):
    leave_run(tmp_path, metrics="")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        check_run_dir(Config(run_dir=str(tmp_path)))


def test_a_refused_run_leaves_no_directory_and_a_failed_one_its_record(tmp_path):
    for error, left in ((ConfigError, False), (ValueError, True)):
        config = Config(run_dir=str(tmp_path / error.__name__))
        with pytest.raises(error), run_directory(config) as run_dir:
            leave_run(run_dir, "failed", metrics="")
            (run_dir / "logs").mkdir()
            raise error("refused")
        assert run_dir.exists() == left
    with pytest.raises(ConfigError), run_directory(Config(run_dir=str(tmp_path))):
        raise ConfigError("refused")
    assert tmp_path.is_dir()


def test_a_directory_that_a_run_writes_is_refused_and_left_as_it_is(tmp_path):
    run_dir, elsewhere = leave_run(tmp_path / "run", "failed", metrics=""), tmp_path / "checkpoints"
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.training.checkpoint_dir = str(elsewhere)
    other = Config(run_dir=str(tmp_path / "other"))
    other.training.checkpoint_dir = str(elsewhere)
    with run_directory(config):
        for second, told in (
            (config, f"run_dir={run_dir} is in"),
            (other, f"training.checkpoint_dir={elsewhere} is in"),
        ):
            with pytest.raises(ConfigError, match=told), run_directory(second):
                make_run_dir(second)
        assert sorted(path.name for path in run_dir.iterdir()) == [
            *(".running.json", "config.yaml", "metrics.jsonl", "summary.json")
        ]
    assert not elsewhere.exists() and not (tmp_path / "other").exists()
    with run_directory(other):
        pass


def test_a_file_in_its_place_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_run_dir(Config(run_dir=str(file)))
    with pytest.raises(ConfigError, match="cannot be created"):
        make_run_dir(Config(run_dir=str(file / "below")))


@pytest.mark.parametrize("resume", ["auto", "{run_dir}", "{run_dir}/checkpoints/step_2"])
def test_the_run_to_be_continued_may_be_there(tmp_path, resume):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("kept")
    config = Config(run_dir=str(run_dir))
    config.training.resume = resume.format(run_dir=run_dir)
    assert make_run_dir(config) == run_dir
    assert (run_dir / "metrics.jsonl").read_text() == "kept"
    config.overwrite = True
    with pytest.raises(ConfigError, match="overwrite=true would remove the checkpoints .* Set one of them only"):
        check_run_dir(config)


def test_a_run_continued_from_elsewhere_does_not_touch_another_one(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    config = Config(run_dir=str(tmp_path))
    config.training.resume = str(tmp_path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_run_dir(config)


SECRET = "hf_value_of_it"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cluster: {address: 'ray://${oc.env:PUBLIC}.evil.invalid:10001'}", "plain record"),
        ('text: {model_name: "evil/\\x24{oc.env:PUBLIC}"}', "plain record"),
        ("data: {data_registry: {'${oc.env:PUBLIC}': {annotation_path: a}}}", "plain record"),
        ("name: ['${now:%Y}']", "plain record"),
        ("defaults: [tiny]", "it has defaults"),
        ("hydra: {mode: RUN}", "it has hydra"),
        ("[a, b]", "no keys"),
        ("", "no keys"),
        ("name: [", "cannot be read"),
        ("name: &a [*a]", "one value stands in several places"),
        ("a: &a [x]\nb: &b [*a, *a]\nname: [*b, *b]", "one value stands in several places"),
    ],
)
def test_what_a_run_does_not_write_is_refused(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUBLIC", SECRET)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        compose_recorded(file, ["cluster.address=local"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("address", ["ray://evil.invalid:10001", "127.0.0.1:19999"])
def test_a_cluster_is_joined_only_if_the_command_line_names_it(address: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"cluster: {{address: '{address}'}}\n")
    with pytest.raises(ConfigError, match=f"add cluster.address={address}"):
        compose_recorded(file)
    assert compose_recorded(file, ["cluster.address=local"]).cluster.address == "local"
    assert compose_recorded(file, [f"cluster.address={address}"]).cluster.address == address
    file.write_text("cluster: {address: auto}\n")
    assert compose_recorded(file).cluster.address == "auto"


def test_modules_are_imported_only_if_the_command_line_names_them(tmp_path: Path) -> None:
    """A record that names one could run any code that lies in a folder of this machine's PYTHONPATH."""
    file = tmp_path / "config.yaml"
    file.write_text("plugins: [antigravity, this]\n")
    with pytest.raises(ConfigError, match=r"modules whose code would run here.*add plugins=\[antigravity,this\]"):
        compose_recorded(file)
    assert compose_recorded(file, ["plugins=[my_family]"]).plugins == ["my_family"]
    assert compose_recorded(file, ["plugins=[]"]).plugins == []
    file.write_text("plugins: []\n")
    assert compose_recorded(file).plugins == []


def test_a_record_says_not_where_is_written_and_what_is_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    writing = [f"training.checkpoint_dir={folder}", f"data.cache_dir={folder}", f"memory.cache_dir={folder}"]
    writing += [f"data.cache_features={folder}", "data.cache_features_gib=1", "data.allow_http=true"]
    theirs = compose_config("tiny", overrides=["seed=5", *writing])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(theirs))
    found = compose_recorded(file)
    assert found.seed == 5 and found.text == theirs.text and str(folder) not in to_yaml(found)
    assert not found.data.allow_http and found.data.cache_features_gib is None
    mine = compose_recorded(file, writing)
    assert (mine.data, mine.memory, mine.training) == (theirs.data, theirs.memory, theirs.training)


@pytest.mark.parametrize("command", [["evaluate", "loss", "{run}"], ["generate", "checkpoint={run}", "prompt=a"]])
def test_both_commands_read_a_run_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr("dhp.cli.common.find_checkpoint", lambda _: checkpoint)
    (tmp_path / "run" / "config.yaml").write_text("cluster: {address: '${oc.env:HOME}:1'}\n")
    assert main([part.format(run=checkpoint) for part in command]) == 1
    assert "is not the plain record that a run writes" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["annotation_path", "data_path"])
def test_an_address_in_a_record_is_asked_only_if_the_command_line_names_it(field: str) -> None:
    entry = {"annotation_path": "/a.json", "data_path": "/a"} | {field: "http://169.254.169.254/a.json"}
    key = f"data.data_registry.theirs.{field}"
    data = DataConfig(data_registry={"theirs": DatasetEntry(**entry), "own": DatasetEntry("/b.json")})
    with pytest.raises(ConfigError, match=f"If you know it, add {key}=http://169.254.169.254/a.json"):
        require_named_addresses(data, ["own", "theirs%50"], ["seed=1"])
    require_named_addresses(data, ["own", "theirs"], [f"{key}=http://169.254.169.254/a.json"])
    require_named_addresses(data, ["own"], [])  # which is not read


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HF_TOKEN}",
        "${oc.env:HF_TOKEN,none}",
        "a/${oc.decode:${oc.env:WANDB_API_KEY}}",
        "${oc.env:MY_${oc.env:HALF}}",
        "${oc.env:my_password}",
        "${oc.env:AWS_SECRET}",
    ],
)
def test_a_secret_by_its_name_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET_SAUCE", "my_password", "AWS_SECRET")
    for name in names:
        monkeypatch.setenv(name, "hf_value_of_it")
    monkeypatch.setenv("HALF", "SECRET_SAUCE")
    (tmp_path / "mine.yaml").write_text(f"name: '{text}'\n")
    for name, path, overrides in (("mine", str(tmp_path), []), ("tiny", None, [f"name='{text}'"])):
        with pytest.raises(ConfigError, match=r"name: \$\{oc\.env:.* is a secret by its name") as caught:
            compose_config(name, path, overrides)
        assert "hf_value_of_it" not in str(caught.value)


def test_other_variables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "mine.yaml").write_text("run_dir: ${oc.env:SCRATCH}/a\nname: ${oc.env:NOT_SET,b}\n")
    config = compose_config("mine", str(tmp_path))
    assert (config.run_dir, config.name) == ("/scratch/a", "b")
    (tmp_path / "mine.yaml").write_text("name: ${oc.env:NOT_SET}\n")
    with pytest.raises(ConfigError, match="Environment variable 'NOT_SET' not found"):
        compose_config("mine", str(tmp_path))


SHIPPED = ConfigSource.find(None, None)


def shown(*paths: str) -> list[str]:
    """Paragraphs, each on one line."""
    return [" ".join(part.split()) for part in key_help(paths, SHIPPED).split("\n\n")]


def test_a_key_has_its_type_default_and_meaning():
    key = schema_keys()["data.balance"]
    assert shown("data.balance") == [f"data.balance: text; default `random` {key.doc}"]
    assert max(map(len, key_help(["data.balance"], SHIPPED).splitlines())) <= 110


def test_a_section_has_all_its_keys_and_its_configurations():
    lines = shown("text")
    assert lines[0].startswith(
        "text: a section of keys; text=NAME takes a configuration: data, data_zero2, data_zero3, "
    )
    told = [line.partition(": ")[0] for line in lines]
    assert told == [path for path in schema_keys() if path == "text" or path.startswith("text.")]
    assert "text.lora.rank" in told and "text.pipeline" in told


@pytest.mark.parametrize(
    ("path", "beginning"),
    [
        ("data.data_registry.mine.weight", "data.data_registry.<name>.weight: a number; default `1.0` How often"),
        ("training.betas", "training.betas: a list such as [0.9, 0.999]; default `[0.9, 0.999]` "),
        ("cluster.threads_per_actor", "cluster.threads_per_actor: a whole number or null; default `null` "),
        ("data.data_registry.mine.data_path", "data.data_registry.<name>.data_path: text; default to be set "),
        ("stages.first.settings.training.learning_rate", "stages.<name>.settings.training.learning_rate: a number; "),
    ],
)
def test_keys_of_all_kinds(path, beginning):
    (line,) = shown(path)
    assert line.startswith(beginning)


def test_several_at_once():
    assert [line.partition(":")[0] for line in shown("seed", "name")] == ["seed", "name"]


def test_what_is_no_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"^balance is not a key; did you mean data\.balance\?$"):
        shown("balance")
    with pytest.raises(ConfigError) as caught:
        shown("data.balanse", "seed", "lora_rank")
    assert str(caught.value).splitlines() == [
        "2 things are wrong:",
        "  data.balanse is not a key; did you mean data.balance?",
        "  lora_rank is not a key; here it is vision.lora.rank and text.lora.rank (0: no LoRA)",
    ]


FILE = "{{class: logging.FileHandler, filename: {file}}}"
WRITES = f"{{{{version: 1, root: {{{{handlers: [e]}}}}, handlers: {{{{e: {FILE}}}}}}}}}"
ATTACKS = {
    "a callback": "hydra: {{callbacks: {{e: {{_target_: pathlib.Path, _args_: [x]}}}}}}",
    "a call": "hydra: {{callbacks: {{e: {{_target_: builtins.open, file: {file}, mode: w}}}}}}",
    "the environment": "hydra: {{job: {{env_set: {{EVIL_SET: '1'}}}}}}",
    "a log": f"hydra: {{{{job_logging: {WRITES}}}}}",
    "a log by header": f"# @package hydra.job_logging\n{WRITES}",
    "a section that is none": "hydra: null",
    "a dotted key": "hydra.job.chdir: true",
    "swept": "hydra: {{mode: MULTIRUN, sweeper: {{params: {{hydra.job.name: 'a,b'}}}}}}",
    "a group's package": "defaults: [_self_, text@hydra.callbacks: evil]",
    "a group's package by a name": "defaults: [_self_, 'text@${{oc.env:PACKAGE}}': evil]",
    "a part of Hydra": "defaults: [_self_, override hydra/job_logging: default]",
    "a file named for Hydra": "defaults: [_self_, other/hydra]",
    "constructed deep in a value": "data: {{data_registry: {{a: {{columns: {{images: {{_target_: os.system}}}}}}}}}}",
    "constructed in a list": "stages: {{a: {{settings: {{a: [{{'()': os.system}}]}}}}}}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_cannot_make_hydra_do_anything(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setenv("PACKAGE", "hydra.callbacks")
    monkeypatch.delenv("EVIL_SET", raising=False)
    written = tmp_path / "PWNED"
    (tmp_path / "mine.yaml").write_text(ATTACKS[attack].format(file=json.dumps(str(written))) + "\n")
    for name, text in {
        "text/evil": "e: {_target_: os.getcwd}",
        "other/hydra": "# @package _name_\nverbose: true",
    }.items():
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    seen: list[object] = []
    with pytest.raises(SystemExit):
        hydra_entry(seen.append, [str(tmp_path / "mine.yaml")])
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: ") and "A YAML file is data here" in said
    assert not seen and not written.exists()
    with pytest.raises(ConfigError, match="A YAML file is data here"):
        compose_config("mine", str(tmp_path))


def test_a_file_may_say_over_what_a_sweep_goes(tmp_path: Path) -> None:
    sweep = "hydra: {mode: MULTIRUN, sweep: {dir: a, subdir: b}, sweeper: {params: {seed: '1,2'}}}\nseed: 3\n"
    (tmp_path / "mine.yaml").write_text(sweep)
    assert compose_config("mine", str(tmp_path)).seed == 3
    seen: list[int] = []
    hydra_entry(lambda config: seen.append(config.seed), [str(tmp_path / "mine.yaml"), f"hydra.sweep.dir={tmp_path}/s"])
    assert seen == [1, 2]


def test_a_file_that_unpickles_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--experimental-rerun", "--experimental-r", "--ex"):
        with pytest.raises(SystemExit):
            hydra_entry(lambda _: None, ["--config-name=tiny", flag, "job.pickle"])
        assert f"{flag} is no flag" in capsys.readouterr().err
