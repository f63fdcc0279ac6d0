"""Several adapters of one model: asked by name, and merged with weights, as plain peft computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from carpool.cli import app
from carpool.serve.served_model import find_source, open_model, use_adapter
from carpool.train.checkpoints.weighted_adapters import combine_adapters
from tests.ranks import Ranks
from tests.serve.checkpoints import greedy, save, tokenizer

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def plain(base: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


def write(base: Path, folder: Path, seed: int, **settings: Any) -> Path:
    """An adapter of random values, by peft alone."""
    torch.manual_seed(seed)
    made = get_peft_model(plain(base), LoraConfig(**settings))
    for name, one in made.named_parameters():
        if one.requires_grad:
            torch.nn.init.normal_(one, std=0.2 if "lora_" in name else 0.5)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters of it: of other layers, ranks and alphas each."""
    folder = tmp_path_factory.mktemp("several") / "base"
    save(folder, "qwen3_moe")
    one = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS, "r": 3, "lora_alpha": 7}
    write(folder, folder.parent / "a", 1, **one)
    write(folder, folder.parent / "b", 2, **one | {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 2})
    other = {"target_modules": ["k_proj"], "target_parameters": EXPERTS, "r": 2, "use_rslora": True}
    write(folder, folder.parent / "c", 3, **other, rank_pattern={"experts.down_proj": 5})
    file = folder.parent / "c/adapter_model.safetensors"  # as with adapter.dtype=bfloat16
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    return folder


def asked(base: str, adapters: list[str]) -> list[torch.Tensor]:
    """On a rank: logits of each adapter in turn, and of none, the first one again at the end."""
    source = find_source(Path(base), adapters)
    model, found = open_model(source, max_tokens=64), []
    for name in ("second", "c", None, "a"):
        use_adapter(model, source, name)
        found.append(model(input_ids=IDS).logits)
    with pytest.raises(ValueError, match="there is no adapter secnd; there are a, second, c"):
        use_adapter(model, source, "secnd")
    return found


@torch.no_grad()
def test_one_of_several_answers(two_ranks: Ranks, base: Path) -> None:
    folder = base.parent
    adapters = [f"{folder}/a", f"second={folder}/b", f"{folder}/c"]
    expected = [plain(base, name and folder / name)(input_ids=IDS).logits for name in ("b", "c", None, "a")]
    for one in (asked(str(base), adapters), *two_ranks(asked, str(base), adapters)):
        for ours, theirs in zip(one, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[2]).abs().max() > 0.1
    alone = find_source(folder / "b")
    assert (alone.build, alone.adapters) == (base, {"b": folder / "b"})
    found = open_model(alone, max_tokens=64)(input_ids=IDS).logits
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    for given, says in (
        ([f"{base}"], "is neither an adapter as peft writes it nor a run with one"),
        ([f"{folder}/a", f"a={folder}/b"], "two are called a; give others names"),
    ):
        with pytest.raises(ValueError, match=says):
            find_source(base, given)


def test_generate_and_chat_take_adapters_by_name(base: Path, tmp_path: Path) -> None:
    folder, text = base.parent, tokenizer()
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "ab", "adapter": name} for name in ("b", None, "a", "b")] + [{"prompt": "ab"}]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["--adapter", f"{folder}/a", "--adapter", f"{folder}/b", "--temperature", "0", "--max-new-tokens", "6"]
    ran = CliRunner().invoke(app, ["generate", str(base), "--prompts", str(prompts), "--ranks", "1", *options])
    assert ran.exit_code == 0, ran.stderr
    tokens = text("ab")["input_ids"]
    want = {
        name: text.decode(greedy(plain(base, name and folder / name), tokens, 6), skip_special_tokens=True)
        for name in ("a", "b", None)
    }
    assert [json.loads(line)["text"] for line in ran.stdout.splitlines()] == [
        want[name] for name in ("b", None, "a", "b", "a")
    ]
    prompts.write_text('{"prompt": "ab", "adapter": "x"}')
    ran = CliRunner().invoke(app, ["generate", str(base), "--prompts", str(prompts), "--ranks", "1", *options])
    assert ran.exit_code == 1 and "there is no adapter x; there are a, b" in ran.stderr
    turn = text("u:hi\na:")["input_ids"]
    said = [
        text.decode(greedy(plain(base, name and folder / name), turn, 6), skip_special_tokens=True)
        for name in ("a", "b", None)
    ]
    typed = "hi\n/reset\n/adapter b\nhi\n/reset\n/adapter none\n/adapter other\nhi\n"
    ran = CliRunner().invoke(app, ["chat", str(base), *options], input=typed)
    assert ran.exit_code == 0 and ran.stdout == "".join(f"{one}\n" for one in said), ran.output
    assert "adapter: b; there are a, b" in ran.stderr and "there is no adapter other" in ran.stderr


def delta(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight, by peft."""
    before, merged = plain(base).state_dict(), plain(base, adapter).merge_and_unload().state_dict()
    return {name: merged[name] - value for name, value in before.items()}


@pytest.mark.parametrize("how", ["cat", "linear"])
def test_a_sum_with_weights_is_pefts(base: Path, tmp_path: Path, how: Any) -> None:
    """Of linear layers, peft's own add_weighted_adapter; of experts, which it has none for, the definition."""
    folder, weights = base.parent, (0.7, -0.4)
    linear = {"target_modules": ["q_proj", "o_proj"], "r": 3}
    one = write(base, tmp_path / "one", 5, **linear, lora_alpha=6)
    two = write(base, tmp_path / "two", 6, **linear, lora_alpha=2, use_rslora=True)
    combine_adapters(base, [one, two], weights, how, tmp_path / "sum")
    theirs = plain(base, one)
    theirs.load_adapter(str(two), "two")
    theirs.add_weighted_adapter(["default", "two"], list(weights), "sum", combination_type=how)
    theirs.set_adapter("sum")
    with torch.no_grad():
        found = plain(base, tmp_path / "sum")(input_ids=IDS).logits
        torch.testing.assert_close(found, theirs(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    combine_adapters(base, [folder / "a", folder / "b"], weights, how, tmp_path / "experts")
    ours, a, b = (delta(base, one) for one in (tmp_path / "experts", folder / "a", folder / "b"))
    for name, value in ours.items():
        if how == "cat" or "experts" not in name:
            expected = weights[0] * a[name] + weights[1] * b[name]
            if how == "cat":
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
            continue
        files = [load_file(folder / one / "adapter_model.safetensors") for one in "ab"]
        place = name.replace("experts.gate_up_proj", "experts.base_layer").replace(".down_proj", "")
        t = [(abs(w) * alpha / 3) ** 0.5 for w, alpha in zip(weights, (7, 2), strict=True)]
        pair = [[file[f"base_model.model.{place}.lora_{kind}.weight"] for file in files] for kind in ("A", "B")]
        low = (t[0] * pair[0][0] - t[1] * pair[0][1]).unflatten(0, (8, 3))
        high = (t[0] * pair[1][0] + t[1] * pair[1][1]).unflatten(1, (3, 8))
        torch.testing.assert_close(value, torch.einsum("eqi,oqe->eoi", low, high), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_merges_several(base: Path, tmp_path: Path) -> None:
    folder = base.parent
    command = ["merge", *(str(folder / name) for name in "abc"), "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*command, "--weights", "0.5,1,-0.25"])
    assert ran.exit_code == 0 and "logits of 64 random tokens by" in ran.output, ran.output
    parts = [delta(base, folder / name) for name in "abc"]
    merged, before = plain(tmp_path / "out").state_dict(), plain(base).state_dict()
    for name, value in merged.items():
        total = 0.5 * parts[0][name] + parts[1][name] - 0.25 * parts[2][name]
        torch.testing.assert_close(value - before[name], total, rtol=1e-3, atol=1e-5)
    for name in "ac":
        ran = CliRunner().invoke(app, ["merge", str(folder / name), "--out", str(tmp_path / name)])
        assert ran.exit_code == 0, ran.output
        expected = plain(base, folder / name)(input_ids=IDS).logits
        torch.testing.assert_close(plain(tmp_path / name)(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    saved = write(base, tmp_path / "saved", 4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    for more, says in (
        (["--weights", "1,2"], "1, 2 for 3 adapters"), (["--weights", "a"], "give numbers"),
        (["--weights", "1,nan,2"], "1, nan, 2 for 3 adapters: each needs one finite number"),
        (["--combination", "linear"], "adapters of rank 3 and 5, and linear adds those of one rank"),
    ):  # fmt: skip
        ran = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "again"), *more])
        assert ran.exit_code == 1 and says in ran.stderr, ran.stderr
    ran = CliRunner().invoke(app, ["merge", str(saved), str(folder / "a"), "--out", str(tmp_path / "again")])
    assert ran.exit_code == 1 and "has trained lm_head.weight itself" in ran.stderr
