"""Configuration: defaults, files, overrides, errors that say what and where, and writing it back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from carpool.train.config import Config, ParallelismSection, TrainingSection, describe, load_config, resolve_config
from carpool.train.config.declarations import check_effects, declared
from carpool.train.config.schema import config_type, keys

UPDATED = "training.optimizer_in_backward=true training.max_grad_norm=0"
POPULAR = "memory.expert_loading=popular memory.expert_device_memory=1GiB"


def write(folder: Path, text: str) -> Path:
    path = folder / "olmoe.toml"
    path.write_text(text)
    return path


def error(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_later_wins_key_by_key(tmp_path):
    path = write(
        tmp_path,
        '[model.config]\nnum_experts = 32\nrope_parameters = {rope_theta = 1e4, rope_type = "default"}\n'
        "[training]\nmax_steps = 7\nlearning_rate = 1\n",
    )
    config = load_config(path, ["training.max_steps=9", "model.config.rope_parameters.rope_theta=5e5"])
    assert config.training.max_steps == 9
    assert config.training.learning_rate == 1.0
    assert config.training.seed == Config().training.seed
    assert config.model.config["num_experts"] == 32
    assert config.model.config["hidden_size"] == Config().model.config["hidden_size"], "the demo's, only changed"
    assert config.model.config["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}


@pytest.mark.parametrize("source", ['path = "some/folder"', 'model_type = "mixtral"', 'architecture = "X"'])
def test_another_model_starts_from_nothing(tmp_path, source):
    config = load_config(write(tmp_path, f"[model]\n{source}\nconfig = {{num_hidden_layers = 2}}\n"), [])
    assert config.model.config == {"num_hidden_layers": 2}
    assert [config.model.path, config.model.model_type, config.model.architecture].count(None) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("word", "word"),
        ("runs/a-b.c", "runs/a-b.c"),
        ('"3"', "3"),
        ("a=b", "a=b"),
        ("none", None),
        ("null", None),
        (" spaced ", "spaced"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_values_of_overrides(text, value):
    assert load_config(None, [f"model.config.key={text}"]).model.config["key"] == value


def test_lists_may_be_single_texts():
    config = load_config(None, ["data.train=a.txt", "training.report_to=tensorboard", 'data.eval=["b", "c"]'])
    assert config.data.train == ("a.txt",)
    assert config.training.report_to == ("tensorboard",)
    assert config.data.eval == ("b", "c")
    assert load_config(None, ["training.report_to=none"]).training.report_to == ()


def test_a_table_of_a_list_may_be_set_by_its_number():
    two = 'data.sources=[{path = "a", weight = 1}, {path = "b", weight = 1}]'
    sources = load_config(None, [two, "data.sources.1.weight=3", "data.sources.0.path=c"]).data.sources
    assert [(one.path, one.weight) for one in sources] == [(("c",), 1), (("b",), 3)]
    for more in ([two, "data.sources.2.weight=3"], ["data.sources.0.weight=3"]):
        assert "unknown key 0 of a source in data.sources; it takes path, weight" in error(None, *more)
    assert "unknown key weigth of a source in data.sources; did you mean weight?" in error(
        None, two, "data.sources.0.weigth=3"
    )
    assert "data.sources has 'abc': write tables" in error(None, "data.sources=abc")


def test_unknown_keys_name_the_nearest(tmp_path):
    path = write(tmp_path, "[training]\nmax_step = 3\n")
    assert error(path) == f"unknown key training.max_step in {path}; did you mean training.max_steps?"
    assert error(None, "training.max_step=3") == (
        "unknown key training.max_step on the command line; did you mean training.max_steps?"
    )
    assert error(None, "learning_rate=1").endswith("did you mean training.learning_rate?")
    assert error(None, "learning_rat=1").endswith("did you mean training.learning_rate?")
    assert error(None, "training.num_ranks=1").endswith("did you mean parallelism.num_ranks?")
    assert error(None, "paralelism.num_ranks=1") == (
        "unknown section paralelism on the command line; did you mean parallelism?"
    )
    assert "[data] knows train, sources, allow_download," in error(None, "data.zzzzqq=1")
    # A section that is no table is refused also where the command line sets one of its keys.
    (tmp_path / "a.toml").write_text("training = 3")
    assert "training is a section; set its keys" in error(tmp_path / "a.toml", "training.max_steps=3")
    (tmp_path / "a.toml").write_text("# nothing yet")
    assert "a.toml sets nothing" in error(tmp_path / "a.toml")


def test_settings_that_are_gone_are_explained_and_read_in_old_runs(tmp_path):
    assert "placement.prefetch on the command line is no setting any more" in error(None, "placement.prefetch=true")
    path = tmp_path / "config.toml"
    path.write_text("[placement]\nprefetch = false\nreplicas = 2\nevery = 3\n")
    assert "is no setting any more" in error(path)
    (tmp_path / "run.json").write_text("{}")
    assert load_config(path, []).placement.every == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_steps=many", "training.max_steps = 'many' (on the command line): expected a whole number"),
        ("training.max_steps=1.5", "training.max_steps = 1.5 (on the command line): expected a whole number"),
        ("training.max_steps=true", "training.max_steps = true (on the command line): expected a whole number"),
        ("training.max_steps=0", "training.max_steps = 0 (on the command line): expected a number above 0"),
        ("training.learning_rate=-1", "learning_rate = -1 (on the command line): expected a number at least 0"),
        ("training.learning_rate=nan", "expected a finite number"),
        ("training.adam_beta1=1", "expected a number below 1"),
        ("training.bf16=1", "training.bf16 = 1 (on the command line): expected true or false"),
        ("training.output_dir=3", "training.output_dir = 3 (on the command line): expected text"),
        ("parallelism.device=cud", "one of 'auto', 'cpu' or 'cuda' (did you mean cuda?)"),
        ("data.train=3", "data.train = 3 (on the command line): expected text or a list of texts"),
        ("data.train=[1]", "data.train = 1 (on the command line, item 0): expected text"),
        ("data.train=[]", "data.train is empty"),
        ("model.config=3", "model.config = 3 (on the command line): expected a table"),
        ("training=3", "training is a section; set its keys"),
        ("training.max_steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("training..max_steps=3", "expected section.key=value"),
        ("data.train=[a.txt]", "put single quotes around"),
        (
            "data.sequence_length=999999999",
            "per_device_train_batch_size * data.sequence_length = 11,999,999,988",
        ),
        ("parallelism.ep_size=-4", "expected a number above 0"),
        ("parallelism.num_ranks=1000000000", "1,000,000,000 ranks are more than any machine has"),
        ("parallelism.rank_speeds=fast", "'fast' (on the command line): expected 'measured' or a list of numbers"),
        ("memory.budget=76", "memory.budget = 76 (on the command line): expected a size with its unit"),
    ],
)
def test_bad_values_say_key_value_place_and_expectation(override, message):
    assert message in error(None, override)


def test_all_wrong_values_are_told_at_once(tmp_path):
    path = write(tmp_path, '[training]\nmax_steps = "3"\n[data]\nsequence_length = 1\n')
    lines = error(path, "training.seed=x").splitlines()
    assert lines == [
        f"data.sequence_length = 1 (in {path}): expected a number at least 2",
        f"training.max_steps = '3' (in {path}): expected a whole number",
        "training.seed = 'x' (on the command line): expected a whole number",
    ]


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ("moe.limit_by=groups", "moe.limit_ranks or moe.limit_nodes"),
        ("moe.first_choices_first=true", "true (on the command line) changes nothing without moe.capacity_factor"),
        ("moe.balance_scope=layer moe.router_aux_loss_coef=0", "moe.router_aux_loss_coef above 0"),
        ("moe.fp8_cache_weights=true", "moe.experts=fp8"),
        ("moe.expert_kernels=measure moe.experts=fp8", "moe.experts=grouped"),
        ("moe.chunks=3", "moe.schedule=chunks or tiles"),
        ("moe.backward_chunks=3 moe.schedule=tiles", "moe.schedule=chunks"),
        ("nvlink.leases=3 moe.transport=dedup", "moe.transport=nvlink"),
        ("codec.merge_options={similarity=0.5}", "codec.merge"),
        ("codec.inter_node=nodes moe.transport=hierarchical", "a codec"),
        ("adapter.rank=8", "adapter.kind"),
        ("training.grad_clipping=delayed", "training.optimizer_in_backward=true"),
        ("training.stop_at_step=181", "a training.max_steps"),
        ("training.early_stopping_patience=2 training.eval_strategy=no", "evaluations before the end"),
        ("training.load_best_model_at_end=true training.eval_steps=none", "evaluations before the end"),
        ("training.min_lr_ratio=0.5 training.lr_scheduler_type=constant", "training.lr_scheduler_type"),
        ("training.torch_compile_backend=eager training.torch_compile=false", "training.torch_compile"),
        ("training.sample_tokens=3 training.sample_prompt=none", "training.sample_prompt"),
        ("data.eval_max_sequences=3 data.eval_fraction=0", "held-out data"),
        ("data.eval_fraction=0.1 data.eval=stdlib", "data.eval=none"),
        ("data.text_field=a data.format=messages", "rows that are plain text"),
        ("data.pad_to=sequence_length", "data.packing=off"),
        ("data.group_by_length=false data.packing=examples", "data.packing=off"),
        ("parallelism.pp_schedule=GPipe", "parallelism.pp_size"),
        ("parallelism.sequence_parallel=off", "parallelism.tp_size"),
        ("memory.moe_outputs=recompute", "memory.layer_activations=recompute"),
        ("memory.expert_loading=popular", "memory.experts=host or disk"),
        (
            f"memory.experts=host cpu_experts.max_tokens=3 {UPDATED}",
            "memory.experts=host and memory.expert_loading=popular",
        ),
        (
            "memory.experts=host memory.expert_device_memory=1GiB training.freeze=experts",
            "memory.expert_loading=popular",
        ),
        (f"memory.experts=host memory.expert_host_memory=1GiB {UPDATED}", "memory.experts=disk"),
        ("memory.disk_folder=/tmp", "training.optimizer_offload=disk"),
        ("placement.lag=3", "placement.policy=migrate"),
    ],
)
def test_settings_that_change_nothing_are_refused(overrides, needs):
    overrides = overrides.split()
    with pytest.raises(ValueError) as caught:
        check_effects(resolve_config(None, overrides))
    name = next(one for one in str(caught.value).split() if one)
    assert name in [override.partition("=")[0] for override in overrides]
    assert "(on the command line) changes nothing without" in str(caught.value) and needs in str(caught.value)


def test_settings_that_do_something_are_not(tmp_path):
    text = ["data.turns=apart", "data.too_long=split"]
    check_effects(resolve_config(None, text))
    check_effects(resolve_config(None, text), "messages")
    with pytest.raises(ValueError, match=r"data.turns = 'apart' .* changes nothing without conversations or prompts"):
        check_effects(resolve_config(None, text), "text")
    for overrides in (
        ["parallelism=auto", "parallelism.cp_attention=ring", "memory.moe_outputs=save"],
        ["moe.transport=hierarchical", "nvlink.leases=3", "training.eval_steps=none"],
        ["placement.every=3", "placement.lag=2"],
    ):
        check_effects(resolve_config(None, overrides))
    check_effects(resolve_config(None, ["moe.transport=dedup", "nvlink.leases=3"]), compare="nvlink")
    recorded = tmp_path / "config.toml"
    recorded.write_text(Config().to_toml())
    check_effects(resolve_config(recorded))
    # The command line puts out of effect what has one in the file.
    file = write(tmp_path, "[placement]\nevery = 3\nlag = 2\n[moe]\nlimit_by = 'groups'\nlimit_ranks = 2\n")
    check_effects(resolve_config(file, ["placement.every=none", "moe.limit_ranks=none"]))
    with pytest.raises(ValueError, match=r"placement.lag = 3 \(on the command line\) changes nothing"):
        check_effects(resolve_config(file, ["placement.every=none", "placement.lag=3"]))
    file.write_text("[training]\nper_device_eval_batch_size = 1\n")
    check_effects(resolve_config(file, ["data.eval_fraction=0"]))
    file.write_text("[data]\ntrain = 'chats.jsonl'\nturns = 'apart'\n")
    check_effects(resolve_config(file, ["data.train=stdlib"]), "text")
    file.write_text("[placement]\nlag = 2\n")
    with pytest.raises(ValueError, match=r"placement.lag = 2 \(in .* changes nothing"):
        check_effects(resolve_config(file, ["training.seed=3"]))
    # A run records what a plan or a budget has chosen, and what that put out of effect.
    (tmp_path / "run.json").write_text("{}")
    recorded.write_text(Config().to_toml().replace('moe_outputs = "none"', 'moe_outputs = "save"'))
    assert resolve_config(recorded).config.memory.moe_outputs == "save"
    check_effects(resolve_config(recorded))
    assert set(declared(config_type()).needs) == {f"{section}.{key}" for section, _, key in keys()}


@pytest.mark.parametrize(
    ("overrides", "given", "nearest"),
    [
        ("memory.experts=host", "memory.experts = 'host' with training.optimizer_in_backward = false", "'device'"),
        (f"memory.experts=host {UPDATED} training.torch_compile=true", "with training.torch_compile = 'on'", "'auto'"),
        (f"memory.experts=host {UPDATED} moe.schedule=two-batch", "with moe.schedule = 'two-batch'", "'none'"),
        (f"memory.experts=disk {UPDATED} placement.every=3", "with placement.every = 3", "'device'"),
        (f"memory.experts=host {UPDATED} {POPULAR}", "with memory.expert_device_memory = '1GiB'", "'none'"),
        ("data.turns=apart data.loss=all", "data.turns = 'apart' with data.loss = 'all'", "'together'"),
        ("placement.policy=place placement.every=3", "placement.policy = 'place' with placement.every = 3", "'FILE'"),
        ("memory.expert_activations=recompute moe.experts=fp8", "with moe.experts = 'fp8'", "'none'"),
        ("memory.moe_outputs=recompute memory.expert_inputs=offload", "expert_inputs = 'offload'", "'none'"),
    ],
)
def test_settings_that_exclude_each_other(overrides, given, nearest):
    message = error(None, *overrides.split())
    assert given in message and message.endswith(nearest), message


# Settings, of [training] where no section is said, and parts of the refusal.
REFUSED = [
    ("moe.expert_kernels=measur", "'measur': expected default, measure, or a table ... did you mean measure?"),
    ("moe.expert_kernels=3", "moe.expert_kernels = 3: expected default"),
    ("moe.expert_kernels={}", "moe.expert_kernels names no stage"),
    ("moe.expert_kernels.upp=flat", "has no stage 'upp': expected one of up, down, ... did you mean up?"),
    ("moe.expert_kernels.up=flt", "up = 'flt': expected one of library, wide, flat, square ... did you mean flat?"),
    ("moe.expert_kernels.up=[1]", "moe.expert_kernels.up = [1]"),
    ("moe.expert_kernel=measure", "did you mean moe.expert_kernels?"),
    ("moe.experts=reference memory.expert_activations=recompute", "only grouped experts compute their activations"),
    ("moe.schedule=chunks moe.chunks=7 moe.backward_chunks=10", "backward_chunks"),
    ("moe.balance_batch=global moe.schedule=two-batch", "two micro-batches at a time have no order"),
    ("optimizer=muon optimizer_offload=host", "needs the one-pass optimizer ... whole matrices with themselves"),
    ("optimizer=muon optimizer_in_backward=true max_grad_norm=0", "all ranks in one order, after the backward"),
    ("optimizer=muon optimizer_state_dtype=int8", "optimizer_state_dtype = 'int8' needs the one-pass optimizer"),
    ("optimizer=muon adapter.kind=lora model.path=x data.train=x", "adapters train factors of one"),
    ("optimizer=muon optimizer_options.momentum=1.5", "momentum = 1.5: it is from 0 to below 1"),
    ("optimizer=muon optimizer_options.ns_steps=0", "ns_steps = 0: there is at least one"),
    ("optimizer=muon optimizer_options.ns_dtype='float16'", "Input should be 'bfloat16' or 'float32'"),
    ("optimizer=muon optimizer_options.nesterof=false", "did you mean training.optimizer_options.nesterov"),
    ("optimizer=torch optimizer_state_dtype=int8", "optimizer_state_dtype = 'int8' needs the one-pass optimizer"),
    ("optimizer_in_backward=true gradient_accumulation_steps=2 max_grad_norm=0", "steps = 2: each gradient is"),
    ("optimizer_in_backward=true max_grad_norm=1.0", "with training.grad_clipping = 'exact': each gradient is used"),
    ("optimizer_in_backward=true max_grad_norm=0 optimizer=torch", "in_backward = true needs the one-pass optimizer"),
    ("optimizer_offload=host placement.every=2", "placement.every moves experts with theirs between GPUs"),
    ("ema_decay=0.6 optimizer_offload=host optimizer=one-pass", "averages are on the device"),
    ("ema_decay=0.6 memory.experts=host optimizer_in_backward=true max_grad_norm=0", "once more in"),
    ("ema_decay=1.0", "a number below 1"),
    ("eval_strategy=epochs", "did you mean epoch?"),
    ("greater_is_better=true", "of which the lowest is best"),
    ("early_stopping_patience=0", "a number above 0"),
    ("lr_scheduler_type=wsd", "expected one of cosine, linear"),
    ("lr_scheduler_type=polinomial", "did you mean polynomial?"),
    ("lr_scheduler_kwargs.power=2", "schedule 'cosine' has no options"),
    ("lr_scheduler_type=polynomial lr_scheduler_kwargs.power=0", "lr_scheduler_kwargs: power = 0"),
    ("lr_scheduler_type=polynomial lr_scheduler_kwargs.power=nan", "lr_scheduler_kwargs: power = nan"),
    ("lr_scheduler_type=polynomial lr_scheduler_kwargs.lr_end=0", "is training.min_lr_ratio"),
    ("lr_scheduler_type=warmup_stable_decay lr_scheduler_kwargs.decay_type=sqrt", "'1-sqrt'"),
    ("lr_scheduler_type=warmup_stable_decay lr_scheduler_kwargs.num_decay_steps=170", "before warm-up ends"),
    ("lr_scheduler_type=warmup_stable_decay decay_from=180", "expected a step between the end of warm-up (36)"),
    (
        "lr_scheduler_type=warmup_stable_decay decay_from=100 lr_scheduler_kwargs.num_decay_steps=0.2",
        "decay_from = 100 lets the rate fall for 80 steps, to max_steps = 180, ... num_decay_steps = 0.2 for 36: leave",
    ),
    ("memory.experts=host memory.expert_loading=popular cpu_experts.max_tokens=-1", "at least 0 or 'auto'"),
    ("memory.experts=disk memory.expert_host_memory=lots", "expected a size with its unit"),
    *((f"memory.budget='{size}'", "memory.budget = ... expected a size with its unit")
      for size in ("0GiB", "GiB", "70 gigabytes", "-1GiB", "7e9B")),
    *((f"nvlink.{name}={value}", f"nvlink.{name} = ... expected") for name, value in
      (("capacity", 0), ("capacity", 1.5), ("dispatch_ctas", 65), ("dispatch_ctas", 0), ("leases", 0))),
    ("parallelism.data_parallel=zero1 parallelism.tp_size=2", "tensor parallelism divides them"),
    ("placement.every=3 placement.solver=serch", "placement.solver = 'serch': expected one of"),
    ("placement.every=3 placement.predictor=oracle", "predictor = 'oracle' (on the command line): expected one"),
    ("placement.every=3 placement.policy=degree", "set moe.spare_plan = 'all' and moe.spare_slots"),
    ("placement.every=3 placement.policy=shadow", "set moe.spare_plan = 'shadow' and moe.spare_slots"),
    ("placement.every=3 placement.replicas=1", "placement.replicas on the command line is no setting any more"),
    ("adapter.kind=lora", "needs a model to adapt"),
    *((f"model.path=x data.train=x adapter.kind={settings}", message) for settings, message in (
        ("lora adapter.base_dtype=nf4 memory.experts=host", "experts that are quantised stay"),
        ("lora adapter.targets=attention adapter.base_dtype=int8 moe.experts=fp8", "= 'int8' with moe.experts = 'fp8'"),
        ("dora", "no adapters of experts"),
        ("lora adapter.dropout=0.1", "peft has none"),
        ("lora training.freeze=non_expert", "training.freeze = 'non_expert': adapters freeze all"),
        ("lora moe.experts=fp8", "have no adapters"),
        ("lora adapter.targets=[]", "adapter.targets is empty"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_read(settings, message):
    sections = {section for section, *_ in keys()}
    words = [word.replace("'", '"') for word in re.findall(r"(?:'[^']*'|\S)+", settings)]
    found = error(None, *(word if re.split(r"[.=]", word)[0] in sections else f"training.{word}" for word in words))
    assert all(part in found for part in message.split(" ... ")), found


def test_files_that_are_none(tmp_path):
    assert "does not exist" in error(tmp_path / "missing.toml")
    assert "is a folder; name a TOML file" in error(tmp_path)
    assert "is not valid TOML" in error(write(tmp_path, "[training\n"))
    twice = error(write(tmp_path, "[training]\nmax_steps = 3\n max_steps = 4\n"))
    assert "max_steps = 4" in twice and "line 3" in twice
    assert load_config(write(tmp_path, "\ufeff[training]\nmax_steps = 3\n")).training.max_steps == 3
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not text; name a TOML file" in error(tmp_path / "binary.toml")


def test_models_that_contradict_themselves():
    assert "model.path and model.model_type contradict" in error(None, "model.path=a", "model.model_type=b")
    with pytest.raises(ValidationError, match="needs a path"):
        Config.model_validate({"model": {}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["num_ranks=4", "ep_size=8"], "ep_size = 8 is larger than the number of ranks, 4"),
        (["num_ranks=4", "tp_size=3"], "4 ranks cannot be divided by"),
        (["num_ranks=4", "tp_size=3"], "= 3 * 1 = 3. The nearest sizes that divide them: parallelism.tp_size=4"),
        (["num_ranks=8", "pp_size=4", "cp_size=4"], "that divide them: parallelism.cp_size=2"),
        (["num_ranks=8", "pp_size=4", "cp_size=4", "ep_size=4"], "that divide them: parallelism.pp_size=2"),
        (["pp_size=2", "num_ranks=4"], "cannot run 1 micro-batches: set training.gradient_accumulation_steps = 2"),
        (["num_ranks=8", "fsdp_size=4", "ep_size=8"], "fsdp_size * tp_size * dp_replicate_size = 4 * 1 * 1 = 4, but"),
        (["num_ranks=8", "dp_replicate_size=2", "ep_size=8"], "ep_size = 8 must divide fsdp_size * tp_size = 4 * 1"),
        (["fsdp_size=4", "ep_size=3"], "ep_size = 3 must divide"),
        (["fsdp_size=4", "etp_size=3"], "ep_size * etp_size = 1 * 3 = 3 must divide"),
        (["tp_size=4", "ep_size=2"], "ep_size = 2 must be a multiple of parallelism.tp_size = 4"),
        (["num_ranks=8", "cp_size=3"], "divided by parallelism.tp_size * dp_replicate_size * cp_size = 1 * 1 * 3"),
        (
            ["num_ranks=8", "cp_size=2", "pp_size=2", "ep_size=2", "etp_size=4"],
            "ep_size * etp_size = 2 * 4 = 8 must divide fsdp_size * cp_size * tp_size = 2 * 2 * 1 = 4",
        ),
    ],
)
def test_ranks_that_cannot_be_divided_so(settings, message):
    assert message in error(None, *[f"parallelism.{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("section", "world", "experts", "expected"),
    [
        ({}, 1, 16, (1, 1, 1)),
        ({}, 4, 16, (4, 4, 1)),
        ({}, 4, 6, (4, 2, 2)),
        ({}, 4, 5, (4, 1, 4)),
        ({}, 6, 16, (6, 2, 3)),
        ({"ep_size": 2}, 4, 16, (4, 2, 2)),
        ({"ep_size": 4}, 4, 10, (4, 4, 1)),
        ({"tp_size": 2}, 8, 20, (4, 4, 2)),
        ({"tp_size": 2}, 8, 5, (4, 1, 8)),
        ({"dp_replicate_size": 2}, 8, 16, (4, 4, 1)),
    ],
)
def test_derived_degrees(section, world, experts, expected):
    degrees = ParallelismSection(**section).resolve(world, experts)
    assert (degrees.fsdp, degrees.ep, degrees.efsdp) == expected
    assert degrees.world_size == degrees.dp_replicate * degrees.fsdp * degrees.tp == world
    assert degrees.efsdp * degrees.ep * degrees.dp_replicate == world


def test_all_derived_degrees_and_warmup():
    section = ParallelismSection(cp_size=2, tp_size=2, pp_size=2, etp_size=2, dp_replicate_size=2)
    degrees = section.resolve(64, 6)
    assert (degrees.fsdp, degrees.ep, degrees.efsdp, degrees.world_size) == (4, 2, 4, 64)
    with pytest.raises(ValueError, match="with 16 ranks per copy these do: 1, 2"):
        section.model_copy(update={"ep_size": 4}).resolve(64, 6)
    assert TrainingSection(max_steps=50, warmup_steps=20).warmup() == 20
    assert TrainingSection(max_steps=50, warmup_steps=0.05).warmup() == 3
    assert TrainingSection(max_steps=50, warmup_steps=0).warmup() == 0


@pytest.mark.parametrize("comments", [False, True])
def test_toml_round_trip(tmp_path, comments):
    config = load_config(
        None,
        [
            'model.config.odd={"a key" = [1, {b = "x\\"y"}], c = true, "" = -0.5}',
            "model.config.nothing=none",
            'data.train=["a \\"b\\"", "c\\nd", "é\\u007f"]',
            "training.eval_steps=none",
            "training.adam_epsilon=1e-12",
            'training.report_to=["wandb", "tensorboard"]',
        ],
    )
    text = config.to_toml(comments)
    (tmp_path / "config.toml").write_text(text)
    again = load_config(tmp_path / "config.toml", [])
    assert again == config
    assert again.to_toml(comments) == text
    for section, _, key in keys():
        assert f"\n{key} = " in text or f"[{section}.{key}]" in text, "every key is written"


def test_configs_are_frozen_described_and_travel_as_json():
    config = load_config(None, ["model.config.num_experts=8", "training.report_to=tensorboard"])
    with pytest.raises(ValidationError, match="frozen"):
        config.training.max_steps = 3
    assert config_type().model_validate_json(json.dumps(config.model_dump(mode="json"))) == config
    described = list(describe())
    assert [name for name, *_ in described] == [f"{section}.{key}" for section, _, key in keys()]
    for name, kind, default, description in described:
        assert kind and default and len(description) > 10, name
