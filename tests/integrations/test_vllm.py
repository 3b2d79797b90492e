"""vLLM's engine on our operators, beside transformers. `scripts/vllm.sh` makes the environment that these run in."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from support.parity import stable_topk

from sparse_attn.layout import LatentFp8Layout

ENGINE = Path(__file__).resolve().parents[1] / "support" / "vllm_engine.py"
LENGTHS, TOKENS = (5, 37, 130, 301), 24
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: scripts/vllm.sh"),
]
DIMS = dict(
    vocab_size=320, hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=6,
    max_position_embeddings=2048, intermediate_size=160, moe_intermediate_size=64, n_routed_experts=8,
    num_experts_per_tok=3, n_shared_experts=1, kv_lora_rank=48, q_lora_rank=56, qk_rope_head_dim=16,
    qk_nope_head_dim=24, v_head_dim=20, index_topk=24, index_head_dim=128, index_n_heads=5,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=32, beta_slow=1, mscale=1.0,
    mscale_all_dim=1.0, rope_theta=10000.0,
)  # fmt: skip
# What a published config says and transformers does not write.
PUBLISHED = dict(topk_method="noaux_tc", scoring_func="sigmoid")


# As DeepSeek publishes it. The router's kernel of vLLM for CPUs takes 256 or 384 experts.
V4 = dict(
    model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], vocab_size=320, hidden_size=128,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=64,
    o_groups=2, o_lora_rank=32, index_n_heads=4, index_head_dim=128, index_topk=24, sliding_window=128,
    compress_ratios=[0, 4, 128, 4, 0], n_routed_experts=256, num_experts_per_tok=6, n_shared_experts=1,
    moe_intermediate_size=32, scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True,
    routed_scaling_factor=1.5, num_hash_layers=1, hc_mult=4, hc_sinkhorn_iters=4, hc_eps=1e-6, rms_norm_eps=1e-6,
    hidden_act="silu", swiglu_limit=10.0, rope_theta=10000.0, compress_rope_theta=160000.0, max_position_embeddings=4096,
    rope_scaling=dict(type="yarn", rope_type="yarn", factor=4, original_max_position_embeddings=1024, beta_fast=32,
                      beta_slow=1),
    torch_dtype="bfloat16", expert_dtype="bf16", tie_word_embeddings=False, num_nextn_predict_layers=0,
)  # fmt: skip
# What transformers 5.19 saves under names that are not DeepSeek's.
V4_NAMES = (("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_"), (".attn.norm.", ".attn.kv_norm."), ("model.", ""))


def config_of(kind):
    import transformers

    if kind == "v32":
        grouped = dict(n_group=4, topk_group=2, first_k_dense_replace=1)
        return transformers.DeepseekV32Config(**DIMS, **grouped, rope_parameters=YARN)
    if kind == "v32_wide":  # dims whose latents vLLM's fp8 records hold
        wide = dict(DIMS, kv_lora_rank=512, qk_rope_head_dim=64, first_k_dense_replace=1)
        return transformers.DeepseekV32Config(**wide, n_group=4, topk_group=2, rope_parameters=YARN)
    shared = dict(indexer_types=["full", "shared", "full"]) if kind == "glm5_shared" else {}
    plain = dict(n_group=1, topk_group=1, first_k_dense_replace=1)
    # Latents are normalised with this number by vLLM, and with 1e-6, whatever it is, by transformers.
    return transformers.GlmMoeDsaConfig(**DIMS, **plain, rms_norm_eps=1e-6, **shared)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def made(kind):
        import transformers

        torch.manual_seed(77)
        if kind == "v4":
            return saved_v4(tmp_path_factory.mktemp(kind))
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.7, 1.3)
                else:
                    parameter.normal_(0, 0.3)
            for name, buffer in model.named_buffers():
                if "e_score_correction_bias" in name:
                    buffer.normal_(0, 0.1)
        folder = tmp_path_factory.mktemp(kind)
        model.float().save_pretrained(folder)
        fields = json.loads((folder / "config.json").read_text()) | PUBLISHED
        if kind.startswith("glm5"):
            fields["indexer_rope_interleave"] = True
        if kind == "glm5_shared":
            fields["index_topk_pattern"] = "FSF"  # vLLM's name of indexer_types
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return made


def saved_v4(folder):
    """Experts weigh little: where two are nearly as good, bf16 takes another than fp32."""
    import transformers
    from safetensors.torch import load_file, save_file

    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**V4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 0.02 if "experts" in name else 0.06)
            elif "norm" in name:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(1.0 if name.endswith("scale") else 0.0, 0.3)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.1)
            if "tid2eid" in name:
                buffer.copy_(torch.rand(len(buffer), V4["n_routed_experts"]).argsort(-1)[:, : buffer.shape[1]])
    model.bfloat16().save_pretrained(folder)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for theirs, deepseeks in V4_NAMES:
            name = name.replace(theirs, deepseeks)
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    (folder / "config.json").write_text(json.dumps(V4))
    return folder


def prompts_of(lengths=LENGTHS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def expected(folder_of, monkeypatch):
    """Greedy tokens of transformers' eager forward, of equal scores the first; index queries and keys as they are
    ``kept``."""

    def tokens(kind, prompts, counts, kept="fp32", records=False):
        import transformers

        monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder_of(kind), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if kept == "fp8":
            round_indexers(model)
        if records:
            round_latents(model)
        found = []
        with torch.no_grad():
            for prompt, count in zip(prompts, counts):
                ids = torch.tensor([prompt])
                for _ in range(count):
                    ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
                found.append(ids[0, len(prompt) :].tolist())
        return found

    return tokens


def round_indexers(model):
    """Have index queries and keys rounded to e4m3 with a power of two a vector, where heads meet in the product."""
    from sparse_attn.fp8 import fp8_decode, fp8_quantise

    def rounded(x):
        codes, scale = fp8_quantise(x.float(), "e4m3fn", "pow2", 1e-4)
        return fp8_decode(codes, "e4m3fn") * scale.unsqueeze(-1)

    kind = sys.modules[type(model).__module__]
    interleaved = model.config.model_type != "deepseek_v32"
    rotate = kind.apply_rotary_pos_emb_interleave if interleaved else kind.apply_rotary_pos_emb

    def forward(self, hidden, latent, embeddings, mask, *others, past_key_values=None, **more):
        rope = self.qk_rope_head_dim
        q = self.wq_b(latent).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(hidden)).unsqueeze(2)
        rotated = rotate(q[..., :rope], k[..., :rope], *embeddings, unsqueeze_dim=2)
        q, k = (rounded(torch.cat([head, x[..., rope:]], -1)) for head, x in zip(rotated, (q, k)))
        weights = self.weights_proj(hidden).float() * self.n_heads**-0.5 * self.head_dim**-0.5
        scores = torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btxd->bsht", q, k).relu())
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()

    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.forward = forward.__get__(layer.self_attn.indexer)


def e4m3(x):
    """bf16 values as index keys keep them."""
    from sparse_attn.fp8 import fp8_decode, fp8_quantise

    codes, scale = fp8_quantise(x.bfloat16().float(), "e4m3fn", "pow2", 1e-4)
    return fp8_decode(codes, "e4m3fn") * scale.unsqueeze(-1)


def round_latents(model):
    """Have latents and rotated keys rounded as records of 656 bytes keep them."""
    layout = LatentFp8Layout(model.config.kv_lora_rank, model.config.qk_rope_head_dim, scale_rule="pow2")
    for layer in model.model.layers:

        def rounded(latent, rope, expand=layer.self_attn.expand_kv):
            rows = torch.cat([latent, rope], -1).flatten(0, -2)
            cache, slots = torch.zeros(1, len(rows), layout.row, dtype=torch.uint8), torch.arange(len(rows))
            layout.encode(cache, slots, rows)
            kept = layout.decode(cache, slots).view(*latent.shape[:-1], -1)
            return expand(*kept.split([latent.shape[-1], rope.shape[-1]], -1))

        layer.self_attn.expand_kv = rounded


def left_of(session):
    """Processes of a session that still run after ten seconds."""
    for _ in range(100):
        listed = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat=,args="], capture_output=True, text=True)
        left = [line for line in listed.stdout.splitlines() if line.split()[1][0] != "Z"]
        if not left:
            break
        time.sleep(0.1)
    return left


def engine(folder, prompts=(), counts=(), index="fp32", variable="1", env=None, **job):
    """(tokens or None, what the process said)."""
    args = dict(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024, dtype="float32", enforce_eager=True)
    job["args"] = args | job.pop("args", {})
    job |= dict(model=str(folder), prompts=list(prompts), counts=list(counts))
    settings = dict(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="60",
        HF_HUB_OFFLINE="1", SPARSE_ATTN_VLLM_INDEX_CACHE=index, SPARSE_ATTN_VLLM=variable,
    )  # fmt: skip
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-P", str(ENGINE)], env=os.environ | settings | (env or {}), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as done:  # fmt: skip
        out, errors = done.communicate(json.dumps(job), timeout=600)
    said = out + errors
    assert not left_of(done.pid), said
    assert set(os.listdir("/dev/shm")) <= shared, said
    if done.returncode:
        return None, said
    return json.loads(out.rpartition("TOKENS ")[2].splitlines()[0]), said


@pytest.mark.parametrize("kind", ["v32", "glm5", "glm5_shared"])
@pytest.mark.parametrize("index", ["fp32", "fp8"])
def test_greedy_tokens_are_those_of_transformers(folder_of, expected, kind, index):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of(kind), prompts, counts, index)
    assert found == expected(kind, prompts, counts, index), said
    assert said.count("sparse_attn has indexers, selection, cache writes and attention of Multi") == 1


@pytest.mark.parametrize("index", ["fp32", "fp8"])
def test_latents_in_records_of_656_bytes(folder_of, expected, index):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of("v32_wide"), prompts, counts, index, args=dict(kv_cache_dtype="fp8_ds_mla"))
    assert found == expected("v32_wide", prompts, counts, index, records=True), said


def test_a_model_and_caches_in_bf16(folder_of):
    """No forward rounds alike, so no tokens are compared: of a prompt, alone and in company, they are the same."""
    prompts, counts, args = prompts_of(), [TOKENS] * 4, dict(dtype="bfloat16")
    together, said = engine(folder_of("v32"), prompts, counts, "bf16", args=args)
    alone, said = engine(folder_of("v32"), prompts, counts, "bf16", args=args | dict(max_num_seqs=1))
    assert together and [len(one) for one in together] == counts and together == alone, said


@pytest.mark.parametrize("processes", ["0", "1"])  # the engine in this process, or in one of its own
def test_steps_of_decode_and_prefill_rows(folder_of, expected, processes):
    prompts, counts = prompts_of(), [24, 12, 24, 24]  # the second ends early, and the fourth joins decode rows
    env, args = dict(VLLM_ENABLE_V1_MULTIPROCESSING=processes), dict(max_num_seqs=3)
    found, said = engine(folder_of("v32"), prompts, counts, "fp8", env=env, args=args)
    assert found == expected("v32", prompts, counts, "fp8"), said


def test_a_compiled_model(folder_of, expected):
    prompts, counts = prompts_of(), [TOKENS] * 4
    env, args = dict(VLLM_USE_BREAKABLE_CUDAGRAPH="0"), dict(enforce_eager=False)
    found, said = engine(folder_of("v32"), prompts, counts, env=env, args=args)
    assert found == expected("v32", prompts, counts), said
    assert "DYNAMO_TRACE_ONCE" in said  # it was compiled


def test_two_ranks(folder_of, expected):
    prompts, counts = prompts_of(), [TOKENS] * 4
    args = dict(tensor_parallel_size=2, distributed_executor_backend="mp")
    found, said = engine(folder_of("v32"), prompts, counts, args=args)
    assert found == expected("v32", prompts, counts), said


def test_two_hundred_requests_that_arrive_over_time(folder_of, expected):
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 120, (200,), generator=generator).tolist()
    prompts, counts = prompts_of(lengths), torch.randint(1, 12, (200,), generator=generator).tolist()
    found, said = engine(folder_of("v32"), prompts, counts, arriving=True)
    assert found == expected("v32", prompts, counts), said


@pytest.mark.parametrize("mutant", [
    "half_of_top_k", "keys_not_written", "latents_not_written", "plan_of_the_step_before", "ties_turned_round",
])  # fmt: skip
def test_mutants_are_caught(folder_of, expected, mutant):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of("v32"), prompts, counts, mutant=mutant)
    assert found is not None and found != expected("v32", prompts, counts), said


def test_without_the_variable_vllm_is_as_without_us(folder_of):
    found, said = engine(folder_of("v32"), [[5]], [1], variable="0")
    assert found is None and "NotImplementedError: Sparse Attention is not supported on CPU." in said
    assert "sparse_attn" not in said.replace(str(ENGINE.parents[2]), "")


@pytest.mark.parametrize("args, variable, problem", [
    ({}, "calls", "SPARSE_ATTN_VLLM: got 'calls', allowed: 1, or 0 for vLLM's own"),
    (dict(kv_cache_dtype="fp8"), "1", "kv_cache_dtype: got fp8, allowed: auto, float16, bfloat16, fp8_ds_mla"),
    (dict(kv_cache_dtype="fp8_ds_mla"), "1", "got fp8_ds_mla with latents of 48 + 16, allowed: 512 + 64"),
    (dict(enable_lora=True), "1", "lora_config: is set, allowed: not with these layers yet"),
])  # fmt: skip
def test_what_was_never_run_is_refused_by_name(folder_of, args, variable, problem):
    found, said = engine(folder_of("v32"), [[5]], [1], variable=variable, args=args)
    assert found is None and problem in said, said
    assert "Loading weights took" not in said


@pytest.fixture
def gap_of(folder_of, monkeypatch):
    """By how much greedy tokens miss the best of transformers' eager forward in fp32, in standard deviations of a
    token's logits: vLLM computes DeepSeek-V4 in bf16 alone. Index queries and keys are rounded as they are kept."""

    def gap(prompts, found):
        import transformers
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

        scores = DeepseekV4IndexerScorer.forward
        monkeypatch.setattr(
            DeepseekV4IndexerScorer, "forward", lambda self, q, keys, hidden: scores(self, e4m3(q), e4m3(keys), hidden)
        )
        monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder_of("v4"), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        worst = 0.0
        with torch.no_grad():
            for prompt, tokens in zip(prompts, found, strict=True):
                logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                missed = logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
                worst = max(worst, (missed / logits.std(-1)).max().item())
        return worst

    return gap


V4_GAP, V4_ERROR, V4_LENGTHS = 0.15, 0.01, (5, 37, 301, 700)


def v4_engine(folder, prompts, counts, args, **job):
    """(tokens, the worst error of attention, what the process said). Ranks are processes of their own, and not seen."""
    watch = "tensor_parallel_size" not in args
    found, said = engine(folder, prompts, counts, "fp8", args=dict(dtype="bfloat16") | args, watch_v4=watch, **job)
    assert found is not None and [len(one) for one in found] == counts, said
    assert "sparse_attn has selection and attention of DeepSeek-V4" in said
    worst, seen = said.rpartition("WORST ")[2].splitlines()[0].split(" OF ")
    assert watch == bool(int(seen))
    return found, float(worst), said


@pytest.mark.parametrize("env, args", [
    ({}, {}),
    ({}, dict(max_num_seqs=3)),  # rows of a prompt beside decode rows
    (dict(VLLM_USE_BREAKABLE_CUDAGRAPH="0"), dict(enforce_eager=False)),
    ({}, dict(tensor_parallel_size=2, distributed_executor_backend="mp")),
], ids=["together", "mixed", "compiled", "two ranks"])  # fmt: skip
def test_deepseek_v4(folder_of, gap_of, env, args):
    prompts, counts = prompts_of(V4_LENGTHS), [24, 12, 24, 24]
    found, worst, said = v4_engine(folder_of("v4"), prompts, counts, args, env=env)
    assert worst < V4_ERROR and gap_of(prompts, found) < V4_GAP, said


def test_deepseek_v4_of_requests_that_arrive_over_time(folder_of, gap_of):
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, 300, (40,), generator=generator).tolist()
    prompts, counts = prompts_of(lengths), torch.randint(1, 12, (40,), generator=generator).tolist()
    found, worst, said = v4_engine(folder_of("v4"), prompts, counts, {}, arriving=True)
    assert worst < V4_ERROR and gap_of(prompts, found) < V4_GAP, said


@pytest.mark.parametrize("mutant", [
    "half_of_the_entries", "half_of_the_window", "no_sink", "entries_in_the_slot_before",
])  # fmt: skip
def test_mutants_of_deepseek_v4_are_caught(folder_of, gap_of, mutant):
    prompts, counts = prompts_of(V4_LENGTHS), [24] * 4
    found, worst, said = v4_engine(folder_of("v4"), prompts, counts, {}, mutant=mutant)
    assert worst > 10 * V4_ERROR or gap_of(prompts, found) > 1.5 * V4_GAP, said


@pytest.mark.parametrize("index, args, problem", [
    ("fp32", {}, "SPARSE_ATTN_VLLM_INDEX_CACHE: got fp32, allowed: fp8 for deepseek_v4"),
    ("fp8", dict(enable_lora=True), "lora_config: is set, allowed: not with these layers yet"),
])  # fmt: skip
def test_what_deepseek_v4_was_never_run_with_is_refused(folder_of, index, args, problem):
    found, said = engine(folder_of("v4"), [[5]], [1], index, args=dict(dtype="bfloat16") | args)
    assert found is None and problem in said, said
    assert "Loading weights took" not in said


def test_deepseek_v4_without_the_variable_is_vllms_own(folder_of):
    found, said = engine(folder_of("v4"), [[5]], [1], variable="0", args=dict(dtype="bfloat16"))
    assert "sparse_attn" not in said.replace(str(ENGINE.parents[2]), "")
