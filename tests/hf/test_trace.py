"""The recorder of routing: the right tokens of the right layers, on one rank and on four."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from carpool.hf import rides
from carpool.hf.build_model import build_model
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.trace_recorder import TraceRecorder
from carpool.parallel.degrees import Degrees
from carpool.placement.trace import Trace
from carpool.train.checkpoints.record_trace import record, sequences
from carpool.train.config import load_config
from carpool.train.plan.division import distributed_config
from carpool.train.run.run import train
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import quiet
from tests.hf.test_behaviours import _model, _save
from tests.hf.tiny_models import NUM_SEQUENCES, SEQUENCE_LENGTH, discover, tiny_batch, tiny_config, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import MODEL

FOLDERS = ["olmoe", "gpt_oss", "deepseek_v3", "gemma4"]


class Watch:
    """Every layer's choices and weights of the last forward, best first, as (B * L, K) arrays."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        for name in experts_modules(model):
            model.get_submodule(name).register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        weight, order = args[2].detach().float().sort(dim=1, descending=True, stable=True)
        self.seen.append((args[1].gather(1, order).numpy(), weight.half().numpy()))


def _run(model: Any, recorder: TraceRecorder, watch: Watch, forwards: int) -> list[dict[str, Any]]:
    """Different batches; of each, its tokens and what the layers chose."""
    result = []
    for seed in range(forwards):
        batch, watch.seen = tiny_batch(model, seed), []
        model(**batch)
        result.append({"ids": batch["input_ids"].flatten().numpy(), "layers": watch.seen})
    return result


@pytest.mark.parametrize("folder", FOLDERS)
def test_stretches_of_neighbours_in_turn(folder: str) -> None:
    """Forward i takes sequence i mod B, and the next stretch once all sequences had their turn."""
    model = tiny_model(discover()[folder]).train()
    watch = Watch(model)
    with TraceRecorder(model, 200, stretch=4, weights=True) as recorder:
        runs = _run(model, recorder, watch, 10)
        trace = recorder.trace(steps=10, data="tiny")
    assert trace.layers == tuple(experts_modules(model)) and trace.num_experts == 8
    assert trace.meta["steps"] == 10 and trace.meta["data"] == "tiny"
    at = 0
    for number, run in enumerate(runs):
        first = (number % NUM_SEQUENCES) * SEQUENCE_LENGTH + 4 * ((number // NUM_SEQUENCES) % (SEQUENCE_LENGTH // 4))
        rows, own = slice(first, first + 4), slice(at, at + 4)
        assert (trace.token_T is not None) and (trace.token_T[own] == run["ids"][rows]).all()
        assert (trace.sequence_T[own] == number).all()
        for layer, (expert_TK, weight_TK) in enumerate(run["layers"]):
            assert (trace.expert_LTK[layer, own] == expert_TK[rows]).all()
            assert (trace.weight_LTK is not None) and (trace.weight_LTK[layer, own] == weight_TK[rows]).all()
        at += 4
    assert at == trace.num_tokens


def test_what_is_recorded_at_the_end_is_as_if_all_had_been() -> None:
    """Of 7 forwards the last 3: of as many places, and of one more than was recorded."""
    model = tiny_model(discover()["olmoe"]).train()
    for capacity in (12, 16):
        with TraceRecorder(model, capacity, stretch=4) as whole, TraceRecorder(model, capacity, stretch=4) as late:
            late.pause()
            _run(model, late, Watch(model), 4)
            assert not late._recorded
            late.resume(4)
            for seed in range(3):
                model(**tiny_batch(model, 10 + seed))
            one, other = whole.trace(), late.trace()
        assert other.num_tokens == 12 and np.array_equal(one.expert_LTK[:, -12:], other.expert_LTK)
        assert one.token_T is not None and np.array_equal(one.token_T[-12:], other.token_T)


def test_the_newest_are_kept_and_every_other_is_left_out() -> None:
    model = tiny_model(discover()["olmoe"]).train()
    watch = Watch(model)
    recorder = TraceRecorder(model, 15, stretch=5, every=2)
    runs = _run(model, recorder, watch, 13)
    trace = recorder.trace()
    assert trace.num_tokens == 15 and trace.weight_LTK is None
    expected = []
    for sample, forward in enumerate(range(0, 13, 2)):
        first = (sample % NUM_SEQUENCES) * SEQUENCE_LENGTH + 5 * ((sample // NUM_SEQUENCES) % 2)
        expected.append(runs[forward]["ids"][first : first + 5])
    assert (trace.token_T == np.concatenate(expected[-3:])).all()
    recorder.reset()
    _run(model, recorder, watch, 2)
    assert recorder.trace().num_tokens == 5, "what was forgotten is still there"
    recorder.close()
    _run(model, recorder, watch, 1)


@pytest.mark.parametrize("before", [1, 7])
def test_a_step_that_is_repeated_counts_once(before: int) -> None:
    """A step that did not fit into its buffers runs again, and the first time is void; also where the ring is full."""
    model, traces = tiny_model(discover()["olmoe"]).train(), []
    for voids in (0, 2):
        with TraceRecorder(model, 15, stretch=5, every=2) as recorder:
            for step in range(before + 3):
                mark = recorder.mark()
                for void in range(voids if step >= before else 0):
                    for micro in range(3):
                        model(**tiny_batch(model, 100 + void + micro))
                    recorder.rewind(mark)
                for micro in range(3):
                    model(**tiny_batch(model, 3 * step + micro))
            traces.append(recorder.trace())
    once, again = traces
    assert (once.expert_LTK == again.expert_LTK).all() and (once.sequence_T == again.sequence_T).all()
    assert once.token_T is not None and again.token_T is not None and (once.token_T == again.token_T).all()


def test_evaluation_only_if_asked_and_recompute_never() -> None:
    model = tiny_model(discover()["olmoe"])
    for evaluation, tokens in ((False, 0), (True, 2 * SEQUENCE_LENGTH)):
        with TraceRecorder(model.eval(), 1000, evaluation=evaluation) as recorder:
            for seed in range(2):
                model(**tiny_batch(model, seed))
            if tokens:
                assert recorder.trace().num_tokens == tokens
            else:
                with pytest.raises(ValueError, match="no forward was recorded yet"):
                    recorder.trace()
    plain = tiny_model(discover()["olmoe"]).train()
    with TraceRecorder(plain, 1000) as recorder:
        for seed in range(3):
            plain(**tiny_batch(plain, seed))
        expected = recorder.trace()
    for reentrant in (False, True):
        again = tiny_model(discover()["olmoe"]).train()
        again.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with TraceRecorder(again, 1000) as recorder:
            for seed in range(3):
                again(**tiny_batch(again, seed)).loss.backward()
            trace = recorder.trace()
        assert (trace.expert_LTK == expected.expert_LTK).all() and trace.num_tokens == expected.num_tokens


def test_padding_is_left_out() -> None:
    model = tiny_model(discover()["olmoe"]).train()
    batch = tiny_batch(model)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 7:] = 0
    with TraceRecorder(model, 100) as recorder:
        model(**batch, attention_mask=mask)
        trace = recorder.trace()
    assert trace.token_T is not None
    assert trace.token_T.tolist() == batch["input_ids"][0, :7].tolist()


def test_errors_say_what_is_wrong() -> None:
    model = tiny_model(discover()["olmoe"])
    with pytest.raises(ValueError, match=r"no experts module 'layers.7'; it has model.layers.0.mlp.experts"):
        TraceRecorder(model, layers=["layers.7"])
    with pytest.raises(ValueError, match="must all be at least 1"):
        TraceRecorder(model, every=0)
    with pytest.raises(ValueError, match="has no experts"):
        TraceRecorder(tiny_model(discover()["longcat_flash"]))


def test_two_batches_at_a_time_are_two_forwards() -> None:
    """Halves of a micro-batch are in the model at the same time (schedule = two-batch), and need not be equal."""
    model = tiny_model(discover()["olmoe"])
    recorder = TraceRecorder(model, 64, stretch=8)
    chosen = [torch.tensor([[sequences, 0]]).expand(sequences * 8, 2) for sequences in (1, 2)]
    weight = [torch.ones(one.shape) for one in chosen]
    with ThreadPoolExecutor(1) as pool:
        layers = range(len(recorder.layers))
        recorder._before_model(model, (), {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
        pool.submit(recorder._before_model, model, (), {"input_ids": torch.ones(2, 8, dtype=torch.long)}).result()
        for layer in layers:
            recorder._before_layer(layer, chosen[0], weight[0])
            pool.submit(recorder._before_layer, layer, chosen[1], weight[1]).result()
    trace = recorder.trace()
    assert trace.token_T is not None and trace.token_T.tolist() == [0] * 8 + [1] * 8
    assert (trace.expert_LTK[..., 0] == [1] * 8 + [2] * 8).all()


def test_on_the_device_nothing_is_read() -> None:
    """A hot path that reads a value cannot run on the meta device, which has none."""
    model = tiny_model(discover()["olmoe"]).train()
    recorder = TraceRecorder(model, 64, weights=True)
    ids = torch.zeros(NUM_SEQUENCES, SEQUENCE_LENGTH, dtype=torch.int64, device="meta")
    recorder._before_model(model, (), {"input_ids": ids})
    rows = torch.zeros(ids.numel(), 2, device="meta")
    recorder._before_layer(0, rows.long(), rows)
    assert recorder._expert_LCK is not None and recorder._expert_LCK.device.type == "meta"


def _four(path: str, sizes: dict[str, int]) -> tuple[Trace, list[list[Any]], int]:
    _save("olmoe", path)
    model = _model("olmoe", path, sizes=sizes)
    assert rides(model)
    watch, recorder = Watch(model), TraceRecorder(model, 96, stretch=8)
    rank = dist.get_rank() // sizes.get("tp_size", 1)
    seen = []
    for seed in range(5):
        watch.seen = []
        ids = tiny_batch(model, seed)["input_ids"][rank : rank + 1]
        model(input_ids=ids, labels=ids).loss.backward()
        seen.append([ids[0].tolist(), [expert_TK for expert_TK, _ in watch.seen]])
    trace = recorder.trace()
    recorder.close()
    return trace, seen, model._mesh_manager.get_mesh("tp").get_local_rank()


@pytest.mark.parametrize("sizes", [{}, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}], ids=["fsdp", "tp"])
def test_four_ranks_make_one_trace(ranks: Ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    results = ranks(_four, str(tmp_path), sizes)
    trace = results[0][0]
    assert all((other.expert_LTK == trace.expert_LTK).all() for other, _, _ in results)
    assert all((other.sequence_T == trace.sequence_T).all() for other, _, _ in results)
    data_ranks = [seen for _, seen, copy in results if copy == 0]
    places = 96 // 8 // len(data_ranks)
    samples = list(range(5))[-places:]
    number = 0
    for sample in samples:
        for rank, seen in enumerate(data_ranks):
            rows = trace.sequence_T == number
            ids, layers = seen[sample]
            assert trace.token_T is not None
            assert trace.token_T[rows].tolist() == ids[:8]
            assert set(trace.source_T(len(data_ranks))[rows]) == {rank}
            for layer, expert_TK in enumerate(layers):
                assert (trace.expert_LTK[layer, rows] == expert_TK[:8]).all()
            number += 1
    assert trace.num_sequences == number


def _divided(sequences: int) -> tuple[Trace, list[Any], list[list[Any]]]:
    """The trace of ranks that divide the tokens of each batch, the batches, and what this rank's layers chose."""
    quiet()
    reuse_meshes()
    config = distributed_config(Degrees(tp=2, ep=2), bf16=False)
    blueprint = tiny_config(discover()["olmoe"])
    model = build_model(blueprint, distributed_config=config, dtype=torch.float32, seed=0, sequence_parallel=True)
    watch, recorder = Watch(model), TraceRecorder(model, 256, stretch=64)
    batches = [tiny_batch(model, seed)["input_ids"][:sequences] for seed in range(2)]
    for ids in batches:
        model(input_ids=ids)
    layers = len(recorder.layers)
    seen = [expert_TK for expert_TK, _ in watch.seen]
    return recorder.trace(), [ids.flatten().numpy() for ids in batches], [seen[:layers], seen[layers:]]


@pytest.mark.parametrize("sequences", [2, 3])
def test_ranks_that_divide_tokens_record_their_own(two_ranks: Ranks, sequences: int) -> None:
    """Each has whole sequences of a batch of two, and not of one of three."""
    (trace, batches, _), *_ = results = two_ranks(_divided, sequences)
    assert trace.num_sequences == 4 and trace.token_T is not None
    whole = sequences == 2
    each = SEQUENCE_LENGTH * sequences // 2 + (not whole)
    for number in range(4):
        forward, rank = divmod(number, 2)
        rows = trace.sequence_T == number
        assert trace.token_T[rows].tolist() == batches[forward][rank * each : (rank + 1) * each].tolist()
        for layer, expert_TK in enumerate(results[rank][2][forward]):
            assert (trace.expert_LTK[layer, rows] == expert_TK).all()


def test_record_from_a_checkpoint(tmp_path: Path) -> None:
    """As a forward of the same sequences without a recorder."""
    model = tiny_model(discover()["olmoe"], vocab_size=320).eval()
    model.save_pretrained(tmp_path / "model")
    text = "".join(f"line {i} of the text\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    trace = record(
        tmp_path / "model",
        [str(tmp_path / "a.txt")],
        tokens=100,
        sequence_length=32,
        cache_dir=str(tmp_path / "cache"),
        weights=True,
        tokenizer="bytes",
        note="x",
    )
    assert trace.num_tokens == 128 and trace.num_sequences == 4 and trace.meta["note"] == "x"
    assert trace.meta["data"] == str(tmp_path / "a.txt") and trace.meta["checkpoint"] == str(tmp_path / "model")
    ids = np.frombuffer(text.encode(), dtype=np.uint8)[: len(text) // 32 * 32].reshape(-1, 32)
    chosen = [i * len(ids) // 4 for i in range(4)]
    assert trace.token_T is not None and (trace.token_T.reshape(4, 32) == ids[chosen]).all()
    watch = Watch(model)
    for number, row in enumerate(chosen):
        watch.seen = []
        model(input_ids=torch.from_numpy(ids[row : row + 1].astype(np.int64)))
        for layer, (expert_TK, _) in enumerate(watch.seen):
            # Summation orders differ between the model's experts and the loaded ones', so a rare tie may flip.
            same = trace.expert_LTK[layer, number * 32 : number * 32 + 32] == expert_TK
            assert same.mean() > 0.98
    with pytest.raises(ValueError, match="fewer than one sequence"):
        sequences(np.arange(5), 8, 1)
    with pytest.raises(ValueError, match=r"sequence_length = 1,000,000 is more than the .* tokens that .*model sees"):
        record(tmp_path / "model", [str(tmp_path / "a.txt")], sequence_length=10**6, tokenizer="bytes")
    tiny_model(discover()["olmoe"]).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="was trained with 96"):
        record(tmp_path / "small", [str(tmp_path / "a.txt")], tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="has weights and no tokenizer"):
        record(tmp_path / "small", [str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "cache"))


def _train(path: str) -> None:
    short = ["training.max_steps=1", "training.warmup_steps=0", "training.eval_on_start=false"]
    train(load_config(None, [*MODEL, *short, f"data.train={path}/a.txt", f"data.cache_dir={path}/cache",
                             f"training.output_dir={path}/run"]), command="test")  # fmt: skip


def test_record_from_a_run(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(4000)))
    two_ranks(_train, str(tmp_path))
    trace = record(tmp_path / "run", tokens=64, cache_dir=str(tmp_path / "cache"))
    assert trace.num_tokens == 64 and trace.meta["sequence_length"] == 32 and trace.num_experts == 8
    assert trace.top_k == 3 and trace.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    with pytest.raises(ValueError, match="has its own tokenizer"):
        record(tmp_path / "run", tokenizer="bytes")
